"""UNICORN-MAML: one learned vector from which the head's rows start, whatever the classes and however many."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import ClassVar, Literal

from torch import Tensor

from metadropout.learners.batched import OverTasks, one_task
from metadropout.learners.gradient import GradientLearner
from metadropout.learners.maml import MAML
from metadropout.learners.metasgd import MetaSGD
from metadropout.noise import NoiseSource
from metadropout.perturbations.base import Weights


class OneRow(GradientLearner):
    """A gradient-based learner whose network has a head of one row, from which every class of a task starts.

    No class is then different from another before the first step, so that the order of classes has no influence, and a
    task may have any number of them. As the row is added to all logits alike, which softmax does not see, its values
    have no influence either: a row of zeros does the same, and the first step changes the head alone.
    """

    network_gives: ClassVar[Literal["a logit"]] = "a logit"

    def add_meta_parameters(self) -> None:
        super().add_meta_parameters()
        self.head_names = [name for name in self.adapted_names if name.startswith(f"network.{self.layers().head}.")]
        rows = {len(self.get_parameter(name)) for name in self.head_names}
        if rows != {1}:
            raise ValueError(
                f"{type(self).__name__} starts all classes from the one row of its head, which has to be adapted, too: "
                f"build the network with way=1, not with {max(rows, default=0)} rows to adapt"
            )

    def inner_path(
        self,
        weights: Weights,
        x: Tensor,
        y: Tensor,
        noise: NoiseSource | None,
        mc_samples: int,
        differentiable: bool,
        over_tasks: OverTasks = one_task,
        steps: int | None = None,
    ) -> Iterator[Weights]:
        way = int(y.max()) + 1  # there are support images of every class

        def rows(weights: Weights) -> Weights:
            return {name: weights[name].repeat(way, *[1] * (weights[name].dim() - 1)) for name in self.head_names}

        # Of the row's gradient, which is zero, only rounding would be left, and Adam would make steps of it.
        start = {name: tensor.detach().requires_grad_() for name, tensor in over_tasks(rows)(weights).items()}
        weights = weights | start
        yield from super().inner_path(weights, x, y, noise, mc_samples, differentiable, over_tasks, steps)

    def for_way(self, way: int) -> GradientLearner:
        return self

    def with_head_rows(self, change: Callable[[Tensor], Tensor]) -> GradientLearner:
        return self


class Unicorn(OneRow, MAML):
    """MAML whose head starts from one vector for all classes (UNICORN-MAML; Ye and Chao, 2022).

    Adapted: all weights, the head's rows each for its class. Meta-learned: the initial weights. The head's are one row,
    whatever its values, so that the order of classes has no influence and a task may have any number of them.
    """

    title = "UNICORN-MAML"
    citation = "Ye and Chao, 2022"


class UnicornMetaSGD(OneRow, MetaSGD):
    """Meta-SGD whose head starts from one vector for all classes.

    Adapted: all weights. Meta-learned: the initial weights and a step size for each, of the head one row of both.
    """

    title = "UNICORN-Meta-SGD"
    citation = "Ye and Chao, 2022"
