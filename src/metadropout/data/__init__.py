"""Data sets: `open_dataset(name)` gives the training, validation and test classes of each."""

from metadropout.data.arrays import ArrayImages, split_classes
from metadropout.data.episodes import Episode, EpisodeIndices, EpisodeSampler
from metadropout.data.images import ClassSubset, Identity, ImageSet, ImageShape, Splits
from metadropout.data.prefetch import Prefetcher
from metadropout.data.registry import DATASETS, open_dataset
from metadropout.data.saved_episodes import SavedEpisodes, load_episodes, save_episodes

__all__ = [
    "DATASETS",
    "ArrayImages",
    "ClassSubset",
    "Episode",
    "EpisodeIndices",
    "EpisodeSampler",
    "Identity",
    "ImageSet",
    "ImageShape",
    "Prefetcher",
    "SavedEpisodes",
    "Splits",
    "load_episodes",
    "open_dataset",
    "save_episodes",
    "split_classes",
]


def __dir__() -> list[str]:
    return __all__
