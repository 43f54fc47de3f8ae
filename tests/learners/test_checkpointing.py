"""Inner steps that keep no graph: the same gradients from less memory."""

from __future__ import annotations

import gc
from typing import Any
from weakref import WeakSet

import pytest
import torch
from torch import Tensor, nn
from toys import make_episode, make_perturbation, randomise

import metadropout as md
from metadropout.ops import kernels
from metadropout.perturbations import PERTURBATIONS

LEARNERS = {"maml": md.MAML, "metasgd": md.MetaSGD}


def both_ways(
    kind: str, perturbation: str, network: nn.Module, *, inductive: bool = False, **options: Any
) -> list[md.TaskGradient]:
    """A task's gradient without and with gradient checkpointing."""
    results = []
    for gradient_checkpointing in (False, True):
        noise = make_perturbation(perturbation, network)
        learner = LEARNERS[kind](
            network, noise, inner_lr=0.05, steps=3, gradient_checkpointing=gradient_checkpointing, **options
        ).double()
        if kind == "metasgd":
            randomise(learner.step_sizes, scale=0.002, seed=2)
        results.append(learner.task_gradient(make_episode(inductive=inductive), generator=md.SeededNoise(7)))
    return results


def assert_same(a: md.TaskGradient, b: md.TaskGradient) -> None:
    assert torch.equal(a.loss, b.loss)
    assert a.gradients.keys() == b.gradients.keys()
    for name in a.gradients:
        torch.testing.assert_close(a.gradients[name], b.gradients[name], rtol=1e-10, atol=1e-12, msg=name)


@pytest.mark.parametrize("inductive", [False, True], ids=["transductive", "inductive"])
@pytest.mark.parametrize("kind", LEARNERS)
@pytest.mark.parametrize("perturbation", PERTURBATIONS)
def test_gradients_are_the_same(perturbation: str, kind: str, inductive: bool, conv4: md.Conv4) -> None:
    assert_same(*both_ways(kind, perturbation, conv4, inductive=inductive))


def test_gradients_are_the_same_without_normalisations_second_derivative(conv4: md.Conv4) -> None:
    assert_same(*both_ways("maml", "metadropout", conv4, norm_second_order=False))


@pytest.mark.parametrize("way", ["plain", "fused"])
def test_gradients_are_the_same_on_every_network(network: nn.Module, way: str) -> None:
    if way == "plain":
        with kernels.disabled():
            assert_same(*both_ways("metasgd", "metadropout", network))
    elif not kernels.available():
        pytest.skip("no compiled kernels here")
    else:
        assert_same(*both_ways("metasgd", "metadropout", network))


class Kept:
    """A tensor that a graph holds."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def bytes_kept(learner: md.GradientLearner) -> int:
    """How much the graph of a task's loss holds."""
    everything: WeakSet[Kept] = WeakSet()

    def pack(tensor: Tensor) -> Kept:
        everything.add(kept := Kept(tensor))
        return kept

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept.tensor):
        loss = learner.loss(make_episode(query=1), generator=md.SeededNoise(0))
    gc.collect()
    assert loss.requires_grad  # and holds the graph until here
    storages = {kept.tensor.untyped_storage().data_ptr(): kept.tensor.untyped_storage() for kept in everything}
    return sum(storage.nbytes() for storage in storages.values())


def test_further_steps_add_no_more_than_the_adapted_weights(conv4: md.Conv4) -> None:
    def growth(gradient_checkpointing: bool) -> float:
        noise = md.MetaDropout(conv4).double()
        few, many = (
            bytes_kept(md.MAML(conv4, noise, steps=steps, gradient_checkpointing=gradient_checkpointing))
            for steps in (2, 6)
        )
        return (many - few) / 4

    learner = md.MAML(conv4, md.MetaDropout(conv4).double())
    adapted = sum(p.nbytes for n, p in learner.named_parameters() if n in learner.adapted_names)
    assert growth(gradient_checkpointing=True) <= adapted
    assert growth(gradient_checkpointing=False) > 10 * adapted


def test_first_order_has_nothing_to_recompute(conv4: md.Conv4) -> None:
    with pytest.raises(ValueError, match="gradient_checkpointing has no effect with first_order"):
        md.MAML(conv4, first_order=True, gradient_checkpointing=True)


def test_a_third_derivative_is_refused(conv4: md.Conv4) -> None:
    loss = md.MAML(conv4, gradient_checkpointing=True).loss(make_episode())
    (gradient,) = torch.autograd.grad(loss, conv4.head.weight, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()
