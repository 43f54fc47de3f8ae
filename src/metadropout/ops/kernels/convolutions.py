"""3x3 convolutions by Winograd's algorithm, as an autograd function that can be differentiated twice.

As with the element-wise operations, a gradient function stands behind the forward one, and what it depends on, here the
images, is a second output of the forward function, so that both of their gradients are added up in one pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from metadropout.ops.autograd import apply
from metadropout.ops.kernels.calls import channels_last, refuse_third_derivatives, run, run_over

CHANNELS = 16
"""Channels come in multiples of this, except for the input channels of a first layer: FEW, at most."""

FEW = 4

SPOTS = {2: 16, 4: 36}
"""Values that stand for a 3x3 kernel when it is transformed, by the size of tiles."""

PADDING = 16
"""Unused values after the weights, or sums for them, of each spot."""

SUMS = torch.float32
"""The type of weights, biases and their gradients."""

TILES_PER_PART, MOST_PARTS = 2048, 8
"""Gradients of weights are summed up in parts of the batch that depend on its size, but not on the threads."""


class Convolution(torch.autograd.Function):
    """(x, weight, bias) → the convolved images in a type, and x itself, as an output; by tiles of a size."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, tile: int, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Convolve."""
        out, alias = convolve(x, weight, tile=tile, bias=bias, dtype=dtype), x.detach()
        if not ctx.needs_input_grad[0]:
            ctx.mark_non_differentiable(alias)
        ctx.tile = tile
        ctx.save_for_backward(alias, weight)
        ctx.set_materialize_grads(False)
        return out, alias

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, g_also: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients, which can be differentiated again."""
        if g is None:
            return g_also, None, None, None, None
        needed = ctx.needs_input_grad[:3]
        return *apply(_ConvolutionGradient, g, *ctx.saved_tensors, g_also, ctx.tile, *needed), None, None


class _ConvolutionGradient(torch.autograd.Function):
    """(g, x, weight, g_also) → g_x + g_also, g_weight, g_bias."""

    @staticmethod
    def forward(
        ctx: Any,
        g: Tensor,
        x: Tensor,
        weight: Tensor,
        g_also: Tensor | None,
        tile: int,
        needs_x: bool,
        needs_weight: bool,
        needs_bias: bool,
    ) -> tuple[Tensor | None, ...]:
        g = channels_last(g)
        g_x = convolve(g, weight, tile=tile, turned=True, also=g_also) if needs_x else None
        g_weight, g_bias = weight_gradient(x, g, tile=tile) if needs_weight or needs_bias else (None, None)
        ctx.tile = tile
        ctx.save_for_backward(g, x, weight)
        ctx.set_materialize_grads(False)
        return g_x, g_weight if needs_weight else None, g_bias if needs_bias else None

    @staticmethod
    def backward(ctx: Any, u: Tensor | None, v: Tensor | None, v_bias: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return d_g = u * weight + x * v + v_bias, d_x and d_weight, where * is a convolution."""
        refuse_third_derivatives()
        g, x, weight = ctx.saved_tensors
        tile = ctx.tile
        d_x = convolve(g, v, tile=tile, turned=True) if v is not None and ctx.needs_input_grad[1] else None
        d_weight = None if u is None else weight_gradient(u := channels_last(u), g, tile=tile)[0]
        d_g: Tensor | None = None
        if u is not None:
            d_g = convolve(u, weight, *(() if v is None else (x, v)), tile=tile, bias=v_bias, dtype=g.dtype)
        elif v is not None:
            d_g = convolve(x, v, tile=tile, bias=v_bias, dtype=g.dtype)
        elif v_bias is not None:
            d_g = v_bias.to(g.dtype).view(1, -1, 1, 1).expand_as(g)
        return d_g, d_x, d_weight, None, None, None, None, None


def convolve(
    x: Tensor,
    weight: Tensor,
    x2: Tensor | None = None,
    weight2: Tensor | None = None,
    *,
    tile: int,
    turned: bool = False,
    bias: Tensor | None = None,
    also: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return the convolved x, plus x2 convolved with its own weights, plus bias, plus other images.

    Args:
        x: images, channels last: float32 or bfloat16, but always float32 where they have few channels.
        weight: (out_channels, in_channels, 3, 3).
        x2: more images.
        weight2: their weights.
        tile: size of the tiles, 2 or 4; without effect on images of few channels.
        turned: convolve with the kernels turned round, from output to input channels: the input's gradient.
        bias: (out_channels,).
        also: images of the result's shape.
        dtype: type of the result; by default that of x, or float32 where the result has few channels.
    """
    if x.shape[1] <= FEW and x2 is not None and weight2 is not None:  # side by side: at most twice as many channels
        x, weight = channels_last(torch.cat([x, x2], dim=1)), torch.cat([weight, weight2], dim=1)
    n, channels, height, width = x.shape
    out_channels = weight.shape[1 if turned else 0]
    bias = None if bias is None else bias.contiguous()
    also = None if also is None else channels_last(also)
    dtype = torch.float32 if out_channels <= FEW else dtype or x.dtype
    out = torch.empty((n, out_channels, height, width), dtype=dtype, memory_format=torch.channels_last)
    if out_channels <= FEW:  # only the gradient of a first layer's input has so few
        run_over("patches_turned", x, height, width, out_channels, channels, x, channels_last(weight), also, out)
        return out
    if channels <= 2 * FEW:
        run_over("patches", out, height, width, channels, out_channels, x, channels_last(weight), bias, out)
        return out
    u = _transformed(weight, tile, turned, dtype)
    u2 = None if weight2 is None else _transformed(weight2, tile, turned, dtype)
    run_over("convolution", x, tile, height, width, channels, out_channels, x, u, x2, u2, bias, also, out)
    return out


def _transformed(weight: Tensor, tile: int, turned: bool, dtype: torch.dtype) -> Tensor:
    """Return kernels in the form in which they are multiplied with transformed tiles."""
    out_channels, in_channels = weight.shape[:2]
    u = weight.new_empty(SPOTS[tile] * (out_channels * in_channels + PADDING), dtype=dtype)
    run("convolution_weights", dtype, tile, out_channels, in_channels, int(turned), channels_last(weight), u)
    return u


def weight_gradient(x: Tensor, g: Tensor, *, tile: int) -> tuple[Tensor, Tensor]:
    """Return the gradients of weight and bias, given the images and the output's gradient, both channels last."""
    n, in_channels, height, width = x.shape
    out_channels = g.shape[1]
    shape = (height, width, in_channels, out_channels)
    parts = min(n, MOST_PARTS, 1 + n * height * width // 4 // TILES_PER_PART)
    g_weight = torch.empty((out_channels, in_channels, 3, 3), dtype=SUMS, memory_format=torch.channels_last)
    g_bias = torch.empty(out_channels, dtype=SUMS)
    if in_channels <= FEW:
        sums = torch.empty(parts, 9 * in_channels + 1, out_channels, dtype=SUMS)
        run_over("patches_gradient", g, parts, n, *shape, x, g, sums, parts=parts)
        run("patches_gradient_end", SUMS, parts, in_channels, out_channels, sums, g_weight, g_bias)
        return g_weight, g_bias
    sums = torch.empty(parts, SPOTS[tile] * (in_channels * out_channels + PADDING), dtype=SUMS)
    bias_sums = torch.empty(parts, out_channels, dtype=SUMS)
    run_over("convolution_gradient", x, tile, parts, n, *shape, x, g, sums, bias_sums, parts=parts)
    run("convolution_gradient_end", SUMS, tile, parts, in_channels, out_channels, sums, bias_sums, g_weight, g_bias)
    return g_weight, g_bias
