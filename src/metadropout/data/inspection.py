"""What is there of the data sets, and whether it is still what was prepared."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from metadropout.data.cache import Manifest, PreparedSet, read_manifest
from metadropout.data.class_lists import counted, listed
from metadropout.data.dataset import DataSet
from metadropout.data.findings import Finding
from metadropout.data.images import ImageSet, Splits
from metadropout.data.locations import cache_directory, data_directory
from metadropout.data.registry import DATASETS
from metadropout.data.sources import Source
from metadropout.errors import DataError


class DatasetState(NamedTuple):
    """Where a data set stands, in words."""

    summary: str
    detail: str


def state_of(name: str) -> DatasetState:
    """Say whether a data set is prepared, waiting in the data directory, or missing."""
    data_set = DATASETS[name]
    if not isinstance(data_set, DataSet) or not data_set.prepared_as:
        return DatasetState("built in" if isinstance(data_set, DataSet) else "yours", "needs no files")
    manifests = [read_manifest(path) for path in sorted(cache_directory().glob(f"{data_set.prepared_as}*.json"))]
    prepared = [manifest for manifest in manifests if manifest is not None]
    if prepared:
        return DatasetState("prepared", ", ".join(_describe(manifest) for manifest in prepared))
    if data_set.find_in is None:
        return DatasetState("yours", "any folder of images, with --from")
    try:
        source = data_set.find_in(data_directory())
    except DataError as error:
        return DatasetState("incomplete", str(error))
    if source is not None:
        return DatasetState("found", str(source.inputs[0]))
    return DatasetState(data_set.absent, f"looked in {data_directory()}")


def prepared_of(images: ImageSet) -> PreparedSet | None:
    """Return the prepared set behind a split; None for one that is computed."""
    while not isinstance(images, PreparedSet):
        parent = getattr(images, "parent", None)
        if not isinstance(parent, ImageSet):
            return None
        images = parent
    return images


def check(splits: Splits) -> list[Finding]:
    """Check an opened data set thoroughly and return what was found.

    Raises:
        DataError: at the first thing for which the data cannot be used.
    """
    parts = {"train": splits.train, "validation": splits.validation, "test": splits.test}
    there = {part: images for part, images in parts.items() if images is not None and len(images)}
    found = [Finding(True, _check_sizes(part, images)) for part, images in there.items()]
    names = [name for images in there.values() for name in images.class_names]
    if len(set(names)) != len(names):
        raise DataError("a class is in two splits, so that test classes are seen in training")
    found.append(Finding(True, "no class is in two splits"))
    prepared = prepared_of(splits.train)
    if prepared is None:
        return found
    prepared.verify()
    found.append(Finding(True, f"the pixels in {prepared.pixel_path} have the checksum of the manifest"))
    found.append(_check_source(prepared))
    found += [Finding(False, f"left out: {text}") for text in prepared.manifest["notes"].get("left out", [])]
    for data_set in DATASETS.values():
        if getattr(data_set, "identify", None) and prepared.manifest["name"].startswith(data_set.prepared_as):
            found += data_set.identify(prepared.manifest)
    return [*found, _check_duplicates(there)]


def _check_sizes(part: str, images: ImageSet) -> str:
    smallest = int(np.argmin(images.class_sizes))
    if images.class_sizes[smallest] < 2:
        raise DataError(
            f"class '{images.class_names[smallest]}' has {images.class_sizes[smallest]} image, too few for a "
            "support and a query image; add images, remove the class, or (of a folder) leave such classes out with "
            "--data.min_images 2"
        )
    sizes = f"{images.class_sizes.min()} to {images.class_sizes.max()} images each"
    return f"{part}: {len(images)} classes, {int(images.class_sizes.sum())} images, {sizes}"


def _check_duplicates(parts: Mapping[str, ImageSet]) -> Finding:
    """Look for images that are the same in two splits, pixel by pixel."""
    first: dict[bytes, tuple[str, str]] = {}
    pairs = []
    for part, images in parts.items():
        for number, (name, size) in enumerate(zip(images.class_names, images.class_sizes, strict=True)):
            for i, image in enumerate(images.gather(np.full(size, number), np.arange(size))):
                known_part, known = first.setdefault(
                    hashlib.blake2b(image, digest_size=16).digest(), (part, f"{part} '{name}' {i}")
                )
                if known_part != part:
                    pairs.append(f"{known} = {part} '{name}' {i}")
    if not pairs:
        return Finding(True, "no image is in two splits")
    count = counted(len(pairs), "image is", "images are")
    return Finding(False, f"{count} in two splits (class and number from 0): {listed(pairs)}")


def _check_source(prepared: PreparedSet) -> Finding:
    recorded = prepared.manifest["source"]
    inputs = tuple(Path(entry["path"]) for entry in recorded["inputs"])
    if not all(os.path.exists(path) for path in inputs):  # also of names that no file can have
        return Finding(True, f"the source in {recorded['directory']} is gone; the prepared set does without it")
    if not Source(Path(recorded["directory"]), inputs).matches(recorded, thorough=True):
        raise DataError(
            f"the source in {recorded['directory']} is not what {prepared.manifest_path} was prepared from; "
            "prepare again with --force"
        )
    return Finding(True, f"the source in {recorded['directory']} is what was prepared")


def _describe(manifest: Manifest) -> str:
    channels, height, width = manifest["image_shape"]
    return (
        f"{manifest['name']} ({len(manifest['classes'])} x {height}x{width}x{channels}, "
        f"{manifest['pixels']['bytes'] / 1e6:.0f} MB)"
    )
