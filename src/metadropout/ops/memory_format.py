"""Channels-last images, on which convolutions run faster."""

from __future__ import annotations

import torch
from torch import Tensor


def channels_last(x: Tensor) -> Tensor:
    """Return images (n, channels, height, width) laid out with the channels of a pixel side by side.

    Unlike `Tensor.to(memory_format=...)` this also sets the strides of one-channel images, from which convolutions
    take the layout of all that follows.
    """
    return x.permute(0, 2, 3, 1).clone(memory_format=torch.contiguous_format).permute(0, 3, 1, 2)


def laid_out_like(x: Tensor, like: Tensor) -> Tensor:
    """Return values in the memory layout of images: element-wise operations on two layouts take many times as long."""
    if x.dim() != 4 or torch._C._are_functorch_transforms_active():  # under `vmap` a tensor does not tell its layout
        return x
    is_last = like.is_contiguous(memory_format=torch.channels_last)
    return x.contiguous(memory_format=torch.channels_last) if is_last else x


class ChannelsLast:
    """Marks networks whose images, and so convolutions, may have the layout in which channels come last.

    A user's own network may not: `view` fails on it.
    """
