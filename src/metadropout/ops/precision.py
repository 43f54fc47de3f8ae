"""Convolutions in bfloat16: half the memory traffic, and on hardware with units for it twice the speed or more.

On CPUs the compiled kernels do this, with images that stay in bfloat16 from layer to layer (`ops.kernels`). What is
here does it for other devices, for other convolutions than 3x3, and where there are no such kernels.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from metadropout.ops import kernels

Precision = Literal["full", "bf16"]
"""Numbers that convolutions multiply: as the weights are (float32), or rounded to bfloat16."""

_log = logging.getLogger(__name__)

Convolve = Callable[[Tensor, Tensor], Tensor]
"""(images, weights) → images, without bias."""


def in_bf16(convolve: Convolve, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Convolve in bfloat16, forward and in all derivatives; what comes in and out stays in its own type.

    Where the hardware has no units for bfloat16, images, weights, results and their gradients are rounded to it and
    the products computed in float32: the same numbers up to the order of sums, without the speed.
    """
    if x.device.type == "cpu" and (reason := _why_slow()):
        _warn_once(reason)
    if has_units(x.device):
        out = convolve(x.bfloat16(), weight.bfloat16()).to(x.dtype)
    else:
        out = _rounded(convolve(_rounded(x), _rounded(weight)))
    return out if bias is None else out + bias.view(-1, *[1] * (out.dim() - 2))


def has_units(device: torch.device) -> bool:
    """Return whether a device multiplies bfloat16 faster than float32."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return device.type != "cpu" or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _why_slow() -> str | None:
    """Say why bfloat16 takes longer on this CPU than float32 with its compiled kernels; None where it need not."""
    if not kernels.available():
        return "the compiled kernels are off"
    if not kernels.has_bf16():
        return "this processor, or its compiler, has no AVX512-BF16"
    if not kernels.stores_bf16():
        return "the run began in a version that stored images in float32, and goes on so"
    return None


@functools.cache
def _warn_once(reason: str) -> None:
    _log.warning("precision bf16 is slower here than full, which is float32: %s", reason)


def _rounded(x: Tensor) -> Tensor:
    """Round to bfloat16; autograd does the same to the gradient on its way back."""
    return x.bfloat16().to(x.dtype)
