"""Batch normalisation with the statistics of the batch at hand, as MAML's authors and the paper's use it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from metadropout.ops.autograd import apply


class OffsetNorm(nn.Module):
    """Normalises by the statistics of its batch and adds a learned offset: no scale, no running averages.

    Args:
        channels: number of channels.
        eps: added to the (biased) variance.
    """

    def __init__(self, channels: int, eps: float = 1e-3) -> None:
        super().__init__()
        self.eps = eps
        self.register_parameter("weight", None)
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, input: Tensor) -> Tensor:  # named as PyTorch's layers name it
        return batch_normalise(input, None, self.bias, self.eps)


class Statistics(NamedTuple):
    """Each channel's mean and biased variance, both of shape (channels,)."""

    mean: Tensor
    variance: Tensor
    size: int = 0
    """Over how many values of a channel they were taken; 0 if that is not known."""


def batch_normalise(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, groups: int = 1) -> Tensor:
    """Normalise each channel by its mean and biased variance over the batch.

    Args:
        x: shape (groups * n, channels, ...).
        weight: scale per channel.
        bias: offset per channel.
        eps: added to the variance.
        groups: how many batches of equal size stand one after the other in `x`, each with statistics of its own.
    """
    if groups > 1:
        return torch.cat([batch_normalise(part, weight, bias, eps) for part in x.chunk(groups)])
    if x.numel() > x.shape[1]:
        return F.batch_norm(x, None, None, weight, bias, training=True, eps=eps)
    return normalise_with(x, batch_statistics(x), weight, bias, eps)  # PyTorch's refuses one value per channel


class _HeldGradient(torch.autograd.Function):
    """The identity, whose gradient is in part a constant to whoever differentiates it again."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, share: float) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
        ctx.share = inputs[1]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return (g.detach().lerp(g, ctx.share) if ctx.share else g.detach()), None


def held_gradient(x: Tensor, share: float) -> Tensor:
    """Return x; the gradient that comes back through it has its value, but only a share of its own derivative."""
    return apply(_HeldGradient, x, share)  # type: ignore[no-any-return]


def batch_statistics(x: Tensor) -> Statistics:
    """Return each channel's mean and biased variance over a batch."""
    variance, mean = torch.var_mean(x, dim=[0, *range(2, x.dim())], correction=0)
    return Statistics(mean, variance, x.numel() // x.shape[1])


def normalise_with(x: Tensor, given: Statistics, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Normalise each channel by given statistics, image by image."""
    x = (x - per_channel(given.mean, x)) * per_channel(torch.rsqrt(given.variance + eps), x)
    return scale_and_offset(x, weight, bias)


def scale_and_offset(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Multiply and add per channel, where a scale or an offset is given."""
    if weight is not None:
        x = x * per_channel(weight, x)
    if bias is not None:
        x = x + per_channel(bias, x)
    return x


def per_channel(values: Tensor, like: Tensor) -> Tensor:
    """Reshape (channels,) so that it broadcasts over (n, channels, ...)."""
    return values.view(1, -1, *[1] * (like.dim() - 2))
