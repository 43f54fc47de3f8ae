"""The one interface of all data sets: classes, the images of a class, arrays."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

UInt8Array = NDArray[np.uint8]
IntArray = NDArray[np.int64]


class ImageShape(NamedTuple):
    """Channels, height and width of every image in a set."""

    channels: int
    height: int
    width: int


class ImageSet(ABC):
    """Images grouped by class, addressed by (class, image) pairs."""

    image_shape: ImageShape
    class_names: Sequence[str]
    class_sizes: IntArray
    """How many images each class has, shape (number of classes,)."""

    def __len__(self) -> int:
        """The number of classes."""
        return len(self.class_sizes)

    @abstractmethod
    def gather(self, classes: IntArray, images: IntArray) -> UInt8Array:
        """Return the images at the given pairs as one array.

        Args:
            classes: class numbers, shape (n,).
            images: for each of them the number of an image within its class, shape (n,).

        Returns:
            Array of shape (n, channels, height, width), the caller's own.
        """

    def checksum(self) -> str:
        """Return a checksum of everything in the set: names, sizes and pixels of all classes in their order.

        Equal sets give equal episodes. Sets that know a shorter way to such a checksum take it, so it is compared
        between sets that were opened in the same way, not between kinds of sets.
        """
        digest = hashlib.sha256(repr((tuple(self.image_shape), *self.class_names)).encode())
        for number, size in enumerate(self.class_sizes):
            digest.update(self.gather(np.full(size, number), np.arange(size)).tobytes())
        return digest.hexdigest()


class ClassSubset(ImageSet):
    """Some classes of another set, renumbered from zero."""

    def __init__(self, parent: ImageSet, classes: Sequence[int] | IntArray) -> None:
        self.parent = parent
        self.classes = np.asarray(classes, dtype=np.int64)
        self.image_shape = parent.image_shape
        self.class_names = [parent.class_names[c] for c in self.classes]
        self.class_sizes = parent.class_sizes[self.classes]

    def gather(self, classes: IntArray, images: IntArray) -> UInt8Array:
        """Return the images at the given pairs as one array; see `ImageSet.gather`."""
        return self.parent.gather(self.classes[classes], images)

    def checksum(self) -> str:
        """Return a checksum of the parent and the choice of classes; see `ImageSet.checksum`."""
        return hashlib.sha256(f"{self.parent.checksum()} {self.classes.tolist()}".encode()).hexdigest()


@dataclass(frozen=True)
class Splits:
    """A data set's training, validation and test classes; no class is in two of them."""

    train: ImageSet
    validation: ImageSet | None
    """None where the data set sets no validation classes aside."""
    test: ImageSet
