"""Glyphs: invented handwritten characters, as many classes as wanted, drawn on the fly from a seed.

A character is a small motor program of two to four strokes in the spirit of Lake et al., "Human-level concept
learning through probabilistic program induction" (2015): each stroke is a walk with a heading, a bend and perhaps a
corner, and hangs on a point of an earlier stroke. Every image of it is drawn by another hand, which runs the program
inexactly and then slants, turns, stretches and shifts the result.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import numpy as np
from numpy.typing import NDArray

from metadropout.data.dataset import data_set
from metadropout.data.images import ImageSet, ImageShape, IntArray, Splits, UInt8Array
from metadropout.errors import DataError
from metadropout.options import Limits, Seed

FloatArray = NDArray[np.float32]

SIZE = 28
_MARGIN = 1.5  # pixels of paper kept free on each side, for the width of the pen
_STREAM = 0x61F5  # keeps these random numbers apart from all others that are made from the same seed

# What a hand changes in a stroke: the standard deviation of each number of its program, in the program's own units.
_HAND = {
    "heading": 0.11,  # radians, direction of the stroke (before its corner, if it has one)
    "bend": 0.22,  # radians turned from start to end: 0 is a line, 2π a circle
    "wave": 0.18,  # radians, swing of the heading: an S-curve, or a trembling line
    "corner": 0.18,  # radians turned at once
    "corner_at": 0.05,  # where along the stroke, from 0 to 1
    "log_length": 0.13,
    "anchor_at": 0.05,  # the point of the earlier stroke on which this one hangs, from 0 to 1
    "own_at": 0.04,  # the point of this stroke that is put there
    "gap_x": 0.05,  # how far it misses that point, in lengths of a typical stroke
    "gap_y": 0.05,
}
_HAND_STD = np.array(list(_HAND.values()), dtype=np.float32)
_WHOLE = 7  # numbers that a hand applies to the whole character; see _points


class _Character(NamedTuple):
    """The motor program of one class."""

    strokes: FloatArray
    """Shape (strokes, len(_HAND)), columns in the order of _HAND."""
    anchors: list[int]
    """For each stroke the earlier stroke on which it hangs; the first one's is not used."""
    steps: int
    """In how many straight steps each stroke is drawn."""


class Glyphs(ImageSet):
    """Invented characters: class k depends on (seed, k) alone, and its image j on (seed, k, j) alone.

    Images are drawn when first asked for, a class at a time, and then remembered.

    Args:
        first_class: number of the first class; sets whose number ranges do not overlap share no class.
        n_classes: how many classes.
        images_per_class: how many images of each.
        seed: another seed invents other characters.
    """

    def __init__(self, first_class: int, n_classes: int, *, images_per_class: int = 20, seed: int = 0) -> None:
        _at_least(0, first_class=first_class, seed=seed)
        _at_least(1, n_classes=n_classes, images_per_class=images_per_class)
        self.first_class, self.seed = first_class, seed
        self.image_shape = ImageShape(1, SIZE, SIZE)
        self.class_names = [f"glyph-{k}" for k in range(first_class, first_class + n_classes)]
        self.class_sizes = np.full(n_classes, images_per_class, dtype=np.int64)
        self._drawn: dict[int, UInt8Array] = {}

    def gather(self, classes: IntArray, images: IntArray) -> UInt8Array:
        """Return the images at the given pairs, drawing their classes where that was not done yet."""
        wanted = np.unique(classes)
        # Without this check a number past the end would quietly be a class of the next split.
        if len(wanted) and not 0 <= wanted[0] <= wanted[-1] < len(self):
            raise IndexError(f"classes are numbered 0 to {len(self) - 1}, but got {wanted[0]} to {wanted[-1]}")
        result = np.empty((len(classes), *self.image_shape), dtype=np.uint8)
        for c in wanted:
            here = classes == c
            result[here] = self._class_images(int(c))[images[here]]
        return result

    def strokes(self, c: int) -> FloatArray:
        """Return the lines of all images of a class, in pixels: shape (images, strokes, points, 2), (x, y) last."""
        if not 0 <= c < len(self):
            raise IndexError(f"classes are numbered 0 to {len(self) - 1}, but got {c}")
        return _draw_lines(self.seed, self.first_class + c, int(self.class_sizes[c]))[0]

    def class_digests(self) -> list[str]:
        """Return what each class is drawn from, without drawing any; see `ImageSet.class_digests`."""
        return [f"seed {self.seed}, {size} images" for size in self.class_sizes]

    def _class_images(self, c: int) -> UInt8Array:
        drawn = self._drawn.get(c)
        if drawn is None:
            # Two threads may both get here; they draw the same, and only a finished array is ever stored.
            drawn = self._drawn[c] = _draw_class(self.seed, self.first_class + c, int(self.class_sizes[c]))
        return drawn


@data_set("glyphs")
def glyphs(
    *,
    train_classes: Annotated[int, Limits(1, 1_000_000)] = 1000,
    validation_classes: Annotated[int, Limits(1, 1_000_000)] = 100,
    test_classes: Annotated[int, Limits(1, 1_000_000)] = 400,
    images_per_class: Annotated[int, Limits(1, 10_000)] = 20,
    seed: Seed = 0,
) -> Splits:
    """Invented handwritten characters, 28 × 28 grey: made from a seed, nothing to download.

    Args:
        train_classes: how many characters to train on.
        validation_classes: how many other characters to choose the best checkpoint on.
        test_classes: how many other characters to test on.
        images_per_class: how many hands draw each character.
        seed: another seed invents other characters.
    """
    # Checked here as well, because the user's options have other names than the constructor's.
    _at_least(1, train_classes=train_classes, validation_classes=validation_classes, test_classes=test_classes)
    sets, first = [], 0
    for n_classes in (train_classes, validation_classes, test_classes):
        sets.append(Glyphs(first, n_classes, images_per_class=images_per_class, seed=seed))
        first += n_classes
    return Splits(*sets)


def _at_least(least: int, **arguments: int) -> None:
    """Refuse arguments that are too small, by name."""
    for name, value in arguments.items():
        if value < least:
            raise DataError(f"glyphs: {name} must be at least {least}, but is {value}")


def _draw_class(seed: int, k: int, n: int) -> UInt8Array:
    """Return the first n images of class k, shape (n, 1, SIZE, SIZE)."""
    return _ink(*_draw_lines(seed, k, n))


def _draw_lines(seed: int, k: int, n: int) -> tuple[FloatArray, FloatArray]:
    """Return the lines of the first n images of class k and the pens that draw them; see `_points`."""
    # The class itself has number 0 and image j number j + 1: numpy pads short keys with zeros, so [seed, k] would
    # be the same stream as [seed, k, 0].
    character = _invent(np.random.default_rng([_STREAM, seed, k, 0]))
    n_numbers = character.strokes.size + _WHOLE
    hands = np.stack(
        [np.random.default_rng([_STREAM, seed, k, j + 1]).standard_normal(n_numbers, np.float32) for j in range(n)]
    )
    return _points(character, np.clip(hands, -2.5, 2.5))


def _invent(rng: np.random.Generator) -> _Character:
    """Return a random character that is neither too flat nor a blot."""
    while True:
        n_strokes = int(rng.choice([2, 3, 4], p=[0.4, 0.4, 0.2]))
        strokes = np.stack([_invent_stroke(rng) for _ in range(n_strokes)])
        draft = _Character(strokes, [int(rng.integers(max(s, 1))) for s in range(n_strokes)], steps=24)
        points, pens = _points(draft, np.zeros((1, strokes.size + _WHOLE), dtype=np.float32))
        width, height = np.ptp(points, axis=(0, 1, 2))
        if min(width, height) < 0.55 * max(width, height):
            continue
        # Strokes that lie on each other leave less ink than their lengths promise; a line is 2.45 pens wide.
        lengths = np.linalg.norm(np.diff(points, axis=2), axis=-1).sum(-1)[0]  # (strokes,), in pixels
        if _ink(points, pens).sum() / 255 > 0.92 * lengths.sum() * 2.45 * pens[0]:
            # Steps below a pixel: those of a large image by a thin pen must still overlap.
            return draft._replace(steps=int(np.ceil(1.3 * lengths.max())))


def _invent_stroke(rng: np.random.Generator) -> FloatArray:
    """Return the program of one random stroke, shape (len(_HAND),)."""
    side = rng.choice([-1.0, 1.0])
    bend = wave = corner = 0.0
    log_length = rng.uniform(-0.6, 0.3)
    match rng.choice(["line", "arc", "circle", "wave", "corner"], p=[0.35, 0.28, 0.1, 0.12, 0.15]):
        case "arc":
            bend = side * rng.uniform(1.2, 4.2)
            log_length += 0.3
        case "circle":
            bend = side * rng.uniform(5.2, 6.6)
            log_length += 0.5
        case "wave":
            wave = side * rng.uniform(0.9, 1.7)
            log_length += 0.3
        case "corner":
            corner = side * rng.uniform(1.2, 2.6)
            log_length += 0.3
    # Real scripts prefer upright and level strokes to diagonal ones, and these to any other.
    heading = rng.choice(8, p=[0.17, 0.08] * 4) * np.pi / 4 + rng.normal(0, 0.12)
    gap = rng.normal(0, 0.35, 2) * (rng.random() < 0.25)
    anchor_at, own_at = rng.choice([0.0, 0.25, 0.5, 0.75, 1.0], 2, p=[0.28, 0.1, 0.24, 0.1, 0.28])
    return np.array(
        [heading, bend, wave, corner, rng.uniform(0.3, 0.7), log_length, anchor_at, own_at, *gap], np.float32
    )


def _points(character: _Character, hands: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Run the program by n hands; return the points of all strokes, (n, strokes, steps + 1, 2), and the pens, (n,).

    Args:
        character: the program.
        hands: standard normal numbers that make each hand its own, shape (n, character.strokes.size + _WHOLE).
    """
    n, (n_strokes, n_params), steps = len(hands), character.strokes.shape, character.steps
    programs = character.strokes + _HAND_STD * hands[:, _WHOLE:].reshape(n, n_strokes, n_params)
    heading, bend, wave, corner, corner_at, log_length, anchor_at, own_at = np.moveaxis(programs[..., :8, None], 2, 0)

    # All strokes as walks of equal steps, not yet in place: angle is (n, strokes, steps).
    t = (np.arange(steps, dtype=np.float32) + np.float32(0.5)) / np.float32(steps)
    angle = heading + bend * (t - 0.5) + wave * np.cos(2 * np.pi * t) + corner * (t > corner_at)
    step = np.exp(log_length) / steps
    points = np.zeros((n, n_strokes, steps + 1, 2), dtype=np.float32)
    np.cumsum(step * np.cos(angle), axis=2, out=points[:, :, 1:, 0])
    np.cumsum(step * np.sin(angle), axis=2, out=points[:, :, 1:, 1])

    # Hang each stroke on its anchor; in order, because the anchor must be in place first.
    rows = np.arange(n)
    anchor_index, own_index = (np.rint(np.clip(at[..., 0], 0, 1) * steps).astype(int) for at in (anchor_at, own_at))
    for s in range(1, n_strokes):
        target = points[rows, character.anchors[s], anchor_index[:, s]] + programs[:, s, 8:]
        points[:, s] += (target - points[rows, s, own_index[:, s]])[:, None]

    # The hand's way with the whole character: (n, 2, 2) matrices and what follows.
    turn, slant, stretch, scale, shift_x, shift_y, pen = hands[:, :_WHOLE].T
    cos, sin, wide = np.cos(0.1 * turn), np.sin(0.1 * turn), np.exp(0.12 * stretch)
    shear = wide * 0.14 * slant
    matrix = np.stack([cos * wide, cos * shear - sin / wide, sin * wide, sin * shear + cos / wide], -1)
    points = (points.reshape(n, -1, 2) @ matrix.reshape(n, 2, 2).swapaxes(1, 2)).reshape(points.shape)

    # Centre on the paper at the wanted size, and shift as far as the paper allows.
    low, high = points.min((1, 2)), points.max((1, 2))  # (n, 2)
    room = SIZE / 2 - _MARGIN
    reach = np.minimum(10 * np.exp(0.1 * scale), room)[:, None]
    half = (high - low) / 2
    unit = reach / half.max(1, keepdims=True)
    free = room - half * unit
    shift = np.clip(1.1 * np.stack([shift_x, shift_y], 1), -free, free)
    centre = (low + high) / 2
    points = (points - centre[:, None, None]) * unit[:, None, None] + (SIZE / 2 + shift)[:, None, None]
    return points, 0.62 * np.exp(0.12 * pen)


def _ink(points: FloatArray, pens: FloatArray) -> UInt8Array:
    """Draw strokes given by points in pixels, (n, strokes, points, 2), with pens of radius about 1.2 * pens, (n,).

    Each segment leaves a round Gaussian blot. A Gaussian is a product over x and y, so all blots of an image add up
    in one matrix product; on a line their sum is exp(-distance² / 2 pen²), which is then cut off at one half.
    """
    n = len(points)
    middle = ((points[:, :, 1:] + points[:, :, :-1]) / 2).reshape(n, -1, 2)  # (n, segments, 2)
    length = np.linalg.norm(np.diff(points, axis=2), axis=-1).reshape(n, -1)  # (n, segments)
    pixel = np.arange(SIZE, dtype=np.float32) + np.float32(0.5)
    blot = (middle.swapaxes(1, 2)[..., None] - pixel) / pens[:, None, None, None]  # (n, 2, segments, SIZE)
    np.exp(np.multiply(blot, blot, out=blot) * np.float32(-0.5), out=blot)
    columns, rows = blot[:, 0], blot[:, 1]  # (n, segments, SIZE) each
    rows *= (length / (np.float32(np.sqrt(2 * np.pi)) * pens[:, None]))[..., None]
    sums = rows.swapaxes(1, 2) @ columns  # (n, SIZE, SIZE)
    # The slope makes the edge about one pixel wide; below 1 it would leave grey on paper far from any stroke.
    slope = np.maximum(1.7 * pens, 1.1)[:, None, None]
    ink = np.clip(0.5 + slope * (sums - 0.5), 0, 1)
    drawn: UInt8Array = np.rint(255 * ink).astype(np.uint8)[:, None]
    return drawn
