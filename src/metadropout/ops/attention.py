"""Attention that can be differentiated twice."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock

import torch

_SETTINGS: tuple[tuple[Callable[[], bool], Callable[[bool], None], bool], ...] = (
    # how to read a setting, how to change it, and to what
    (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp, False),
    (torch.backends.cuda.mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp, False),
    (torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp, False),
    (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp, True),
    (torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled, False),
)


class _TwiceDifferentiable:
    """Lets PyTorch compute attention by operations that have second derivatives, inside of a `with` block.

    PyTorch's fused attention has first derivatives only. Its fast path for `nn.TransformerEncoderLayer` also skips the
    layers inside, and with them whatever perturbs their outputs. The settings, on CPUs, too, are the ones that are
    named after CUDA, and they hold for the whole process. So the first of several threads changes them and the last one
    restores them. `torch.nn.attention.sdpa_kernel` does neither this nor the fast path, and takes four times as long.
    """

    def __init__(self) -> None:
        self._lock, self._inside = Lock(), 0
        self._before: list[bool] = []

    def __enter__(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._before = [read() for read, _, _ in _SETTINGS]
                for _, write, value in _SETTINGS:
                    write(value)
            self._inside += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                for (_, write, _), value in zip(_SETTINGS, self._before, strict=True):
                    write(value)


twice_differentiable_attention = _TwiceDifferentiable()
"""The one of this process."""
