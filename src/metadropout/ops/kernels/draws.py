"""Noise that is computed where it is needed: standard normal values as a function of a key and a place.

The words come from the counter-based generator Philox4x32 with ten rounds (Salmon et al., 2011), normal values from
those by Box and Muller's transform. The compiled kernel and plain PyTorch give the same values, up to their last bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

COUNTERS = 16
"""In a group; their first, second, third and fourth words belong to as many places each."""

LOW = 0xFFFFFFFF
MULTIPLIERS, KEY_STEPS, ROUNDS = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85), 10


@dataclass(frozen=True)
class Draws:
    """One draw of noise for each of several samples, not computed yet."""

    keys: tuple[tuple[int, int], ...]
    """The key and the number of the draw of each sample."""
    shape: tuple[int, ...]
    """Of all samples together, one after the other. Places run as in memory; those of images as channels last."""

    @property
    def images(self) -> int:
        """Images per sample."""
        return self.shape[0] // len(self.keys)

    def key_tensor(self) -> Tensor:
        """Return the keys as kernels take them."""
        return torch.tensor(self.keys, dtype=torch.int64)


def plain_values(draws: Draws, like: Tensor) -> Tensor:
    """Compute the values in plain PyTorch, on the device and in the type of `like`."""
    each = math.prod(draws.shape) // len(draws.keys)
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    values = torch.cat([_normal(key, number, each, dtype, like.device) for key, number in draws.keys])
    return in_shape(values.to(like.dtype), draws.shape)


def in_shape(values: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Give values in the order of places their shape."""
    if len(shape) != 4:
        return values.view(shape)
    n, channels, height, width = shape
    return values.view(n, height, width, channels).permute(0, 3, 1, 2)


def _normal(key: int, number: int, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    groups = -(-count // (4 * COUNTERS))
    a, b, c, d = philox(key, number, torch.arange(groups * COUNTERS, device=device))
    pairs = [_box_muller(first, second, dtype) for first, second in ((a, b), (c, d))]
    words = [values.view(groups, COUNTERS) for pair in pairs for values in pair]
    return torch.stack(words, dim=1).flatten()[:count]  # (groups, words, counters)


def philox(key: int, number: int, counters: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return four words of 32 bits for each counter, as integers of 64 bits."""
    a, b = counters & LOW, (counters >> 32) & LOW
    c, d = (torch.full_like(counters, word) for word in (number & LOW, number >> 32))
    k0, k1 = key & LOW, key >> 32
    for _ in range(ROUNDS):
        p, q = _product(MULTIPLIERS[0], a), _product(MULTIPLIERS[1], c)
        a, b, c, d = q[0] ^ b ^ k0, q[1], p[0] ^ d ^ k1, p[1]
        k0, k1 = (k0 + KEY_STEPS[0]) & LOW, (k1 + KEY_STEPS[1]) & LOW
    return a, b, c, d


def _product(multiplier: int, words: Tensor) -> tuple[Tensor, Tensor]:
    """Return the upper and the lower half of a product; that it overflows into the sign does not matter."""
    product = words * multiplier
    return (product >> 32) & LOW, product & LOW


def _box_muller(first: Tensor, second: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return two normal values: one word gives the radius, the other the angle; both are exact in float32."""
    radius = torch.sqrt(-2 * torch.log((first >> 9 << 1 | 1).to(dtype) * 2.0**-24))
    turn = second >> 8
    quarter = (turn + (1 << 21)) >> 22  # the nearest one
    angle = (turn - (quarter << 22)).to(dtype) * (math.pi / 2 * 2.0**-22)
    cos, sin, odd = torch.cos(angle), torch.sin(angle), (quarter & 1).bool()
    x, y = torch.where(odd, sin, cos), torch.where(odd, cos, sin)
    return radius * torch.where(((quarter + 1) & 2).bool(), -x, x), radius * torch.where((quarter & 2).bool(), -y, y)
