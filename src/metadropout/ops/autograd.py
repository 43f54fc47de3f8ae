"""Calling autograd functions with less overhead."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import Function


def apply(function: type[Function], *arguments: Any) -> Any:
    """Call an autograd function, as `function.apply` does, in less time where no transform of `torch.func` is active.

    PyTorch's own way looks for tensors of transforms that have ended, and up the signature of `forward`, in every
    call. With small images this made a twentieth of a training run's time.
    """
    if torch._C._are_functorch_transforms_active():
        return function.apply(*arguments)  # type: ignore[no-untyped-call]
    return super(Function, function).apply(*arguments)  # type: ignore[misc]
