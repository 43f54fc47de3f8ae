"""Episodes: few-shot tasks drawn from an image set, each a function of (seed, iteration, task) alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from metadropout.data.images import ImageSet, IntArray
from metadropout.errors import DataError


@dataclass(frozen=True)
class Episode:
    """One few-shot task: labelled support images to learn from, query images to be judged on.

    Images are floats in [0, 1], or bytes that `to` turns into such floats on the device they are for.
    """

    support_x: Tensor
    """Shape (way * shot, channels, height, width)."""
    support_y: Tensor
    """Shape (way * shot,), labels 0 to way - 1."""
    query_x: Tensor
    """Shape (way * query, channels, height, width)."""
    query_y: Tensor
    inductive: bool = field(default=False, kw_only=True)
    """Whether each query image is to be answered by itself; otherwise they may be normalised together."""

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return support images and labels, query images and labels."""
        return self.support_x, self.support_y, self.query_x, self.query_y

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> Episode:
        """Return the episode on a device, its images as floats in [0, 1] of the given type.

        Args:
            device: where to.
            dtype: floating-point type of the images; None keeps floats as they are and makes bytes float32.
        """
        # Towards the CPU nobody may go on before everything has arrived.
        background = torch.device(device).type == "cuda"
        return Episode(
            _to_float(self.support_x.to(device, non_blocking=background), dtype),
            self.support_y.to(device, non_blocking=background),
            _to_float(self.query_x.to(device, non_blocking=background), dtype),
            self.query_y.to(device, non_blocking=background),
            inductive=self.inductive,
        )

    def pin_memory(self) -> Episode:
        """Return a copy in page-locked memory, from which `to` copies to a GPU without making anyone wait."""
        return Episode(*(tensor.pin_memory() for tensor in self.tensors()), inductive=self.inductive)


class EpisodeIndices(NamedTuple):
    """Which images make an episode."""

    classes: IntArray
    """Shape (way,): the class of each label."""
    images: IntArray
    """Shape (way, shot + query): for each label the images of its class, support first."""


class EpisodeSampler:
    """Draws episodes from an image set; the same (seed, iteration, task) gives the same episode anywhere.

    Args:
        images: classes to draw from.
        way: classes in an episode.
        shot: support images per class.
        query: query images per class.
        seed: seed of all draws.
        inductive: the protocol of the episodes: whether each query image is to be answered by itself.
    """

    def __init__(
        self, images: ImageSet, *, way: int, shot: int, query: int, seed: int, inductive: bool = False
    ) -> None:
        for name, value in (("way", way), ("shot", shot), ("query", query)):
            if value < 1:
                raise DataError(f"episode.{name} is {value}; it has to be at least 1")
        if seed < 0:
            raise DataError(f"the seed is {seed}; it must not be negative")
        if not len(images):
            raise DataError("there are no classes here to draw episodes from")
        if way > len(images):
            raise DataError(
                f"a {way}-way task needs {way} classes, but this split has {len(images)}; lower episode.way"
            )
        smallest = int(np.argmin(images.class_sizes))
        if shot + query > images.class_sizes[smallest]:
            raise DataError(
                f"{shot} support + {query} query images are more than the {images.class_sizes[smallest]} images "
                f"of class '{images.class_names[smallest]}'; lower episode.shot or episode.query, add images, or (of a "
                f"folder) leave such classes out with --data.min_images {shot + query}"
            )
        self.images, self.way, self.shot, self.query, self.seed = images, way, shot, query, seed
        self.inductive = inductive
        self._key = np.random.SeedSequence(seed).generate_state(2, np.uint64)

    def __call__(self, iteration: int, task: int) -> Episode:
        """Return the episode of one task of one meta-iteration, its images as floats in [0, 1]."""
        return self.raw(iteration, task).to("cpu")

    def raw(self, iteration: int, task: int) -> Episode:
        """Return the same episode with images as bytes: a quarter to copy, made floats by `Episode.to`."""
        return assemble(self.images, self.indices(iteration, task), self.shot, inductive=self.inductive)

    def indices(self, iteration: int, task: int) -> EpisodeIndices:
        """Draw the classes, their order, and the images of one task, without looking at any image."""
        # A counter-based generator: each (iteration, task) is a place in the one stream that belongs to the seed, 2^128
        # numbers from the next.
        rng = np.random.Generator(np.random.Philox(key=self._key, counter=[0, 0, task, iteration]))
        # Drawing classes without replacement in random order also draws the label order.
        classes = rng.choice(len(self.images), size=self.way, replace=False)
        sizes = self.images.class_sizes[classes]
        # A random number for every image; those with the smallest are drawn, in the order of their numbers. This draws
        # for all classes at once. Numbers beyond the end of a smaller class are out of reach.
        numbers = rng.random((self.way, int(sizes.max())))  # (way, largest class)
        numbers[np.arange(numbers.shape[1]) >= sizes[:, None]] = 2
        wanted = self.shot + self.query
        if numbers.shape[1] > 4 * wanted:  # sort only what is drawn
            drawn = np.argpartition(numbers, wanted, axis=1)[:, :wanted]
            order = np.take_along_axis(numbers, drawn, axis=1).argsort(axis=1)
            return EpisodeIndices(classes, np.take_along_axis(drawn, order, axis=1))
        return EpisodeIndices(classes, numbers.argsort(axis=1)[:, :wanted])


def assemble(images: ImageSet, indices: EpisodeIndices, shot: int, *, inductive: bool = False) -> Episode:
    """Gather the images of an episode, as bytes.

    Args:
        images: the set that the indices were drawn from.
        indices: which of them.
        shot: how many of each class are support images; the others are query images.
        inductive: the episode's protocol.
    """
    way, per_class = indices.images.shape
    support = way * shot
    # All support images before all query images: one gathering, then two views of it.
    chosen = np.concatenate([indices.images[:, :shot].reshape(-1), indices.images[:, shot:].reshape(-1)])
    labels = np.concatenate([np.repeat(np.arange(way), shot), np.repeat(np.arange(way), per_class - shot)])
    x = torch.from_numpy(images.gather(indices.classes[labels], chosen))  # (way * (shot + query), C, H, W)
    y = torch.from_numpy(labels)
    return Episode(x[:support], y[:support], x[support:], y[support:], inductive=inductive)


def _to_float(images: Tensor, dtype: torch.dtype | None) -> Tensor:
    if images.dtype == torch.uint8:
        # By way of float32 in any case, so that an episode has the same values whichever way it came.
        images = images.to(torch.float32).mul_(1 / 255)
    return images if dtype is None else images.to(dtype)
