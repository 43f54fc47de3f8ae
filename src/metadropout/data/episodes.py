"""Episodes: few-shot tasks drawn from an image set, each a function of (seed, iteration, task) alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from metadropout.data.images import ImageSet, UInt8Array
from metadropout.errors import DataError


@dataclass(frozen=True)
class Episode:
    """One few-shot task: labelled support images to learn from, query images to be judged on."""

    support_x: Tensor
    """Shape (way * shot, channels, height, width), values in [0, 1]."""
    support_y: Tensor
    """Shape (way * shot,), labels 0 to way - 1."""
    query_x: Tensor
    """Shape (way * query, channels, height, width)."""
    query_y: Tensor

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> Episode:
        """Return the episode on a device, its images in the given floating-point type."""
        return Episode(
            self.support_x.to(device, dtype),
            self.support_y.to(device),
            self.query_x.to(device, dtype),
            self.query_y.to(device),
        )


class EpisodeSampler:
    """Draws episodes from an image set; the same (seed, iteration, task) gives the same episode anywhere."""

    def __init__(self, images: ImageSet, *, way: int, shot: int, query: int, seed: int) -> None:
        if way > len(images):
            raise DataError(
                f"a {way}-way task needs {way} classes, but this split has {len(images)}; lower episode.way"
            )
        smallest = int(np.argmin(images.class_sizes))
        if shot + query > images.class_sizes[smallest]:
            raise DataError(
                f"{shot} support + {query} query images are more than the {images.class_sizes[smallest]} images "
                f"of class '{images.class_names[smallest]}'; lower episode.shot or episode.query"
            )
        self.images, self.way, self.shot, self.query, self.seed = images, way, shot, query, seed

    def __call__(self, iteration: int, task: int) -> Episode:
        """Return the episode of one task of one meta-iteration."""
        rng = np.random.default_rng([self.seed, iteration, task])
        # Drawing classes without replacement in random order also draws the label order.
        classes = rng.choice(len(self.images), size=self.way, replace=False)
        chosen = np.stack(
            [rng.permutation(self.images.class_sizes[c])[: self.shot + self.query] for c in classes]
        )  # (way, shot + query)
        everything = self.images.gather(np.repeat(classes, self.shot + self.query), chosen.reshape(-1))
        by_class = everything.reshape(self.way, self.shot + self.query, *everything.shape[1:])
        labels = torch.arange(self.way)
        return Episode(
            support_x=_to_float(by_class[:, : self.shot]),
            support_y=labels.repeat_interleave(self.shot),
            query_x=_to_float(by_class[:, self.shot :]),
            query_y=labels.repeat_interleave(self.query),
        )


def _to_float(by_class: UInt8Array) -> Tensor:
    """(way, n, C, H, W) bytes → (way * n, C, H, W) floats in [0, 1]."""
    flat = np.ascontiguousarray(by_class.reshape(-1, *by_class.shape[2:]))
    return torch.from_numpy(flat).float().div_(255)
