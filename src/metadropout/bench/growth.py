"""How the cost of a meta-iteration grows with the size of the task, one number at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from metadropout.bench.problem import Setting

GRID = {
    "way": (5, 10, 20),
    "shot": (1, 5, 10),
    "steps": (1, 3, 5, 10),
    "channels": (16, 32, 64, 128),
    "image_size": (28, 42, 56, 84),
}


def points(base: Setting) -> Iterator[tuple[str, int, Setting]]:
    """List (parameter, value, setting): each parameter in turn takes its values, its own one among them."""
    for parameter, values in GRID.items():
        for value in sorted({*values, getattr(base, parameter)}):
            yield parameter, value, replace(base, **{parameter: value})
