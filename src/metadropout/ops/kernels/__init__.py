"""Operations of the inner loop that are compiled where that is possible: same results, in less time.

Element-wise operations need fewer passes over memory if they are done together, and 3x3 convolutions fewer
multiplications by Winograd's algorithm. Each function here says in plain PyTorch what it computes; for channels-last
images on the CPU, compiled kernels with first and second derivatives take over. `METADROPOUT_FUSED=0` switches them
off.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from metadropout.ops.autograd import apply
from metadropout.ops.kernels import build, choices
from metadropout.ops.kernels.calls import run_over
from metadropout.ops.kernels.choices import choosing, stores_bf16, using
from metadropout.ops.kernels.convolutions import CHANNELS, FEW, Convolution
from metadropout.ops.kernels.draws import Draws, in_shape, plain_values
from metadropout.ops.kernels.elementwise import NoisyProduct, NormReluPool, computed_type
from metadropout.ops.normalisation import batch_normalise

__all__ = [
    "Draws",
    "available",
    "choosing",
    "convolution",
    "convolution_to_bf16",
    "disabled",
    "has_bf16",
    "noisy_product",
    "norm_relu_pool",
    "stores_bf16",
    "using",
    "values",
]

SMALLEST = 3
"""Height and width from which a convolution by 2x2 tiles is worth its while."""

_switched_off: ContextVar[bool] = ContextVar("_switched_off", default=False)


def noisy_product(f: Tensor, mean: Tensor, noise: Tensor | Draws | None = None) -> Tensor:
    """Return f · softplus(mean + noise), where the noise may be left out.

    Args:
        f: what is multiplied.
        mean: same shape.
        noise: a constant of the same shape; or of that of several samples, one after the other, of which each is used
            with all of f and mean.
    """
    constant = not isinstance(noise, Tensor) or not noise.requires_grad
    kind = not isinstance(noise, Tensor) or _same_kind(noise, f)
    if f.shape == mean.shape and constant and kind and _fits(f, mean) and (noise is None or _repeats(f, noise.shape)):
        return apply(NoisyProduct, f, mean, noise)[0]  # type: ignore[no-any-return]
    if noise is None:
        return f * F.softplus(mean)
    if isinstance(noise, Draws):
        noise = values(noise, mean)
    samples = noise.shape[0] // f.shape[0] if f.dim() else 1
    if samples > 1:
        f, mean = (t.repeat(samples, *[1] * (t.dim() - 1)) for t in (f, mean))
    return f * F.softplus(mean + noise)


def values(draws: Draws, like: Tensor) -> Tensor:
    """Compute noise on the device and in the type of `like`; images are laid out channels last."""
    if not _can_run(like) or like.dtype not in (torch.float32, torch.float64):
        return plain_values(draws, like)
    computed = torch.empty(draws.shape, dtype=like.dtype).flatten()
    size = computed.numel() // draws.shape[0]
    for (key, number), part in zip(draws.keys, computed.chunk(len(draws.keys)), strict=True):
        run_over("normal", part.view(draws.images, size), size, key, number, part)
    return in_shape(computed, draws.shape)


def norm_relu_pool(x: Tensor, bias: Tensor | None, eps: float, groups: int = 1) -> Tensor:
    """Normalise by the batch's statistics, add an offset, apply ReLU and take the maximum of each 2x2 square.

    Args:
        x: shape (groups * n, channels, height, width).
        bias: offset per channel.
        eps: added to the (biased) variance.
        groups: how many batches of equal size stand one after the other in `x`, each with statistics of its own.
    """
    if _fits(x) and min(x.shape[2:]) >= 2 and len(x) % groups == 0 and _offset_fits(bias, x):
        return apply(NormReluPool, x, bias, float(eps), groups)[0]  # type: ignore[no-any-return]
    return F.max_pool2d(F.relu(batch_normalise(x, None, bias, eps, groups)), kernel_size=2)


def convolution(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Convolve with 3x3 kernels, stride 1 and padding 1.

    Args:
        x: shape (n, in_channels, height, width).
        weight: shape (out_channels, in_channels, 3, 3).
        bias: shape (out_channels,).
    """
    if x.dtype == torch.float32 and _can_convolve(x, weight, bias):
        tile = 0 if x.shape[1] <= FEW else choices.tile(x.shape[1], weight.shape[0], *x.shape[2:])  # few: no tiles
        if tile is not None:
            return apply(Convolution, x, weight, bias, tile, torch.float32)[0]  # type: ignore[no-any-return]
    return F.conv2d(x, weight, bias, padding=1)


def convolution_to_bf16(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """Do the same, with a result that is stored in bfloat16; None where there are no kernels for that.

    What is multiplied is rounded to bfloat16, except for images of few channels; sums are float32, and so are the
    gradients of weight and bias.

    Args:
        x: images in float32 or bfloat16.
        weight: in float32.
        bias: in float32.
    """
    images_fit = x.dtype in (torch.float32, torch.bfloat16) and _can_convolve(x, weight, bias)
    if not images_fit or not has_bf16() or not stores_bf16():
        return None
    if x.shape[1] <= FEW:
        return apply(Convolution, x.float(), weight, bias, 0, torch.bfloat16)[0]  # type: ignore[no-any-return]
    x = x.bfloat16()
    _, in_channels, height, width = x.shape
    tile = choices.tile(in_channels, weight.shape[0], height, width, x.dtype)
    if tile is not None:
        return apply(Convolution, x, weight, bias, tile, x.dtype)[0]  # type: ignore[no-any-return]
    return F.conv2d(x, weight.bfloat16(), None if bias is None else bias.bfloat16(), padding=1)


def available() -> bool:
    """Return whether the compiled kernels can be used here; compiles them if that has not been done."""
    return os.environ.get("METADROPOUT_FUSED") != "0" and build.library() is not None


def has_bf16() -> bool:
    """Return whether the compiled kernels multiply bfloat16 numbers: the processor needs units for it."""
    return available() and hasattr(build.library(), "convolution_bfloat16")


@contextmanager
def disabled() -> Iterator[None]:
    """Use plain PyTorch inside of a `with` block, as tests and benchmarks do."""
    token = _switched_off.set(True)
    try:
        yield
    finally:
        _switched_off.reset(token)


def _can_convolve(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Say whether the kernels can convolve these images with these float32 weights."""
    return (
        _fits(x)
        and min(x.shape[2:]) >= SMALLEST
        and weight.shape[2:] == (3, 3)
        and weight.shape[1] == x.shape[1]
        and weight.shape[0] % CHANNELS == 0
        and (weight.shape[1] % CHANNELS == 0 or weight.shape[1] <= FEW)
        and all(_same_kind(t, x, torch.float32) for t in (weight, bias) if t is not None)
    )


def _fits(*tensors: Tensor) -> bool:
    """Say whether the kernels can take these images."""
    first = tensors[0]
    return (
        first.dtype in (torch.float32, torch.float64, torch.bfloat16)
        and first.numel() > 0
        and all(_same_kind(t, first) for t in tensors)
        # Before the next line, because under `vmap` a tensor does not even tell its layout.
        and _can_run(first)
        and all(t.dim() == 4 and t.is_contiguous(memory_format=torch.channels_last) for t in tensors)
    )


def _can_run(like: Tensor) -> bool:
    """Say whether there are kernels for a tensor's device, and nothing that needs operations it can see into."""
    return (
        like.device.type == "cpu"
        and not torch._C._are_functorch_transforms_active()
        and not torch.compiler.is_compiling()
        and not _switched_off.get()
        and available()
    )


def _repeats(f: Tensor, shape: Sequence[int]) -> bool:
    """Say whether a shape is that of images f, once or over and over."""
    return tuple(shape[1:]) == f.shape[1:] and shape[0] > 0 and shape[0] % f.shape[0] == 0


def _offset_fits(bias: Tensor | None, x: Tensor) -> bool:
    return bias is None or _same_kind(bias, x, computed_type(x.dtype))


def _same_kind(tensor: Tensor, like: Tensor, dtype: torch.dtype | None = None) -> bool:
    """Say whether a tensor is an ordinary one with the type (or a given one) and on the device of another."""
    wanted = dtype or like.dtype
    return type(tensor) in (Tensor, nn.Parameter) and tensor.dtype == wanted and tensor.device == like.device
