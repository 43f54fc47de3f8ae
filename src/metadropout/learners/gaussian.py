"""Weights with a Gaussian distribution: a standard deviation beside each, draws, and the divergence of two of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from metadropout.networks.layers import module_key
from metadropout.noise import NoiseStream
from metadropout.perturbations.base import Weights


def log_stds(tensors: Mapping[str, Tensor], value: float) -> nn.ParameterDict:
    """Return a logarithm of a standard deviation for each element of some tensors, all of one value."""
    return nn.ParameterDict({module_key(name): torch.full_like(t, value) for name, t in tensors.items()})


def drawn(means: Mapping[str, Tensor], stds: Mapping[str, Tensor], stream: NoiseStream) -> Weights:
    """Draw weights, differentiable in their means and in the logarithms of their standard deviations."""
    return {name: mean + stds[name].exp() * stream.normal(mean.shape, mean) for name, mean in means.items()}


def divergence(means: Mapping[str, Tensor], stds: Mapping[str, Tensor], others: Weights, other_stds: Weights) -> Tensor:
    """Return KL(q ‖ p), summed over all weights, of a Gaussian q from another one, p.

    Args:
        means: of q, by name.
        stds: logarithms of q's standard deviations, by the same names.
        others: means of p.
        other_stds: logarithms of p's standard deviations.
    """
    return total(
        other_stds[name]
        - stds[name]
        + ((2 * (stds[name] - other_stds[name])).exp() + ((mean - others[name]) / other_stds[name].exp()).square() - 1)
        / 2
        for name, mean in means.items()
    )


def total(terms: Iterable[Tensor]) -> Tensor:
    """Return the sum of all elements of some tensors."""
    return torch.stack([term.sum() for term in terms]).sum()
