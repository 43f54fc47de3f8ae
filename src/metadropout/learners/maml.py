"""MAML: one step size for all weights."""

from __future__ import annotations

from torch import Tensor

from metadropout.learners.gradient import GradientLearner, Weights


class MAML(GradientLearner):
    """Learns initial weights from which a few gradient steps lead to a good model of a task (Finn et al., 2017)."""

    def update(self, name: str, gradient: Tensor, weights: Weights) -> Tensor:
        return weights[name] - self.inner_lr * gradient
