"""Data sets: `open_dataset(name)` gives the training, validation and test classes of each."""

from metadropout.data.episodes import Episode, EpisodeSampler
from metadropout.data.images import ClassSubset, ImageSet, ImageShape, Splits
from metadropout.data.registry import DATASETS, open_dataset

__all__ = [
    "DATASETS",
    "ClassSubset",
    "Episode",
    "EpisodeSampler",
    "ImageSet",
    "ImageShape",
    "Splits",
    "open_dataset",
]
