"""The data sets by name."""

from __future__ import annotations

from typing import Any

from metadropout.data.cifar import cifar_fs, fc100
from metadropout.data.folder import folder
from metadropout.data.glyphs import glyphs
from metadropout.data.images import Splits
from metadropout.data.miniimagenet import miniimagenet
from metadropout.data.omniglot import omniglot
from metadropout.errors import DataError
from metadropout.registry import Registry

DATASETS = Registry(
    "data",
    {
        "cifar_fs": cifar_fs,
        "fc100": fc100,
        "folder": folder,
        "glyphs": glyphs,
        "miniimagenet": miniimagenet,
        "omniglot": omniglot,
    },
)
"""By name; keyword-only parameters are the options, the docstring their help."""


def open_dataset(name: str, **options: Any) -> Splits:
    """Return the training, validation and test classes of a data set, preparing it where that was not done yet.

    Args:
        name: one of `DATASETS`.
        **options: those of the data set's function.

    Raises:
        DataError: if there is no data set of that name, or it is missing or damaged.
    """
    if name not in DATASETS:
        raise DataError(f"there is no data set '{name}'; known are {', '.join(sorted(DATASETS))}")
    splits: Splits = DATASETS[name](**options)
    return splits
