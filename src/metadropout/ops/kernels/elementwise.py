"""Fused element-wise operations as autograd functions that can be differentiated twice.

Each operation is a pair of functions: the forward one, whose backward calls the gradient one, whose backward is the
second derivative. What the gradient function depends on (s, or x) is a second *output* of the forward function. Its
cotangent then reaches the forward function's backward together with that of the first output, and one kernel does
both, where autograd would else add them up in a pass of its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from metadropout.ops.autograd import apply
from metadropout.ops.kernels.calls import channels_last, like, refuse_third_derivatives, run_over, run_stages
from metadropout.ops.kernels.draws import Draws


class NoisyProduct(torch.autograd.Function):
    """(f, mean, noise) → f · s and s = softplus(mean + noise); for the noise there is no derivative.

    The noise may have several times as many images as f and mean, which are then used over and over.
    """

    @staticmethod
    def forward(ctx: Any, f: Tensor, mean: Tensor, noise: Tensor | Draws | None) -> tuple[Tensor, Tensor]:
        """Compute both outputs in one pass."""
        pixels, channels = f.shape[2] * f.shape[3], f.shape[1]
        n = len(f) if noise is None else noise.shape[0]
        keys, values, by_channel = None, None, False
        if isinstance(noise, Draws):
            keys = noise.key_tensor()
        elif noise is not None:
            # Whether the noise lies as (n, channels, pixels), as drawn, and not as f does.
            by_channel = not noise.is_contiguous(memory_format=torch.channels_last)
            values = noise.contiguous() if by_channel else noise
        out = torch.empty((n, *f.shape[1:]), dtype=f.dtype, memory_format=torch.channels_last)
        s = like(out)
        per_sample = noise.images if isinstance(noise, Draws) else n
        run_over(
            "product_forward", out, pixels, channels, len(f), int(by_channel), per_sample, f, mean, values, keys, out, s
        )
        ctx.save_for_backward(f, s)
        ctx.set_materialize_grads(False)
        return out, s

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, g_s: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return g_f and g_mean, which can be differentiated again."""
        f, s = ctx.saved_tensors
        needed = ctx.needs_input_grad[:2]
        if g is None:
            g = torch.zeros_like(s)
        samples = len(s) // len(f)
        if samples == 1 or not torch.is_grad_enabled():
            g_f, g_mean = apply(_NoisyProductGradient, g, f, s, g_s, *needed)
        else:  # which is rare: second derivatives of several samples
            each = apply(_NoisyProductGradient, g, channels_last(f.repeat(samples, 1, 1, 1)), s, g_s, *needed)
            g_f, g_mean = (None if part is None else part.unflatten(0, (samples, -1)).sum(0) for part in each)
        return g_f, g_mean, None


class _NoisyProductGradient(torch.autograd.Function):
    """(g, f, s, g_s) → g_f, g_mean."""

    @staticmethod
    def forward(
        ctx: Any, g: Tensor, f: Tensor, s: Tensor, g_s: Tensor | None, needs_f: bool, needs_mean: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        g, g_s = channels_last(g), None if g_s is None else channels_last(g_s)
        g_f, g_mean = like(f) if needs_f else None, like(f) if needs_mean else None
        if needs_f or needs_mean:
            n, size = len(f), f.numel() // len(f)
            run_over("product_gradient", f, size, n, len(s) // n, g, f, s, g_s, g_f, g_mean)
        ctx.save_for_backward(g, f, s)
        ctx.set_materialize_grads(False)
        return g_f, g_mean

    @staticmethod
    def backward(ctx: Any, u: Tensor | None, v: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_third_derivatives()
        g, f, s = ctx.saved_tensors
        if u is None and v is None:
            return (None,) * 6
        u, v = None if u is None else channels_last(u), None if v is None else channels_last(v)
        d_g, d_f, d_s = like(f), None if v is None else like(f), like(f)
        size = f.numel() // f.shape[0]
        run_over("product_second", f, size, g, f, s, u, v, d_g, d_f, d_s)
        return d_g, d_f, d_s, None, None, None


class NormReluPool(torch.autograd.Function):
    """(x, bias) → pooled and x itself, as an output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, eps: float, groups: int) -> tuple[Tensor, Tensor]:
        """Pool and sum up x in one pass, then normalise what is left."""
        n, channels, height, width = x.shape
        shape = (n, height, width, channels, groups)
        pooled = (n, channels, height // 2, width // 2)
        p = torch.empty(pooled, dtype=x.dtype, memory_format=torch.channels_last)  # the maxima of x
        out, code = like(p), torch.empty_like(p, dtype=torch.uint8, memory_format=torch.channels_last)
        sums, stats = torch.empty(2, n, channels, dtype=torch.float64), _numbers(x, 2, groups, channels)
        offset = _numbers(x, channels).zero_() if bias is None else bias.contiguous()
        run_stages("norm_forward", x, *shape, eps, x, offset, p, code, sums, stats, out)
        alias = x.detach()
        ctx.save_for_backward(alias, p, code, stats)
        ctx.set_materialize_grads(False)
        return out, alias

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, g_also: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return g_x and g_b, which can be differentiated again."""
        x, p, code, stats = ctx.saved_tensors
        if g is None:
            return g_also, None, None, None
        g_x, g_b = apply(_NormReluPoolGradient, g, x, p, code, stats, g_also)
        return g_x, g_b if ctx.needs_input_grad[1] else None, None, None


class _NormReluPoolGradient(torch.autograd.Function):
    """(g, x, …, g_also) → g_x + g_also, g_b."""

    @staticmethod
    def forward(
        ctx: Any, g: Tensor, x: Tensor, p: Tensor, code: Tensor, stats: Tensor, g_also: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        g, g_also = channels_last(g), None if g_also is None else channels_last(g_also)
        n, channels, height, width = x.shape
        shape = (n, height, width, channels, stats.shape[1])
        sums, moments = torch.empty(2, n, channels, dtype=torch.float64), torch.empty(stats.shape, dtype=torch.float64)
        factors, g_x, g_b = torch.empty_like(stats), like(x), _numbers(x, channels)
        run_stages("norm_gradient", x, *shape, g, x, p, code, stats, g_also, sums, moments, factors, g_b, g_x)
        ctx.save_for_backward(g, x, p, code, stats, moments)
        ctx.set_materialize_grads(False)
        return g_x, g_b

    @staticmethod
    def backward(ctx: Any, v: Tensor | None, u_b: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_third_derivatives()
        g, x, p, code, stats, moments = ctx.saved_tensors
        v = torch.zeros_like(x) if v is None else channels_last(v)
        u_b = None if u_b is None else u_b.contiguous()
        n, channels, height, width = x.shape
        shape = (n, height, width, channels, stats.shape[1])
        sums, factors = torch.empty(3, n, channels, dtype=torch.float64), _numbers(x, 5, *stats.shape[1:])
        d_g, d_x = like(g), like(x)
        run_stages("norm_second", x, *shape, v, u_b, g, x, p, code, stats, moments, sums, factors, d_g, d_x)
        return d_g, d_x, None, None, None, None


def computed_type(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which images of a type are computed with, and which their statistics and offsets have."""
    return torch.float32 if dtype == torch.bfloat16 else dtype


def _numbers(images: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=computed_type(images.dtype))
