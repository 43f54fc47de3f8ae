"""The one interface of all data sets: classes, the images of a class, arrays."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from metadropout.data.class_lists import counted, listed

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

    def class_digests(self) -> list[str]:
        """Return a digest of each class: of its images in their order.

        As with `checksum`, sets that know a shorter way take it.
        """
        return [
            hashlib.sha256(self.gather(np.full(size, number), np.arange(size)).tobytes()).hexdigest()[:32]
            for number, size in enumerate(self.class_sizes)
        ]


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

    def class_digests(self) -> list[str]:
        """Return the parent's digests of these classes; see `ImageSet.class_digests`."""
        digests = self.parent.class_digests()
        return [digests[c] for c in self.classes]


@dataclass(frozen=True)
class Identity:
    """What identifies a data set, wherever its files lie: its classes, split by split, and a digest of their images."""

    classes: dict[str, list[str]]
    """The names of the "train", "validation" and "test" classes, in their order."""
    digest: str
    """Of the images of all these classes; classes that are in no split do not count."""
    images: dict[str, list[str]] = field(default_factory=dict)
    """A digest of each class's images, in the order of `classes`; nothing in files of earlier versions."""

    def trained_on(self, now: Identity, split: str) -> dict[str, str]:
        """Find those classes of another data set that are training classes of this one, whatever they are called.

        Args:
            now: the other data set.
            split: which of its classes are looked for.

        Returns:
            The other data set's names of these classes, and this one's.
        """
        found = {name: name for name in now.classes[split] if name in set(self.classes["train"])}
        own = dict(zip(self.images.get("train", ()), self.classes["train"], strict=False))
        for name, digest in zip(now.classes[split], now.images.get(split, ()), strict=False):
            if digest in own:
                found.setdefault(name, own[digest])
        return found

    def changes(self, now: Identity) -> list[str]:
        """Say what is different in a data set that was this one, nothing where it is the same.

        Args:
            now: the data set as it is now.
        """
        found = []
        for split, before in self.classes.items():
            after = now.classes[split]
            for what, names in (("new", set(after) - set(before)), ("gone", set(before) - set(after))):
                if names:
                    shown = listed(map(repr, sorted(names)), 5)
                    count = counted(len(names), f"{split} class is", f"{split} classes are")
                    found.append(f"{count} {what}: {shown}")
            if before != after and sorted(before) == sorted(after):
                found.append(f"the {split} classes are in another order")
        if not found and self.digest != now.digest:
            found.append("the classes are the same, but their images are not")
        return found


@dataclass(frozen=True)
class Splits:
    """A data set's training, validation and test classes; no class is in two of them."""

    train: ImageSet
    """Without any class where a data set is for testing only."""
    validation: ImageSet | None
    """None where the data set sets no validation classes aside."""
    test: ImageSet

    @cached_property
    def identity(self) -> Identity:
        """What identifies this data set: see `Identity`."""
        parts = {"train": self.train, "validation": self.validation, "test": self.test}
        classes = {part: [] if images is None else list(images.class_names) for part, images in parts.items()}
        digests = {part: [] if images is None else images.class_digests() for part, images in parts.items()}
        digest = hashlib.sha256(repr(tuple(self.train.image_shape)).encode())
        for part in parts:
            for name, of_class in zip(classes[part], digests[part], strict=True):
                digest.update(f"{name!r} {of_class}\n".encode())
        return Identity(classes, digest.hexdigest(), digests)
