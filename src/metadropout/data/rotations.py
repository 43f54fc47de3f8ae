"""Rotated copies of a class as classes of their own."""

from __future__ import annotations

import numpy as np

from metadropout.data.images import ImageSet, IntArray, UInt8Array
from metadropout.errors import DataError

DEGREES = (0, 90, 180, 270)


class RotatedClasses(ImageSet):
    """Every class of another set four times: as it is, and turned by 90, 180 and 270 degrees.

    Class 4c + r is class c of the parent turned counter-clockwise r times. Nothing is stored: images turn when
    they are gathered.
    """

    def __init__(self, parent: ImageSet) -> None:
        _, height, width = parent.image_shape
        if height != width:
            raise DataError(f"images of {height} x {width} pixels cannot be rotated into one shape; make them square")
        self.parent = parent
        self.image_shape = parent.image_shape
        self.class_names = [f"{name}/rot{degrees:03d}" for name in parent.class_names for degrees in DEGREES]
        self.class_sizes = np.repeat(parent.class_sizes, len(DEGREES))

    def gather(self, classes: IntArray, images: IntArray) -> UInt8Array:
        """Return the images at the given pairs, turned; see `ImageSet.gather`."""
        parents, turns = np.divmod(classes, len(DEGREES))
        gathered = self.parent.gather(parents, images)  # (n, C, H, W)
        for turn in (1, 2, 3):
            chosen = turns == turn
            gathered[chosen] = np.rot90(gathered[chosen], turn, axes=(2, 3))
        return gathered
