"""Heads for any number of classes: the rows of a meta-trained head are interchangeable.

Meta-training gives labels to classes at random, so no row of the head knows which class it is for. With more or fewer
classes than in training, every class starts from the mean of the rows.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from metadropout.errors import ConfigError
from metadropout.networks.initial import CONVOLUTIONS
from metadropout.networks.layers import module_key

if TYPE_CHECKING:
    from metadropout.learners.gradient import GradientLearner


def with_head_rows(learner: GradientLearner, change: Callable[[Tensor], Tensor]) -> GradientLearner:
    """Return a copy of a learner whose head has other rows.

    Args:
        learner: whose network ends in a linear layer.
        change: what becomes of each tensor that has a row per class: the head's weight and bias, and what belongs to
            them element by element, such as step sizes, deviations of weights and moments of gradients.
    """
    head, changed = learner.layers().head, copy.deepcopy(learner)
    for part in ("weight", "bias"):
        name = f"{head}.{part}"
        original = dict(learner.network.named_parameters()).get(name)
        for key, tensor in (*changed.named_parameters(), *changed.named_buffers()):
            belongs = key.endswith((name, module_key(name)))
            if original is not None and belongs and tensor.shape == original.shape:
                tensor.data = change(tensor.data)
    return changed


def with_way(learner: GradientLearner, way: int) -> GradientLearner:
    """Return a learner for tasks with that many classes: itself where its head has as many rows."""
    try:
        name = learner.layers().head
    except ValueError:  # a network without a head that is known as such: it serves the tasks it was made for
        return learner
    head = learner.network.get_submodule(name)
    # So does one whose head is a module of the user's, of which nobody knows where the rows are.
    if not isinstance(head, (*CONVOLUTIONS, nn.Linear)) or is_parametrized(head) or len(head.weight) == way:
        return learner
    if f"network.{name}.weight" not in learner.adapted_names:
        raise ConfigError(
            f"{type(learner).__name__} was trained on tasks of {len(head.weight)} classes and cannot do tasks of "
            f"{way}: it does not adapt its head, so a class has no row but the one that training gave it"
        )
    return learner.with_head_rows(lambda rows: rows.mean(dim=0, keepdim=True).repeat(way, *[1] * (rows.dim() - 1)))
