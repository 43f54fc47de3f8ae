"""Meta-SGD: a learned step size for every single weight."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from metadropout.learners.gradient import GradientLearner, Weights
from metadropout.networks.layers import module_key


class MetaSGD(GradientLearner):
    """MAML whose step size is a learned number per element of every adapted tensor (Li et al., 2017).

    The step sizes start at `inner_lr`, may take any sign, and are shared by all inner steps.
    """

    def add_meta_parameters(self) -> None:
        values = dict(self.named_parameters())
        self.step_sizes = nn.ParameterDict(
            {module_key(name): torch.full_like(values[name], self.inner_lr) for name in self.adapted_names}
        )

    def update(self, name: str, gradient: Tensor, weights: Weights) -> Tensor:
        return weights[name] - weights[f"step_sizes.{module_key(name)}"] * gradient
