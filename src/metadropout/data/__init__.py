"""Data sets: `open_dataset(name)` gives the training, validation and test classes of each."""

from metadropout.data.episodes import Episode, EpisodeSampler
from metadropout.data.images import ClassSubset, ImageSet, ImageShape, Splits

__all__ = ["ClassSubset", "Episode", "EpisodeSampler", "ImageSet", "ImageShape", "Splits"]
