"""The inner loop against the authors' own code: losses and meta-gradients, number by number.

`tests/golden/*.json` holds figures that the authors' public TensorFlow code gave in float64 on inputs that NumPy's
legacy generator rebuilds here: weights from `seed`, images from `seed + 1`, noise from `seed + 2`.
`tests/golden/as_run/*.json` holds what it gives on the same inputs the way it trains: in float32, with TensorFlow's
fused batch normalisation inside `tf.map_fn`, where that operation has no second derivative.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import metadropout as md
from metadropout.ops import kernels

CASES = sorted(Path(__file__).parent.joinpath("golden").glob("*.json"))
FLOAT32_STABLE = ["maml_omniglot", "metadropout_omniglot"]  # no ReLU or maximum close to flipping


def load(name: str) -> dict[str, Any]:
    return json.loads(Path(__file__).parent.joinpath("golden", f"{name}.json").read_text())  # type: ignore[no-any-return]


def draw(r: np.random.RandomState, shape: list[int], scale: float = 1.0) -> np.ndarray:
    return (r.randn(*shape) * scale).astype("float32").astype("float64")


def to_torch(name: str, value: np.ndarray) -> Tensor:
    """From the authors' layout (HWIO, NHWC features) to PyTorch's."""
    if value.ndim == 4:
        return torch.from_numpy(value.transpose(3, 2, 0, 1).copy())
    if "dense_w" in name:
        features, outputs = value.shape
        side = math.isqrt(features // 64)
        return torch.from_numpy(
            value.reshape(side, side, 64, outputs).transpose(3, 2, 0, 1).reshape(outputs, -1).copy()
        )
    return torch.from_numpy(value)


def from_torch(name: str, value: Tensor) -> np.ndarray:
    """The way back, for comparing entries in the authors' order."""
    array = value.numpy(force=True).astype("float64")
    if array.ndim == 4:
        return array.transpose(2, 3, 1, 0)
    if "dense_w" in name:
        outputs, features = array.shape
        side = math.isqrt(features // 64)
        return array.reshape(outputs, 64, side, side).transpose(2, 3, 1, 0).reshape(features, outputs)
    return array


def parameter_name(name: str) -> str:
    """`theta/conv1_w:0` → `network.blocks.0.conv.weight`, and so on."""
    scope, _, rest = name.removesuffix(":0").partition("/")
    kind = "weight" if rest.endswith("_w") else "bias"
    if scope.endswith("_bn"):
        return f"network.blocks.{int(scope[4]) - 1}.norm.bias"
    where = {"theta": ("network", "."), "phi": ("perturbation.generators", "/")}[scope]
    layer = "head" if rest.startswith("dense") else f"blocks{where[1]}{int(rest[4]) - 1}{where[1]}conv"
    return f"{where[0]}.{layer}.{kind}"


def build(case: dict[str, Any], dtype: torch.dtype, **options: bool) -> tuple[md.MAML, md.Episode, md.RecordedNoise]:
    way, shot, query = case["way"], case["shot"], case["query"]
    network = md.Conv4(way=way)
    perturbation = md.NoPerturbation(network) if case["maml"] else md.MetaDropout(network)
    learner = md.MAML(network, perturbation, inner_lr=case["inner_lr"], steps=case["steps"], **options).to(dtype)
    parameters = dict(learner.named_parameters())
    r = np.random.RandomState(case["seed"])
    with torch.no_grad():
        for variable in case["variables"]:
            value = to_torch(variable["name"], draw(r, variable["shape"], 0.1))
            if variable["name"] not in case["no_grad"]:
                parameters.pop(parameter_name(variable["name"])).copy_(value)
    assert not parameters, f"not set: {list(parameters)}"

    r = np.random.RandomState(case["seed"] + 1)

    def images(n: int) -> Tensor:
        flat = r.rand(n, 28 * 28).astype("float32")
        return torch.from_numpy(flat.reshape(n, 28, 28, 1).transpose(0, 3, 1, 2)).to(dtype)

    labels = torch.arange(way)
    episode = md.Episode(
        images(way * shot), labels.repeat_interleave(shot), images(way * query), labels.repeat_interleave(query)
    )
    r = np.random.RandomState(case["seed"] + 2)
    shapes = case["noise_shapes_per_step"]
    draws = [torch.from_numpy(draw(r, shape)) for _ in range(case["steps"]) for shape in shapes]
    noise = md.RecordedNoise([d.permute(0, 3, 1, 2) if d.dim() == 4 else d for d in draws], per_pass=len(shapes))
    return learner, episode, noise


@pytest.fixture(params=["winograd-2", "winograd-4", "plain"])
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    """The compiled kernels, with both sizes of tiles for convolutions, and PyTorch's own operations."""
    if request.param != "plain":
        if not kernels.available():
            pytest.skip("no C++ compiler for the kernels")
        with kernels.using({"*": request.param}):
            yield request.param
    else:
        with kernels.disabled():
            yield "plain"


@pytest.mark.parametrize("case", [path.stem for path in CASES])
def test_float64_agrees_with_the_authors_code_to_1e_8(case: str, path: str) -> None:
    golden = load(case)
    learner, episode, noise = build(golden, torch.float64)
    result = learner.task_gradient(episode, generator=noise)

    assert result.loss.item() == pytest.approx(golden["query_loss"], rel=1e-8)
    assert result.accuracy.item() == pytest.approx(golden["query_accuracy"], abs=1e-6)
    compared = 0
    for name, expected in golden["grads"].items():
        gradient = from_torch(name, result.gradients[parameter_name(name)])
        # A convolution bias before normalisation has a true gradient of zero: only rounding stands there.
        is_rounding = expected["norm"] < 1e-9
        norm = np.linalg.norm(gradient)
        if is_rounding:
            assert norm < 1e-9, name
            continue
        entry = expected["norm"] / math.sqrt(gradient.size)
        assert norm == pytest.approx(expected["norm"], rel=1e-8), name
        assert gradient.sum() == pytest.approx(expected["sum"], abs=1e-8 * expected["norm"] * math.sqrt(gradient.size))
        np.testing.assert_allclose(gradient.ravel()[:5], expected["first"], rtol=0, atol=1e-8 * entry, err_msg=name)
        compared += 1
    assert compared == (10 if golden["maml"] else 24)


@pytest.mark.parametrize("threads", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("case", FLOAT32_STABLE)
def test_float32_agrees_with_the_authors_code_where_it_is_stable(
    case: str, memory_format: torch.memory_format, threads: int, path: str
) -> None:
    # PyTorch's batch normalisation adds up its statistics in float32; the kernels do so in float64.
    tolerance = 2e-5 if path == "plain" else 1e-5
    golden = load(case)
    learner, episode, noise = build(golden, torch.float32)
    learner.to(memory_format=memory_format)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        result = learner.task_gradient(episode, generator=noise)
    finally:
        torch.set_num_threads(before)
    assert result.loss.item() == pytest.approx(golden["query_loss"], rel=1e-6)
    for name, expected in golden["grads"].items():
        gradient = result.gradients[parameter_name(name)].double()
        norm = gradient.norm().item()
        if expected["norm"] < 1e-9:
            assert norm < 1e-4, name
        else:
            # In a single number terms cancel, and processors add up a linear layer's in different orders.
            allowed = max(tolerance, 2e-5) if gradient.numel() == 1 else tolerance
            assert norm == pytest.approx(expected["norm"], rel=allowed), name


@pytest.mark.parametrize("case", FLOAT32_STABLE)
def test_without_normalisations_second_derivative_it_is_the_authors_program_as_it_runs(case: str, path: str) -> None:
    golden, as_run = load(case), load(f"as_run/{case}")
    learner, episode, noise = build(golden, torch.float64, norm_second_order=False)
    result = learner.task_gradient(episode, generator=noise)
    assert result.loss.item() == pytest.approx(golden["query_loss"], rel=1e-8)
    differ = 0
    for name, expected in as_run.items():
        gradient = from_torch(name, result.gradients[parameter_name(name)])
        if expected["norm"] < 1e-4:  # rounding: see above
            assert np.linalg.norm(gradient) < 1e-4, name
            continue
        entry = expected["norm"] / math.sqrt(gradient.size)
        assert np.linalg.norm(gradient) == pytest.approx(expected["norm"], rel=1e-4), name
        np.testing.assert_allclose(gradient.ravel()[:5], expected["first"], rtol=0, atol=1e-3 * entry, err_msg=name)
        differ += abs(expected["norm"] / golden["grads"][name]["norm"] - 1) > 1e-2
    assert differ >= (1 if golden["maml"] else 15)  # it is another gradient than the exact one
