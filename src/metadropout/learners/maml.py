"""MAML: one step size for all weights."""

from __future__ import annotations

from torch import Tensor

from metadropout.learners.gradient import GradientLearner
from metadropout.perturbations.base import Weights


class MAML(GradientLearner):
    """Learns initial weights from which a few gradient steps lead to a good model of a task (Finn et al., 2017)."""

    title = "MAML"
    citation = "Finn et al., 2017"

    def inner_step(
        self, weights: Weights, gradients: Weights, *, loss: Tensor, state: Weights, step: int
    ) -> tuple[Weights, Weights]:
        return {name: weights[name] - self.inner_lr * gradient for name, gradient in gradients.items()}, state
