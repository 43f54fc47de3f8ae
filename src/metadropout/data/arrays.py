"""Images that are in memory already: arrays or tensors of a Python program."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from metadropout.data.images import ClassSubset, ImageSet, ImageShape, IntArray, Splits, UInt8Array
from metadropout.errors import DataError


class ArrayImages(ImageSet):
    """Labelled images in memory, grouped by their labels.

    Args:
        images: shape (n, channels, height, width), or (n, height, width) for grey ones: bytes from 0 to 255, which
            learners get as floats in [0, 1], or floats, which they get as they are. Arrays and tensors will do.
        labels: one per image, of any kind that can be sorted or told apart: numbers, texts.
    """

    def __init__(self, images: Any, labels: Sequence[Hashable] | Any) -> None:
        array = np.ascontiguousarray(images)
        if array.ndim == 3:
            array = array[:, None]
        if array.ndim != 4 or not array.size:
            raise DataError(f"images have shape {array.shape}; it must be (n, channels, height, width), and n above 0")
        if array.dtype.kind == "f":
            array = array.astype(np.float32, copy=False)
            if not np.isfinite(array).all():
                raise DataError("an image has values that are not finite numbers")
        elif array.dtype != np.uint8:
            raise DataError(
                f"images are {array.dtype} numbers; give bytes (uint8, 0 to 255) or floats, such as images / 255"
            )
        names = [label.item() if hasattr(label, "item") else label for label in labels]
        if len(names) != len(array):
            raise DataError(f"there are {len(array)} images, but {len(names)} labels")
        self._groups: dict[Hashable, list[int]] = {}
        for number, name in enumerate(names):
            self._groups.setdefault(name, []).append(number)
        kinds = sorted(self._groups, key=lambda name: (type(name).__name__, name))
        self.classes = kinds
        """The labels, in the order of the classes."""
        self.class_names = [str(name) for name in kinds]
        if len(set(self.class_names)) < len(kinds):
            raise DataError("two labels are written alike, such as 1 and '1'; give labels of one kind")
        self.class_sizes = np.asarray([len(self._groups[name]) for name in kinds], dtype=np.int64)
        order = np.concatenate([self._groups[name] for name in kinds])
        self._images = array[order]
        self._starts = np.concatenate([[0], np.cumsum(self.class_sizes)[:-1]])
        self.image_shape = ImageShape(*array.shape[1:])

    def gather(self, classes: IntArray, images: IntArray) -> UInt8Array:
        return self._images[self._starts[classes] + images]  # type: ignore[no-any-return]


def split_classes(
    images: ImageSet, *, validation_share: float = 0.16, test_share: float = 0.2, seed: int = 0
) -> Splits:
    """Share the classes of an image set out among training, validation and testing, at random.

    Args:
        images: all classes.
        validation_share: share of the classes that are validation classes; 0 for none.
        test_share: share of the classes that are test classes.
        seed: of the shuffle before they are shared out.
    """
    count = len(images)
    order = np.random.default_rng(seed).permutation(count)
    validation, test = round(validation_share * count), max(1, round(test_share * count))
    if validation + test >= count:
        raise DataError(f"{count} classes are too few to set {validation} aside for validation and {test} for testing")
    return Splits(
        ClassSubset(images, np.sort(order[validation + test :])),
        ClassSubset(images, np.sort(order[:validation])) if validation else None,
        ClassSubset(images, np.sort(order[validation : validation + test])),
    )
