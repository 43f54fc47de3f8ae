"""Rotated copies of a class as classes of their own."""

from __future__ import annotations

import hashlib

import numpy as np
import torch

from metadropout.data.images import ImageSet, IntArray, UInt8Array
from metadropout.errors import DataError

DEGREES = (0, 90, 180, 270)

# Turning an image takes many times as long as copying it. Sets that stay below this size with all their rotations
# (Omniglot's training classes take 75 MB) remember the classes they have turned.
MAX_REMEMBERED_BYTES = 256 * 2**20


class RotatedClasses(ImageSet):
    """Every class of another set four times: as it is, and turned by 90, 180 and 270 degrees.

    Class 4c + r is class c of the parent turned counter-clockwise r times. Classes are turned when first asked for.
    """

    def __init__(self, parent: ImageSet) -> None:
        _, height, width = parent.image_shape
        if height != width:
            raise DataError(f"images of {height} x {width} pixels cannot be rotated into one shape; make them square")
        self.parent = parent
        self.image_shape = parent.image_shape
        self.class_names = [f"{name}/rot{degrees:03d}" for name in parent.class_names for degrees in DEGREES]
        self.class_sizes = np.repeat(parent.class_sizes, len(DEGREES))
        self._first: IntArray = np.cumsum(self.class_sizes) - self.class_sizes
        total = int(self.class_sizes.sum())
        self._remembers = total * int(np.prod(self.image_shape)) <= MAX_REMEMBERED_BYTES
        # Takes no memory until it is written to.
        self._turned: UInt8Array = np.empty((total if self._remembers else 0, *self.image_shape), np.uint8)
        self._is_turned = np.zeros(len(self.class_sizes), dtype=bool)

    def gather(self, classes: IntArray, images: IntArray) -> UInt8Array:
        """Return the images at the given pairs, turned; see `ImageSet.gather`."""
        if not self._remembers:
            return self._turn(classes, images)
        if not self._is_turned[classes].all():
            self._remember(np.unique(classes[~self._is_turned[classes]]))
        gathered: UInt8Array = self._turned[self._first[classes] + images]
        return gathered

    def checksum(self) -> str:
        """Return a checksum made from the parent's; see `ImageSet.checksum`."""
        return hashlib.sha256(f"{self.parent.checksum()} rotated".encode()).hexdigest()

    def class_digests(self) -> list[str]:
        """Return the parent's digests, each with the turn; see `ImageSet.class_digests`."""
        return [f"{digest}-{degrees}" for digest in self.parent.class_digests() for degrees in DEGREES]

    def _turn(self, classes: IntArray, images: IntArray) -> UInt8Array:
        parents, turns = np.divmod(classes, len(DEGREES))
        gathered = self.parent.gather(parents, images)  # (n, C, H, W)
        for turn in (1, 2, 3):
            chosen = np.flatnonzero(turns == turn)
            # PyTorch's rot90, because NumPy's is slower on bytes.
            turned = torch.rot90(torch.from_numpy(gathered[chosen]), turn, (2, 3))
            gathered[chosen] = turned.numpy()
        return gathered

    def _remember(self, classes: IntArray) -> None:
        sizes = self.class_sizes[classes]
        which = np.repeat(classes, sizes)
        images = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)  # 0, 1, … within each class
        self._turned[self._first[which] + images] = self._turn(which, images)
        # Last, so that another thread never takes a class for turned that is not; turning one twice does no harm.
        self._is_turned[classes] = True
