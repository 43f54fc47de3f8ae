"""Several tasks as one batched pass: the same gradients as one task after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from toys import assert_batched_equals_loop, make_episode, make_perturbation, randomise

import metadropout as md
from metadropout.perturbations import PERTURBATIONS, NoPerturbation, Pass

LEARNERS = {"maml": md.MAML, "metasgd": md.MetaSGD}
BATCHED = [name for name in PERTURBATIONS if name not in ("mixup", "adversarial", "combined")]  # combined with mixup


def make_learner(kind: str, perturbation: str, network: nn.Module, **options: Any) -> md.GradientLearner:
    noise = make_perturbation(perturbation, network)
    learner = LEARNERS[kind](network, noise, inner_lr=0.05, steps=2, **options).double()
    if kind == "metasgd":
        randomise(learner.step_sizes, scale=0.002, seed=2)
    return learner


@pytest.mark.parametrize("inductive", [False, True], ids=["transductive", "inductive"])
@pytest.mark.parametrize("kind", LEARNERS)
@pytest.mark.parametrize("perturbation", BATCHED)
def test_equals_one_task_after_the_other(perturbation: str, kind: str, inductive: bool, conv4: md.Conv4) -> None:
    episodes = [make_episode(seed=seed, inductive=inductive) for seed in range(3)]
    assert_batched_equals_loop(make_learner(kind, perturbation, conv4), episodes)


@pytest.mark.parametrize("inductive", [False, True], ids=["transductive", "inductive"])
@pytest.mark.parametrize("perturbation", ["none", "metadropout"])
def test_equals_one_task_after_the_other_on_every_network(
    perturbation: str, inductive: bool, network: nn.Module
) -> None:
    episodes = [make_episode(seed=seed, inductive=inductive) for seed in range(3)]
    assert_batched_equals_loop(make_learner("metasgd", perturbation, network), episodes)


@pytest.mark.parametrize(
    "options",
    [{"first_order": True}, {"norm_second_order": False}, {"gradient_checkpointing": True}, {"steps": 0}],
    ids=str,
)
def test_goes_with_the_learners_other_options(options: dict[str, Any], conv4: md.Conv4) -> None:
    name = "none" if "first_order" in options else "metadropout"
    learner = md.MAML(conv4, make_perturbation(name, conv4), **{"inner_lr": 0.05, "steps": 2, **options})
    assert_batched_equals_loop(learner)


def test_frozen_parameters_stay_out(conv4: md.Conv4) -> None:
    conv4.blocks[0].conv.requires_grad_(False)
    assert_batched_equals_loop(md.MAML(conv4))


class Unbatchable(nn.Module):
    """A model that looks at a value, which `vmap` cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(256, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x.flatten(1)) * (1 if x.sum() > 0 else 2)


def test_a_model_that_cannot_be_batched_is_named_with_the_way_out() -> None:
    learner = md.MAML(Unbatchable().double())
    episodes = [make_episode(seed=seed) for seed in range(2)]
    with pytest.raises(md.TrainingError, match=r"^Unbatchable with NoPerturbation cannot .* loop\): vmap"):
        learner.task_gradients(episodes, [None, None])


class DrawsNumbers(NoPerturbation):
    """Draws what cannot be batched, and does not say so."""

    traits = md.Traits(random=True)

    def after(self, name: str, h: Tensor, f: Tensor, context: Pass) -> Tensor:
        return f * context.numbers().random() if context.support else f

    @property
    def sites(self) -> Sequence[str]:
        return ("head",)


def test_a_perturbation_that_cannot_be_batched_is_told_to_say_so(conv4: md.Conv4) -> None:
    learner = md.MAML(conv4, DrawsNumbers(conv4))
    with pytest.raises(md.TrainingError, match=r"its class should say: traits = Traits\(tasks_share_a_batch=False\)"):
        learner.task_gradients([make_episode()] * 2, [md.SeededNoise(0)] * 2)


def assert_one_by_one(learner: md.GradientLearner, episodes: Sequence[md.Episode]) -> None:
    noises = [md.SeededNoise(seed) for seed in range(len(episodes))]
    expected = [learner.task_gradient(e, generator=n) for e, n in zip(episodes, noises, strict=True)]
    with patch.object(torch, "vmap", side_effect=AssertionError("batched")):
        got = learner.task_gradients(episodes, noises)
    assert [task.loss for task in got] == [task.loss for task in expected]


@pytest.mark.parametrize("perturbation", [name for name in PERTURBATIONS if name not in BATCHED])
def test_perturbations_that_cannot_be_batched_run_one_by_one(perturbation: str, conv4: md.Conv4) -> None:
    learner = make_learner("maml", perturbation, conv4)
    assert_one_by_one(learner, [make_episode(seed=seed) for seed in range(2)])


def test_tasks_of_unequal_shape_run_one_by_one(conv4: md.Conv4) -> None:
    assert_one_by_one(make_learner("maml", "metadropout", conv4), [make_episode(shot=shot) for shot in (1, 2)])


class Normalised(md.MAML):
    """A learner whose update is not one element by element."""

    def update(self, name: str, gradient: Tensor, weights: dict[str, Tensor]) -> Tensor:
        return weights[name] - self.inner_lr * gradient / gradient.norm()


def test_an_update_sees_one_task_only(conv4: md.Conv4) -> None:
    assert_batched_equals_loop(Normalised(conv4, inner_lr=0.1, steps=2))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo itself looks at it
def test_torch_compile_captures_the_batched_path_and_gives_the_same_gradients(conv4: md.Conv4) -> None:
    """Dynamo alone: no backend that differentiates ahead of time can run the inner gradients under `vmap`."""
    learner = md.MAML(conv4, inner_lr=0.1, steps=1)
    episodes = [make_episode(seed=seed) for seed in range(2)]
    plain = learner.task_gradients(episodes, [None, None])
    torch._dynamo.reset()
    compiled = torch.compile(learner.task_gradients, backend="eager")(episodes, [None, None])
    assert torch._dynamo.utils.counters["stats"]["calls_captured"] > 50
    for a, b in zip(plain, compiled, strict=True):
        assert a.loss == b.loss
        assert all(torch.equal(a.gradients[name], b.gradients[name]) for name in a.gradients)
