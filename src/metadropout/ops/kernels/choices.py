"""Which algorithm computes the convolutions of each shape: measured once on a machine, and kept.

Algorithms round in different ways, so a run that is to be repeated bit for bit keeps to its choices: `choosing` notes
them, as a small dictionary that JSON can hold, and `using` goes by them.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Literal, cast

import torch

from metadropout.errors import ConfigError
from metadropout.ops.kernels import build
from metadropout.ops.kernels.convolutions import convolve, weight_gradient

Algorithm = Literal["direct", "winograd-2", "winograd-4"]
"""PyTorch's own, or Winograd's with tiles of 2x2 pixels or of up to 4x4, which needs fewer multiplications and rounds
more: with 64 channels 8e-7 of the result's norm, where tiles of 2x2 give 3e-7 and PyTorch's own 4e-7."""

Choices = dict[str, str]
"""Algorithms by shape: "64x32x14x14" has 64 input channels, 32 output channels, height and width 14."""

TILES: dict[Algorithm, int | None] = {"direct": None, "winograd-2": 2, "winograd-4": 4}

OTHERS = "*"
"""Stands for all shapes that are not among the choices."""

IMAGES, STORED = "images", "bfloat16"
"""{"images": "bfloat16"} among the choices: with precision "bf16", images are stored so from layer to layer. Where it
is missing they are not, as in runs that began before there was that choice."""

DEFAULT: Algorithm = "winograd-2"
"""What computed all convolutions before there was a choice."""

WHERE_NOTHING_IS_KEPT: Algorithm = "winograd-4"

ROUNDS, MOST_IMAGES, MOST_OPERATIONS = 9, 20, 4e9
"""Of a measurement; a task's support set has about that many images."""

FAIR_ROUNDS, HOPELESS = 3, 1.5
"""After that many rounds, what takes this many times as long as the fastest is not measured again."""

_log = logging.getLogger(__name__)
_one_at_a_time = threading.Lock()
_given: ContextVar[Mapping[str, str] | None] = ContextVar("_given", default=None)
_noted: ContextVar[Choices | None] = ContextVar("_noted", default=None)


def tile(
    in_channels: int, out_channels: int, height: int, width: int, dtype: torch.dtype = torch.float32
) -> int | None:
    """Return the size of tiles by which to compute convolutions of a shape and type, None for PyTorch's own.

    They are as given by `using`, else what is fastest on this machine.
    """
    shape = f"{in_channels}x{out_channels}x{height}x{width}"
    given, noted = _given.get(), _noted.get()
    chosen = _of_this_machine(shape, dtype) if given is None else given.get(shape, given.get(OTHERS, DEFAULT))
    if noted is not None:
        noted[shape] = chosen
    return TILES[cast("Algorithm", chosen)]


def stores_bf16() -> bool:
    """Say whether images may be stored in bfloat16, where the precision is "bf16"; it is noted."""
    given, noted = _given.get(), _noted.get()
    stores = given is None or given.get(IMAGES) == STORED
    if stores and noted is not None:
        noted[IMAGES] = STORED
    return stores


@contextmanager
def using(choices: Mapping[str, str]) -> Iterator[None]:
    """Compute convolutions as chosen before inside of a `with` block.

    Args:
        choices: what `choosing` gave. Shapes that are not among them go by 2x2 tiles, as all did before there was a
            choice, or as `{"*": ...}` says.

    Raises:
        ConfigError: if an algorithm is not known.
    """
    for shape, name in choices.items():
        if name not in TILES and (shape, name) != (IMAGES, STORED):
            raise ConfigError(
                f"the convolutions of shape {shape} are to be computed by '{name}', but only "
                f"{', '.join(TILES)} are known; was this made by a newer version?"
            )
    token = _given.set(choices)
    try:
        yield
    finally:
        _given.reset(token)


@contextmanager
def choosing() -> Iterator[Choices]:
    """Give a dictionary that notes the algorithm of every shape that is convolved inside of a `with` block."""
    choices: Choices = {}
    token = _noted.set(choices)
    try:
        yield choices
    finally:
        _noted.reset(token)


def _of_this_machine(shape: str, dtype: torch.dtype) -> Algorithm:
    with _one_at_a_time:
        return _kept_or_measured(shape, dtype)


@functools.cache
def _kept_or_measured(shape: str, dtype: torch.dtype) -> Algorithm:
    parts = [build.key(), torch.__version__, shape, *([] if dtype == torch.float32 else [str(dtype)])]
    name = f"choice-{hashlib.sha256(repr(parts).encode()).hexdigest()[:20]}.txt"
    try:
        with build.private_folder() as folder:
            path = folder / name
            if (kept := _read(path)) is None:
                # Whoever is first decides for all processes, so that they agree.
                build.write_new(path, f"{_measured(shape, dtype)} for {shape}\n".encode())
                kept = _read(path)
            if kept is None:
                raise OSError(f"{name} cannot be read")
            return kept
    except OSError as error:  # processes that measure for themselves might not agree
        _log.info("%s for convolutions of shape %s, as no choice can be kept: %s", WHERE_NOTHING_IS_KEPT, shape, error)
        return WHERE_NOTHING_IS_KEPT


def _read(path: Path) -> Algorithm | None:
    try:
        name = path.read_text().partition(" ")[0]
    except FileNotFoundError:
        return None
    except UnicodeDecodeError:
        name = ""
    if name in TILES:
        return name
    path.unlink()  # damaged
    return None


def _measured(shape: str, dtype: torch.dtype) -> Algorithm:
    """Return what computes a convolution and its two gradients in the least time."""
    in_channels, out_channels, height, width = map(int, shape.split("x"))
    operations = 2 * 9 * in_channels * out_channels * height * width
    n = max(1, min(MOST_IMAGES, int(MOST_OPERATIONS / operations)))
    x, g, weight = (
        torch.ones(size, dtype=kind, device="cpu").contiguous(memory_format=torch.channels_last)
        for size, kind in (
            ((n, in_channels, height, width), dtype),
            ((n, out_channels, height, width), dtype),
            ((out_channels, in_channels, 3, 3), torch.float32),
        )
    )

    def direct() -> None:
        options = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
        w = weight.to(dtype)
        torch.ops.aten.convolution(x, w, None, *options)
        torch.ops.aten.convolution_backward(g, x, w, None, *options, [True, True, False])

    def winograd(tile: int) -> None:
        convolve(x, weight, tile=tile)
        convolve(g, weight, tile=tile, turned=True)
        weight_gradient(x, g, tile=tile)

    work: dict[Algorithm, Callable[[], None]] = {
        "direct": direct,
        "winograd-2": functools.partial(winograd, 2),
        "winograd-4": functools.partial(winograd, 4),
    }
    seconds = dict.fromkeys(work, math.inf)
    with torch.no_grad():
        for number in range(ROUNDS):
            for name, run in work.items():
                if number >= FAIR_ROUNDS and seconds[name] > HOPELESS * min(seconds.values()):
                    continue
                start = time.thread_time()  # not what other processes do at the same time
                run()
                seconds[name] = min(seconds[name], time.thread_time() - start)
    _log.info("convolutions of shape %s take %s", shape, seconds)
    return min(seconds, key=lambda name: seconds[name])
