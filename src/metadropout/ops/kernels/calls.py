"""Calling compiled kernels from Python: pointers, threads, and what autograd functions around them share."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from metadropout.ops.kernels.build import library

LARGE = 2**16
"""Values in a tensor from which several threads are worth their while."""


_SIGNATURES = {  # how many integers, floating-point numbers and tensors each kernel takes, in this order
    "normal": (5, 0, 1),
    "product_forward": (7, 0, 6),
    "product_gradient": (5, 0, 6),
    "product_second": (3, 0, 8),
    "norm_forward": (8, 1, 7),
    "norm_gradient": (8, 0, 11),
    "norm_second": (8, 0, 12),
    "convolution": (7, 0, 7),
    "convolution_weights": (4, 0, 2),
    "convolution_gradient": (9, 0, 4),
    "convolution_gradient_end": (4, 0, 4),
    "patches": (6, 0, 4),
    "patches_turned": (6, 0, 4),
    "patches_gradient": (8, 0, 3),
    "patches_gradient_end": (3, 0, 3),
}

Value = Tensor | int | float | None
"""What a kernel takes; None is a null pointer."""


@functools.cache
def _kernel(name: str, dtype: torch.dtype) -> Any:
    kernel = getattr(library(), f"{name}_{str(dtype).removeprefix('torch.')}")
    integers, floats, tensors = _SIGNATURES[name]
    kernel.argtypes = [ctypes.c_int64] * integers + [ctypes.c_double] * floats + [ctypes.c_void_p] * tensors
    kernel.restype = None
    return kernel


def run(name: str, dtype: torch.dtype, *values: Value) -> None:
    """Call a kernel, all at once."""
    _kernel(name, dtype)(*_pointers(values))


def run_over(name: str, images: Tensor, *values: Value, parts: int | None = None) -> None:
    """Call a kernel that takes a range of images, or of other parts of the work, in as many threads as PyTorch uses."""
    parts = len(images) if parts is None else parts
    _split(parts, _threads(images, parts), _kernel(name, images.dtype), _pointers(values))


def run_stages(name: str, images: Tensor, *values: Value) -> None:
    """Call a kernel of three stages, of which the second is not split among threads."""
    kernel, arguments, n = _kernel(name, images.dtype), _pointers(values), len(images)
    threads = _threads(images, n)
    if threads == 1:
        kernel(7, 0, n, *arguments)
        return
    _split(n, threads, functools.partial(kernel, 1), arguments)
    kernel(2, 0, n, *arguments)
    _split(n, threads, functools.partial(kernel, 4), arguments)


def _pointers(values: Sequence[Value]) -> list[Any]:
    return [value.data_ptr() if isinstance(value, Tensor) else value for value in values]


def _threads(images: Tensor, parts: int) -> int:
    return min(torch.get_num_threads(), parts) if images.numel() >= LARGE else 1


def _split(parts: int, threads: int, kernel: Callable[..., None], arguments: list[Any]) -> None:
    """Split the work evenly among threads; this one takes the first part."""
    bounds = [parts * k // threads for k in range(threads + 1)]
    pool = _pool(os.getpid()) if threads > 1 else None
    others = [pool.submit(kernel, *bounds[k : k + 2], *arguments) for k in range(1, threads)] if pool else []
    kernel(*bounds[:2], *arguments)
    for other in others:
        other.result()


@functools.lru_cache(maxsize=1)
def _pool(process: int) -> ThreadPoolExecutor:
    """Keep helpers for all threads of this process, started when needed; a forked one has none of its parent's."""
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="fused")


def channels_last(tensor: Tensor) -> Tensor:
    """Return a tensor as kernels want it in memory."""
    return tensor.contiguous(memory_format=torch.channels_last)  # itself where it is laid out so


def like(tensor: Tensor) -> Tensor:
    """Return an empty tensor of the same shape."""
    return torch.empty_like(tensor, memory_format=torch.channels_last)


def refuse_third_derivatives() -> None:
    """Raise an error in a second derivative that is itself to be differentiated."""
    # `once_differentiable` would not do: it complains only where the derivative passes its own node.
    if torch.is_grad_enabled():
        raise RuntimeError(
            "fused operations can be differentiated twice, not three times; "
            "use `with metadropout.ops.kernels.disabled():` around the forward pass"
        )
