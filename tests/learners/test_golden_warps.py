"""MT-Net, MAML as in its code, and CAVIA against the authors' own code: losses and meta-gradients, number by number.

Every file of `tests/golden/learners` says from which code and commit it comes. Weights, images and the uniform numbers
behind the masks are rebuilt here by NumPy's legacy generator.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import metadropout as md
from metadropout.learners import CAVIA, MTNet

FOLDER = Path(__file__).parent.parent / "golden" / "learners"


def load(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / f"{name}.json").read_text())  # type: ignore[no-any-return]


def draw(r: np.random.RandomState, shape: list[int], scale: float) -> np.ndarray:
    return (r.randn(*shape) * scale).astype("float32").astype("float64")


def assert_gradients_agree(expected: dict[str, Any], gradient_of: Callable[[str], np.ndarray], scale: float) -> int:
    """Compare norm, sum and first entries to 1e-8; return how many are compared, those that are rounding left out."""
    compared = 0
    for name, golden in expected.items():
        gradient, norm = gradient_of(name) * scale, golden["norm"]
        if norm < 1e-9:  # a convolution's bias before a normalisation
            assert np.linalg.norm(gradient) < 1e-9, name
            continue
        size = math.sqrt(gradient.size)
        assert list(gradient.shape) == golden["shape"], name
        assert np.linalg.norm(gradient) == pytest.approx(norm, rel=1e-8), name
        assert gradient.sum() == pytest.approx(golden["sum"], abs=1e-8 * norm * size), name
        np.testing.assert_allclose(gradient.ravel()[:5], golden["first"], rtol=0, atol=1e-8 * norm / size, err_msg=name)
        compared += 1
    return compared


# MT-Net's code: TensorFlow's layout, T on the right.


def mtnet_name(name: str) -> str:
    if name.endswith("/beta"):
        return f"network.blocks.{name[0]}.norm.bias"
    layer, _, kind = name.partition("_")
    number = int(layer[-1])
    dotted = "head" if number == 5 else f"blocks.{number - 1}.conv"
    if kind:
        return f"{ {'f': 'warps', 'prob': 'mask_logits'}[kind] }.{dotted.replace('.', '/')}"
    return f"network.{dotted}.{'bias' if layer[0] == 'b' else 'weight'}"


def to_torch(name: str, value: np.ndarray, channels: int) -> Tensor:
    if name.endswith("_f"):  # y·T there, T·y here; a first axis for the groups of a convolution
        value = value.reshape(value.shape[-2:]).T[None]
    elif value.ndim == 4:
        value = value.transpose(3, 2, 0, 1)
    elif value.ndim == 2:
        side, way = math.isqrt(len(value) // channels), value.shape[1]
        value = value.reshape(side, side, channels, way).transpose(3, 2, 0, 1).reshape(way, -1)
    return torch.from_numpy(value.copy())


def from_torch(name: str, value: Tensor, channels: int) -> np.ndarray:
    array = value.numpy(force=True)
    if name.endswith("_f"):
        return array[0].T if name.startswith("w5") else array[0].T[None, None]
    if array.ndim == 4:
        return array.transpose(2, 3, 1, 0)
    if array.ndim == 2:
        way, side = len(array), math.isqrt(array.shape[1] // channels)
        return array.reshape(way, channels, side, side).transpose(2, 3, 1, 0).reshape(-1, way)
    return array


class GivenMasks(md.SeededNoise):
    """Gives the normal draws from which the masks of the golden run come."""

    def __init__(self, case: dict[str, Any]) -> None:
        super().__init__(0)
        r = np.random.RandomState(case["seed"] + 2)
        sizes = [4, 4, 4, 4, case["way"]]
        self.uniform = [torch.from_numpy(r.rand(size, 2)) for size in sizes]

    def fork(self) -> md.RecordedNoise:  # type: ignore[override]
        gumbel = [-torch.log(-torch.log(u + 1e-20) + 1e-20) for u in self.uniform]
        logistic = [g[:, 0] - g[:, 1] for g in gumbel]
        draws = [torch.special.ndtri(torch.sigmoid(value)) for value in logistic]
        return md.RecordedNoise(draws, per_pass=len(draws))


def build_mtnet(case: dict[str, Any]) -> tuple[md.MAML, md.Episode, GivenMasks]:
    way, shot, query, channels = case["way"], case["shot"], case["query"], case["channels"]
    network = md.Conv4(way, in_channels=3, image_size=84, channels=channels)
    kind = MTNet if case["use_T"] else md.MAML
    rate, steps = case["inner_lr_on_mean_loss"], case["steps"]
    learner = kind(network, inner_lr=rate, steps=steps, first_order=case["first_order"]).double()
    parameters = dict(learner.named_parameters())
    r = np.random.RandomState(case["seed"])
    with torch.no_grad():
        for variable in case["variables"]:
            name, shape = variable["name"], variable["shape"]
            value = draw(r, shape, 1.0 if name.endswith("_prob") else case["scale"])
            if name.endswith("_f"):
                value += np.eye(shape[-1])
            parameters.pop(mtnet_name(name)).copy_(to_torch(name, value, channels))
    assert not parameters, f"not set: {list(parameters)}"
    r = np.random.RandomState(case["seed"] + 1)

    def images(n: int) -> Tensor:
        flat = r.rand(n, 84 * 84 * 3).astype("float32").astype("float64")
        return torch.from_numpy(flat.reshape(n, 84, 84, 3).transpose(0, 3, 1, 2).copy())

    labels = torch.arange(way)
    support, asked = images(way * shot), images(way * query)
    episode = md.Episode(support, labels.repeat_interleave(shot), asked, labels.repeat_interleave(query))
    return learner, episode, GivenMasks(case)


@pytest.mark.parametrize("name", ["mtnet", "mtnet_maml", "mtnet_fomaml"])
def test_mtnet_agrees_with_the_authors_code_to_1e_8(name: str) -> None:
    case = load(name)
    learner, episode, noise = build_mtnet(case)
    if isinstance(learner, MTNet):
        drawn = learner.inner_init(learner.initial_weights(), noise)
        assert [mask.tolist() for mask in drawn.values()] == list(case["masks"].values())
    outcome = learner.forward(episode, generator=noise)
    torch.testing.assert_close(outcome.logits, torch.tensor(case["logits"], dtype=torch.float64), rtol=1e-9, atol=1e-9)
    result = learner.task_gradient(episode, generator=noise)
    assert result.loss.item() == pytest.approx(case["query_loss"], rel=1e-8)
    assert result.accuracy.item() == pytest.approx(case["query_accuracy"], abs=1e-6)
    compared = assert_gradients_agree(
        case["grads"],
        lambda name: from_torch(name, result.gradients[mtnet_name(name)], case["channels"]),
        case["way"] * case["query"] / case["shot"],  # theirs are of the sum over images, divided by the shots
    )
    assert compared == (20 if case["use_T"] else 10)


# CAVIA's code: PyTorch's layout.


def cavia_name(name: str) -> str:
    layer, _, kind = name.partition(".")
    if layer == "fc1":
        return f"network.head.{kind}"
    part = {"conv": "conv", "bn": "norm", "film": "film"}[layer[:-1]]
    return f"network.blocks.{int(layer[-1]) - 1}.{part}.{kind}"


def build_cavia(case: dict[str, Any]) -> tuple[CAVIA, list[md.Episode]]:
    way, filters = case["way"], case["filters"]
    network = md.Conv4(way, in_channels=3, image_size=28, channels=filters, norm="batch", context=case["context"])
    learner = CAVIA(network, inner_lr=case["inner_lr"], steps=case["steps"]).double()
    parameters = dict(learner.named_parameters())
    r = np.random.RandomState(case["seed"])
    with torch.no_grad():
        for variable in case["variables"]:
            name = variable["name"]
            value = draw(r, variable["shape"], case["scale"])
            if name.startswith("bn") and name.endswith("weight"):
                value += 1
            if name == "film3.bias":
                value += np.array([1] * filters + [0] * filters)
            parameters.pop(cavia_name(name)).copy_(torch.from_numpy(value))
    assert not parameters, f"not set: {list(parameters)}"
    r = np.random.RandomState(case["seed"] + 1)
    labels = torch.arange(way)

    def images(n: int) -> Tensor:
        return torch.from_numpy(r.rand(n, *case["image"]).astype("float32").astype("float64"))

    episodes = []
    for _ in range(case["tasks"]):
        support, query = images(way * case["shot"]), images(way * case["query"])
        support_y, query_y = (labels.repeat_interleave(case[key]) for key in ("shot", "query"))
        episodes.append(md.Episode(support, support_y, query, query_y))
    return learner, episodes


def test_cavia_agrees_with_the_authors_code_to_1e_8() -> None:
    case = load("cavia")
    learner, episodes = build_cavia(case)
    assert learner.adapted_names == ["network.blocks.2.film.context"]
    for episode, context in zip(episodes, case["context_after"], strict=True):
        adapted = learner.adapted_weights(episode.support_x, episode.support_y)
        np.testing.assert_allclose(adapted["network.blocks.2.film.context"], context, rtol=1e-8)
    results = [learner.task_gradient(episode) for episode in episodes]
    np.testing.assert_allclose([r.loss for r in results], case["query_losses"], rtol=1e-8)
    np.testing.assert_allclose([r.accuracy for r in results], case["query_accuracies"], atol=1e-6)

    def mean(name: str) -> np.ndarray:
        return torch.stack([r.gradients[cavia_name(name)] for r in results]).mean(dim=0).numpy()

    assert max(np.abs(mean(name)).max() for name in case["grads"]) == pytest.approx(case["max_abs"], rel=1e-8)
    assert assert_gradients_agree(case["grads"], mean, 1.0) == 16
