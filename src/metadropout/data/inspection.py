"""What is there of the data sets, and whether it is still what was prepared."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from metadropout.data import cifar, miniimagenet, omniglot
from metadropout.data.cache import Manifest, PreparedSet, read_manifest
from metadropout.data.images import ImageSet, Splits
from metadropout.data.locations import cache_directory, data_directory
from metadropout.data.sources import Source
from metadropout.errors import DataError

# The start of the cache's file names, and what looks for the source in a directory.
_FILE_BASED: dict[str, tuple[str, Callable[[Path], Source | None]]] = {
    "cifar_fs": ("cifar100-", cifar.find_in),
    "fc100": ("cifar100-", cifar.find_in),
    "folder": ("folder-", lambda _: None),
    "miniimagenet": ("miniimagenet-", miniimagenet.find_in),
    "omniglot": ("omniglot-", omniglot.find_in),
}


class State(NamedTuple):
    """Where a data set stands, in words."""

    summary: str
    detail: str


def state_of(name: str) -> State:
    """Say whether a data set is prepared, waiting in the data directory, or missing."""
    if name not in _FILE_BASED:
        return State("built in", "needs no files")
    prefix, find_in = _FILE_BASED[name]
    manifests = [read_manifest(path) for path in sorted(cache_directory().glob(f"{prefix}*.json"))]
    prepared = [manifest for manifest in manifests if manifest is not None]
    if prepared:
        return State("prepared", ", ".join(_describe(manifest) for manifest in prepared))
    if name == "folder":
        return State("yours", "any folder of images, with --from")
    try:
        source = find_in(data_directory())
    except DataError as error:
        return State("incomplete", str(error))
    if source is not None:
        return State("found", str(source.inputs[0]))
    return State("downloaded when needed" if name == "omniglot" else "not here", f"looked in {data_directory()}")


def prepared_of(images: ImageSet) -> PreparedSet | None:
    """Return the prepared set behind a split; None for one that is computed."""
    while not isinstance(images, PreparedSet):
        parent = getattr(images, "parent", None)
        if not isinstance(parent, ImageSet):
            return None
        images = parent
    return images


def check(splits: Splits) -> list[str]:
    """Check an opened data set thoroughly and return what was found in order.

    Raises:
        DataError: at the first thing that is not.
    """
    found = []
    parts = {"train": splits.train, "validation": splits.validation, "test": splits.test}
    names: list[str] = []
    for part, images in parts.items():
        if images is None:
            continue
        names += images.class_names
        smallest = int(np.argmin(images.class_sizes))
        if images.class_sizes[smallest] < 2:
            raise DataError(
                f"class '{images.class_names[smallest]}' has {images.class_sizes[smallest]} image, too few for a "
                "support and a query image; add images or remove the class"
            )
        sizes = f"{images.class_sizes.min()} to {images.class_sizes.max()} images each"
        found.append(f"{part}: {len(images)} classes, {int(images.class_sizes.sum())} images, {sizes}")
    if len(set(names)) != len(names):
        raise DataError("a class is in two splits, so that test classes are seen in training")
    found.append("no class is in two splits")
    prepared = prepared_of(splits.train)
    if prepared is not None:
        prepared.verify()
        found.append(f"the pixels in {prepared.pixel_path} have the checksum of the manifest")
        found.append(_check_source(prepared))
    return found


def _check_source(prepared: PreparedSet) -> str:
    recorded = prepared.manifest["source"]
    inputs = tuple(Path(str(entry.get("path"))) for entry in recorded["inputs"])
    if not all(path.exists() for path in inputs):
        return f"the source in {recorded['directory']} is gone; the prepared set does without it"
    if not Source(Path(recorded["directory"]), inputs).matches(recorded, thorough=True):
        raise DataError(
            f"the source in {recorded['directory']} is not what {prepared.manifest_path} was prepared from; "
            "prepare again with --force"
        )
    return f"the source in {recorded['directory']} is what was prepared"


def _describe(manifest: Manifest) -> str:
    channels, height, width = manifest["image_shape"]
    return (
        f"{manifest['name']} ({len(manifest['classes'])} x {height}x{width}x{channels}, "
        f"{manifest['pixels']['bytes'] / 1e6:.0f} MB)"
    )
