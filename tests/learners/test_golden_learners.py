"""Reptile, Meta-Learner LSTM, ABML and Probabilistic MAML against their authors' or others' code."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import metadropout as md
from golden_cases import NAMES, TwoLayers, assert_agrees, draw, load, recorded, vectors
from metadropout.config import TrainingOptions
from metadropout.learners import lstm
from metadropout.training.outer import OuterOptimizer


def test_abml_has_the_objective_gradients_and_posterior_of_a_re_implementation() -> None:
    case = load("abml")
    network = TwoLayers().double()
    images = case["way"] * (case["shot"] + case["query"])
    learner = md.ABML(
        network,
        inner_lr=case["inner_lr"],
        steps=case["steps"],
        kl_weight=case["kl_weight"] * images,
        inner_kl_weight=case["kl_weight"] * case["way"] * case["shot"],
        prior_weight=1.0,
        support_term=False,  # the re-implementation's choice
    ).double()
    r = np.random.RandomState(case["seed"])
    with torch.no_grad():
        for name in NAMES.values():
            network.get_parameter(name).copy_(draw(r, list(network.get_parameter(name).shape), 0.5))
        for name in NAMES.values():
            rho = learner.log_std[f"network.{name}".replace(".", "/")]
            rho.copy_(draw(r, list(rho.shape), 0.3) - 1)
    episode, noise = vectors(case), recorded(case, case["steps"] + 1, case["seed"] + 2)
    result = learner.task_gradient(episode, generator=noise)
    assert result.loss.item() == pytest.approx(case["objective"], rel=1e-12)
    adapted = learner.adapted_weights(episode.support_x, episode.support_y, mc_samples=1, generator=noise)
    for short, name in NAMES.items():
        mean, rho = f"network.{name}", f"log_std.network/{name.replace('.', '/')}"
        assert_agrees(result.gradients[mean], case["grads"][f"mean.{short}"], name=mean)
        assert_agrees(result.gradients[rho], case["grads"][f"log_std.{short}"], name=rho)
        assert_agrees(adapted[mean], case["adapted"][f"mean.{short}"], name=mean)
        assert_agrees(adapted[rho], case["adapted"][f"log_std.{short}"], name=rho)


def test_probabilistic_maml_has_the_objective_gradients_and_test_losses_of_a_re_implementation() -> None:
    case = load("platipus_1step")
    network = TwoLayers().double()
    learner = md.Platipus(
        network,
        inner_lr=case["inner_lr"],
        steps=case["steps"],
        kl_weight=case["kl_weight"] * case["way"] * (case["shot"] + case["query"]),
        train_samples=case["samples"],
    ).double()
    r = np.random.RandomState(case["seed"])
    sizes = [int(np.prod(shape)) for shape in case["shapes"].values()]
    values = {"": draw(r, (53,), 0.5), "prior_std": draw(r, (53,), 0.3) - 1, "posterior_std": draw(r, (53,), 0.3) - 1}
    keys = {
        "": [f"network.{name}" for name in NAMES.values()],
        **{
            which: [f"{which}.network/{name.replace('.', '/')}" for name in NAMES.values()]
            for which in ("prior_std", "posterior_std")
        },
    }
    parameters = dict(learner.named_parameters())
    with torch.no_grad():
        for which, vector in values.items():
            for key, part in zip(keys[which], vector.split(sizes), strict=True):
                parameters[key].copy_(part.view_as(parameters[key]))
        learner.prior_lr.fill_(case["gamma_p"])
        learner.posterior_lr.fill_(case["gamma_q"])
    episode, noise = vectors(case), recorded(case, 2, case["seed"] + 2, mc_samples=2)
    result = learner.task_gradient(episode, generator=noise)
    assert result.loss.item() == pytest.approx(case["objective"], rel=1e-12)
    for which, name in {"": "mu", "prior_std": "log_sigma", "posterior_std": "log_v"}.items():
        vector = torch.cat([result.gradients[key].flatten() for key in keys[which]])
        assert_agrees(vector, case["grads"][name], name=name)
    assert_agrees(result.gradients["prior_lr"], case["grads"]["gamma_p"], name="gamma_p")
    assert_agrees(result.gradients["posterior_lr"], case["grads"]["gamma_q"], name="gamma_q")

    noise = recorded(case, 2, case["seed"] + 3, mc_samples=2)
    models = learner.adapted_models(episode.support_x, episode.support_y, 2, noise)
    losses = [learner.query_loss(model, episode, noise)[0].item() for model in models]
    assert losses == pytest.approx(case["test_query_losses"], rel=1e-12)


def test_the_lstm_cell_gives_the_weights_and_gradients_of_a_re_implementation(monkeypatch: pytest.MonkeyPatch) -> None:
    case = load("lstm_cell")
    # The re-implementation's logarithm, which has 1e-8 inside.
    monkeypatch.setattr(lstm, "preprocessed", partial(lstm.preprocessed, inside=1e-8))
    network = nn.Linear(6, 1)
    learner = md.MetaLSTM(network, steps=case["steps"]).double()
    r = np.random.RandomState(case["seed"])
    given = {v["name"]: draw(r, v["shape"], 0.3) for v in case["variables"]}
    with torch.no_grad():
        learner.lstm.weight.copy_(torch.cat([given["lstm.weight_ih"], given["lstm.weight_hh"]], dim=1))
        learner.lstm.bias.copy_(given["lstm.bias_ih"] + given["lstm.bias_hh"])
        for part, key, shift in ((learner.forget_gate, "F", 4.5), (learner.input_gate, "I", -4.5)):
            part.weight.copy_(given[f"metalstm.W{key}"].T)
            part.bias.copy_(given[f"metalstm.b{key}"][0] + shift)
        start = given["metalstm.cI"][:, 0] / 3
        network.weight.copy_(start[:6][None])
        network.bias.copy_(start[6:])
    r = np.random.RandomState(1)
    steps, dim = case["steps"], case["dim"]
    gradients = draw(r, (steps, dim))
    gradients[:, 0] *= 1e-6
    gradients = gradients.float().double()  # as it was made
    losses, direction = draw(r, (steps,)).abs(), draw(r, (dim,))
    weights = learner.initial_weights()
    state = learner.inner_init(weights, None)
    first = lstm.preprocessed(gradients[0])
    torch.testing.assert_close(first, torch.tensor(case["preprocessed_first_step"]).double(), rtol=1e-7, atol=1e-9)
    for step in range(steps):
        given_gradients = {"network.weight": gradients[step, :6][None], "network.bias": gradients[step, 6:]}
        adapted, state = learner.inner_step(weights, given_gradients, loss=losses[step], state=state, step=step)
        weights = weights | adapted
        theta = lstm.flattened(weights, learner.adapted_names)
        np.testing.assert_allclose(theta.detach().numpy(), case["theta"][step], rtol=1e-8)
    scalar = theta @ direction
    assert scalar.item() == pytest.approx(case["scalar"], rel=1e-8)
    names = [name for name, _ in learner.named_parameters()]
    found = dict(zip(names, torch.autograd.grad(scalar, list(learner.parameters())), strict=True))
    expected = case["grads"]
    assert_agrees(found["lstm.weight"][:, :4], expected["lstm.weight_ih"])
    assert_agrees(found["lstm.weight"][:, 4:], expected["lstm.weight_hh"])
    assert_agrees(found["lstm.bias"], expected["lstm.bias_ih"])
    for part, key in (("forget_gate", "F"), ("input_gate", "I")):
        assert_agrees(found[f"{part}.weight"].T, expected[f"metalstm.W{key}"])
        assert_agrees(found[f"{part}.bias"][None], expected[f"metalstm.b{key}"])
    assert_agrees(torch.cat([found["network.weight"][0], found["network.bias"]])[:, None], expected["metalstm.cI"])


class InOrder:
    """Mini-batches that go round without shuffling."""

    def fork(self) -> InOrder:
        return self

    def stream(self, step: int, sample: int) -> InOrder:
        return self

    def numbers(self) -> InOrder:
        return self

    def normal(self, shape: Any, like: Tensor) -> Tensor:
        raise AssertionError("nothing here is normal")

    def permutation(self, n: int) -> np.ndarray:
        return np.arange(n)


def reptile_tasks(case: dict[str, Any], dtype: torch.dtype) -> list[md.Episode]:
    r = np.random.RandomState(case["seed"] + 1)
    tasks = []
    for _ in range(case["tasks"]):
        images = [r.rand(case["shots"], *case["image"]).astype("float32") for _ in range(case["way"])]
        x = torch.from_numpy(np.concatenate(images)).to(dtype)[:, None]
        y = torch.arange(case["way"]).repeat_interleave(case["shots"])
        tasks.append(md.Episode(x, y, x, y))
    return tasks


def outer_steps(case: dict[str, Any], learner: md.Reptile) -> list[dict[str, Tensor]]:
    """Train as the outer loop does, and return the update of each outer step by parameter."""
    options = TrainingOptions(optimizer="sgd", meta_lr=case["meta_step"], clip_by="none", iterations=99)
    outer = OuterOptimizer(learner.named_parameters(), options)
    tasks = reptile_tasks(case, next(learner.parameters()).dtype)
    updates = []
    for step in range(case["outer_steps"]):
        before = {name: p.detach().clone() for name, p in learner.named_parameters()}
        results = learner.task_gradients(tasks, [InOrder()] * len(tasks))  # type: ignore[list-item]
        gradients = [torch.stack([r.gradients[name] for r in results]).mean(dim=0) for name in before]
        outer.step(gradients, step)
        for name in learner.changed_buffers():
            values = torch.stack([result.buffers[name] for result in results])
            learner.get_buffer(name).copy_(learner.next_buffer(name, values))
        updates.append({name: p.detach() - before[name] for name, p in learner.named_parameters()})
    return updates


@pytest.mark.parametrize(("kind", "tolerance"), [("sgd", 1e-13), ("adam", 2e-5)])
def test_reptile_moves_softmax_regression_as_the_authors_code_does(kind: str, tolerance: float) -> None:
    case = load(f"reptile_linear_{kind}")  # TensorFlow's Adam keeps its decay in float32
    network = nn.Sequential(nn.Flatten(), nn.Linear(16, 3)).double()
    r = np.random.RandomState(case["seed"])
    with torch.no_grad():
        network[1].weight.copy_(draw(r, (16, 3), case["scale"]).T)
        network[1].bias.copy_(draw(r, (3,), case["scale"]))
    # Theirs is the sum over a mini-batch, and its rate a float32.
    rate = {"sgd": float(np.float32(0.05)) * case["inner_batch"], "adam": 0.05}[kind]
    learner = md.Reptile(
        network,
        inner_lr=rate,
        steps=case["inner_iters"],
        batch=case["inner_batch"],
        optimizer=kind,  # type: ignore[arg-type]
    ).double()
    for update, expected in zip(outer_steps(case, learner), case["update_per_outer_step"], strict=True):
        assert_agrees(update["network.1.weight"].T, expected["w:0"], tolerance, entries=5 * tolerance)
        assert_agrees(update["network.1.bias"], expected["b:0"], tolerance, entries=5 * tolerance)


class Convolution(nn.Module):
    """TensorFlow's "same" convolution of stride 2."""

    def __init__(self, channels: int, even: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, 64, kernel_size=3, stride=2)
        self.pad = (0, 1, 0, 1) if even else (1, 1, 1, 1)
        self.norm = nn.BatchNorm2d(64, eps=1e-3)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(F.pad(x, self.pad))))


class OmniglotModel(nn.Module):
    """The authors' network for Omniglot."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [(1, True), (64, True), (64, False), (64, True)]  # 28, 14, 7 and 4 pixels
        self.blocks = nn.Sequential(*[Convolution(channels, even) for channels, even in sizes])
        self.head = nn.Linear(256, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x).permute(0, 2, 3, 1).flatten(1))  # type: ignore[no-any-return]


def test_reptile_moves_the_authors_network_as_their_code_does() -> None:
    case = load("reptile_omniglot_model_adam")
    network = OmniglotModel()
    r = np.random.RandomState(case["seed"])
    names = {}
    for i in range(4):
        number = f"_{i}" if i else ""
        names |= {f"conv2d{number}/{a}:0": f"blocks.{i}.conv.{b}" for a, b in (("kernel", "weight"), ("bias", "bias"))}
        pairs = (("gamma", "weight"), ("beta", "bias"))
        names |= {f"batch_normalization{number}/{a}:0": f"blocks.{i}.norm.{b}" for a, b in pairs}
    names |= {"dense/kernel:0": "head.weight", "dense/bias:0": "head.bias"}
    with torch.no_grad():
        for variable in case["variables"]:
            value = draw(r, variable["shape"], case["scale"]) + ("gamma" in variable["name"])
            value = value.permute(3, 2, 0, 1) if value.dim() == 4 else value.T if value.dim() == 2 else value
            network.get_parameter(names[variable["name"]]).copy_(value)
    # The biases before a normalisation move by rounding noise there, without effect; here they are left out.
    adapted = [name for name in names.values() if not name.endswith("conv.bias")]
    learner = md.Reptile(network, steps=case["inner_iters"], batch=case["inner_batch"], adapted=adapted)
    for update, figures in zip(outer_steps(case, learner), case["update_per_outer_step"], strict=True):
        for name, expected in figures.items():
            own = update[f"network.{names[name]}"]
            own = own.permute(2, 3, 1, 0) if own.dim() == 4 else own.T if own.dim() == 2 else own
            if names[name] in adapted:
                norm, entry = np.linalg.norm(own.double()), expected["norm"] / math.sqrt(own.numel())
                assert norm == pytest.approx(expected["norm"], rel=3e-5), name
                np.testing.assert_allclose(own.reshape(-1)[:5], expected["first"], rtol=0, atol=1e-3 * entry)
            else:
                assert not own.any()
