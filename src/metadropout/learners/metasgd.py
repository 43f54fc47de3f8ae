"""Meta-SGD: a learned step size for every single weight."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from metadropout.learners.gradient import GradientLearner
from metadropout.networks.layers import module_key
from metadropout.perturbations.base import Weights


class MetaSGD(GradientLearner):
    """MAML whose step size is a learned number per element of every adapted tensor (Li et al., 2017).

    The step sizes start at `inner_lr`, may take any sign, and are shared by all inner steps.
    """

    title = "Meta-SGD"
    citation = "Li et al., 2017"

    def add_meta_parameters(self) -> None:
        self.step_sizes = nn.ParameterDict(
            {module_key(name): torch.full_like(value, self.inner_lr) for name, value in self.adapted_tensors().items()}
        )

    def inner_step(
        self, weights: Weights, gradients: Weights, *, loss: Tensor, state: Weights, step: int
    ) -> tuple[Weights, Weights]:
        sizes = {name: weights[f"step_sizes.{module_key(name)}"] for name in gradients}
        return {name: weights[name] - sizes[name] * gradient for name, gradient in gradients.items()}, state
