"""Fixed lists of episodes in a file, so that every method on every machine is tested on exactly the same ones."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from metadropout.data.episodes import Episode, EpisodeIndices, EpisodeSampler, assemble
from metadropout.data.images import ImageSet
from metadropout.errors import DataError
from metadropout.files import read_json, write_atomically

FORMAT = "metadropout-episodes-1"
MAX_BYTES = 2**28


class SavedEpisodes:
    """A fixed list of episodes of one image set; called like a sampler, it takes the task's number as the place."""

    def __init__(
        self, images: ImageSet, indices: Sequence[EpisodeIndices], *, shot: int, inductive: bool = False
    ) -> None:
        self.images, self.shot, self.inductive = images, shot, inductive
        self._indices = list(indices)
        self.way, per_class = self._indices[0].images.shape
        self.query = per_class - shot

    def __len__(self) -> int:
        return len(self._indices)

    def __call__(self, iteration: int, task: int) -> Episode:
        """Return an episode, its images as floats in [0, 1].

        Args:
            iteration: not used; there so that a list can stand where a sampler does.
            task: the place in the list, from 0.
        """
        return self.raw(iteration, task).to("cpu")

    def raw(self, iteration: int, task: int) -> Episode:
        """Return the same episode with images as bytes; see `EpisodeSampler.raw`."""
        return assemble(self.images, self.indices(iteration, task), self.shot, inductive=self.inductive)

    def indices(self, iteration: int, task: int) -> EpisodeIndices:
        """Return which images make an episode."""
        if not 0 <= task < len(self):
            raise DataError(f"episode {task} is asked for, but the list has {len(self)}; save a longer list")
        return self._indices[task]


def save_episodes(path: Path | str, sampler: EpisodeSampler, count: int, *, iteration: int = 0) -> None:
    """Write the first episodes of a sampler to a JSON file.

    Args:
        path: the file; one that exists is replaced.
        sampler: what draws them.
        count: how many; they are tasks 0 to count - 1 of the iteration.
        iteration: of which iteration.
    """
    if count < 1:
        raise DataError(f"a list of {count} episodes is asked for; it has to be at least 1")
    drawn = (sampler.indices(iteration, task) for task in range(count))
    body = {
        "format": FORMAT,
        "way": sampler.way,
        "shot": sampler.shot,
        "query": sampler.query,
        "images": sampler.images.checksum(),
        "episodes": [{"classes": item.classes.tolist(), "images": item.images.tolist()} for item in drawn],
    }
    try:
        write_atomically(Path(path), json.dumps({**body, "checksum": _checksum(body)}))
    except OSError as error:
        raise DataError(f"cannot write the episode list {path}: {error.strerror or error}") from error


def load_episodes(path: Path | str, images: ImageSet, *, inductive: bool = False) -> SavedEpisodes:
    """Read a list of episodes.

    Args:
        path: a file written by `save_episodes`.
        images: the image set (the split) that it was drawn from.
        inductive: the protocol of the episodes, which the list leaves open.

    Raises:
        DataError: if the file is damaged, or was drawn from other images.
    """
    path = Path(path)
    try:
        body = read_json(path, MAX_BYTES)
    except OSError as error:
        raise DataError(f"cannot read the episode list {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise _damaged(path, f"not JSON, or cut short: {error}") from error
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise _damaged(path, f"its format is not {FORMAT}")
    if body.pop("checksum", None) != _checksum(body):
        raise _damaged(path, "it has been changed since it was saved")
    if body.get("images") != images.checksum():
        raise DataError(
            f"{path}: the episode list was drawn from other images than these (another data set, split or "
            "preparation); open the data set with the options it was saved with, or save a new list"
        )
    try:
        way, shot, query = (_count(body[name]) for name in ("way", "shot", "query"))
        shape = (way, shot + query)
        indices = [_indices(item, shape, images) for item in body["episodes"]]
        if not indices:
            raise ValueError("no episodes")
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise _damaged(path, f"contents of another kind: {error!r}") from error
    return SavedEpisodes(images, indices, shot=shot, inductive=inductive)


def _count(value: Any) -> int:
    if type(value) is not int or value < 1:
        raise ValueError(f"{value!r} is not a number of classes or images")
    return value


def _indices(item: Any, shape: tuple[int, int], images: ImageSet) -> EpisodeIndices:
    indices = EpisodeIndices(*(np.asarray(item[key], dtype=np.int64) for key in ("classes", "images")))
    if indices.images.shape != shape or indices.classes.shape != shape[:1]:
        raise ValueError(f"an episode of shape {indices.images.shape} instead of {shape}")
    if not ((indices.classes >= 0) & (indices.classes < len(images))).all():
        raise ValueError("a class that does not exist")
    if not ((indices.images >= 0) & (indices.images < images.class_sizes[indices.classes][:, None])).all():
        raise ValueError("an image that does not exist")
    return indices


def _damaged(path: Path, reason: str) -> DataError:
    return DataError(
        f"{path}: not a usable episode list ({reason}); get it again from where it was saved, or delete it and save a "
        "new one"
    )


def _checksum(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
