"""Gaussian weights: noise on the weights in place of the features."""

from __future__ import annotations

import math
from typing import Annotated

import torch
from torch import nn

from metadropout.networks.functional import weight_names
from metadropout.networks.layers import module_key
from metadropout.options import Limits
from metadropout.perturbations.base import Pass, Perturbation, Traits, Weights
from metadropout.perturbations.layers import NOISE_NEEDS_SECOND_ORDER


class WeightGaussian(Perturbation):
    """Adds N(0, s²) noise to every weight and bias, one draw per pass, s = exp(ρ) learned per weight (table 3).

    "MAML with fully factorized Gaussian weights whose variances are meta-learned" (Lee et al., 2020). Query passes use
    the mean weights. Normalisation parameters are left alone.

    Args:
        network: any module.
        initial_std: s at the start.
    """

    title = "Gaussian weights"
    citation = "Lee et al., 2020, table 3"
    traits = Traits(
        changes=("weights",),
        random=True,
        support_only=True,
        samples_share_a_batch=False,
        needs_second_order=NOISE_NEEDS_SECOND_ORDER,
    )

    def __init__(
        self, network: nn.Module, *, initial_std: Annotated[float, Limits(0, 1000, above=True)] = 0.002
    ) -> None:
        super().__init__(network)
        if initial_std <= 0:
            raise ValueError(f"initial_std is {initial_std}; it must be above 0")
        parameters = dict(network.named_parameters())
        self.noisy_names = weight_names(network)
        self.log_std = nn.ParameterDict(
            {module_key(name): torch.full_like(parameters[name], math.log(initial_std)) for name in self.noisy_names}
        )

    def change_weights(self, theta: Weights, context: Pass) -> Weights:
        if not context.support:
            return theta
        (stream,) = context.streams
        noisy = {}
        for name in self.noisy_names:
            std = torch.exp(context.weights[f"log_std.{module_key(name)}"])
            noisy[name] = theta[name] + std * stream.normal(theta[name].shape, std)
        return theta | noisy
