"""miniImageNet: 100 classes of ImageNet, 600 images each, split into 64, 16 and 20 (Ravi and Larochelle 2017)."""

from __future__ import annotations

import csv
import logging
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from metadropout.data.archives import is_unsafe_name
from metadropout.data.cache import Contents, Preparation, open_prepared
from metadropout.data.class_lists import check_lists
from metadropout.data.decode import SUFFIXES, decode_all, to_array
from metadropout.data.images import ImageShape, Splits, UInt8Array
from metadropout.data.locations import data_directory
from metadropout.data.safe_pickle import load_pickle
from metadropout.data.sources import Source
from metadropout.data.trees import FolderTree
from metadropout.errors import DataError
from metadropout.options import ImageSize

FOLDERS = ("miniimagenet", "mini-imagenet", "mini_imagenet", "miniImageNet", "mini-ImageNet", ".")
PARTS = {"train": "train", "val": "validation", "test": "test"}
CLASSES = {"train": 64, "validation": 16, "test": 20}
IMAGES_PER_CLASS = 600

_log = logging.getLogger(__name__)


def miniimagenet(*, image_size: ImageSize = 84, directory: str | None = None) -> Splits:
    """miniImageNet, in colour, with Ravi and Larochelle's 64, 16 and 20 classes.

    Its licence keeps it from being downloaded here. Three layouts are read: `images` with `train.csv`, `val.csv` and
    `test.csv`; `mini-imagenet-cache-{train,val,test}.pkl`; and `{train,val,test}/<class>/<image>`.

    Args:
        image_size: height and width of the images.
        directory: where one of the layouts is; by default it is looked for in the data directory and its folder
            `miniimagenet`.
    """
    if image_size < 1:
        raise DataError(f"image_size is {image_size}; it has to be at least 1")
    shape = ImageShape(3, image_size, image_size)
    prepared = open_prepared(
        Preparation(
            stem=f"miniimagenet-{image_size}",
            image_shape=shape,
            settings={"image_size": image_size, "fit": "stretch"},
            directory=directory,
            find_in=find_in,
            read=partial(_read, shape=shape),
            obtain=partial(_obtain, directory),
        )
    )
    return prepared.split(prepared.manifest["splits"]["published"])


def find_in(directory: Path) -> Source | None:
    """Look for one of the layouts in a directory.

    Raises:
        DataError: if there is a part of one, and no other.
    """
    layouts = [layout for folder in FOLDERS for layout in _layouts(directory / folder)]
    for layout in layouts:
        if all(path.exists() for path in layout):
            return Source(directory, tuple(layout))
    for layout in layouts:
        absent = [path.name for path in layout if not path.exists()]
        if layout[0].is_file():
            raise DataError(
                f"{layout[0].parent}: {layout[0].name} is there, but not {', '.join(absent)}; miniImageNet needs all"
            )
    return None


def _layouts(folder: Path) -> list[list[Path]]:
    """The files and folders of each layout, as the inputs of a source."""
    return [
        [folder / f"mini-imagenet-cache-{part}.pkl" for part in PARTS],
        [*(folder / f"{part}.csv" for part in PARTS), folder / "images"],
        [folder / part for part in PARTS],
    ]


def _obtain(directory: str | None) -> Source:
    where = Path(directory).expanduser() if directory is not None else data_directory() / "miniimagenet"
    raise DataError(
        f"miniImageNet is not in {where}, and its licence does not allow to download it for you: put there the folder "
        "`images` with train.csv, val.csv and test.csv, or mini-imagenet-cache-{train,val,test}.pkl, or the folders "
        "train, val and test with a folder of images for each class, or name the folder that has one of these "
        "(--data.directory, or METADROPOUT_DATA for all data sets)"
    )


def _read(source: Source, shape: ImageShape) -> Contents:
    first = source.inputs[0]
    layout: Callable[[Source, ImageShape], _Layout]
    if first.suffix == ".pkl":
        layout = _from_pickles
    elif first.suffix == ".csv":
        layout = _from_tables
    else:
        layout = _from_folders
    sizes, images = layout(source, shape)
    lists = {PARTS[part]: sorted(classes) for part, classes in sizes.items()}
    check_lists(lists, [name for names in lists.values() for name in names], str(first.parent))
    counts = {part: len(names) for part, names in lists.items()}
    merged = {name: size for classes in sizes.values() for name, size in sorted(classes.items())}
    if counts != CLASSES or set(merged.values()) != {IMAGES_PER_CLASS}:
        _log.warning(
            "%s is not miniImageNet as published: %s classes instead of %s, %d to %d images each instead of %d",
            first.parent,
            "/".join(map(str, counts.values())),
            "/".join(map(str, CLASSES.values())),
            min(merged.values()),
            max(merged.values()),
            IMAGES_PER_CLASS,
        )
    return Contents(merged, images, splits={"published": lists})


_Layout = tuple[dict[str, dict[str, int]], Iterator[UInt8Array | None]]
"""Split → class → number of images; and all images, split after split, class after class in sorted order."""


def _from_files(root: Path, files: dict[str, dict[str, list[str]]], shape: ImageShape) -> _Layout:
    """From the names of the files of each class of each split, relative to a folder."""
    for part, classes in files.items():
        if not classes:
            raise DataError(f"{root}: no images of the {part} classes; put them there")
    ordered = [name for classes in files.values() for _, names in sorted(classes.items()) for name in sorted(names)]
    sizes = {part: {name: len(names) for name, names in classes.items()} for part, classes in files.items()}
    return sizes, decode_all(ordered, FolderTree(root).read, partial(to_array, shape=shape, fit="stretch"), str(root))


def _from_folders(source: Source, shape: ImageShape) -> _Layout:
    root = source.inputs[0].parent
    files: dict[str, dict[str, list[str]]] = {}
    for part, folder in zip(PARTS, source.inputs, strict=True):
        classes: dict[str, list[str]] = files.setdefault(part, {})
        for name in FolderTree(folder).names:
            if "/" in name and name.lower().endswith(SUFFIXES):
                classes.setdefault(name.split("/")[0], []).append(f"{part}/{name}")
    return _from_files(root, files, shape)


def _from_tables(source: Source, shape: ImageShape) -> _Layout:
    *tables, root = source.inputs
    there = set(FolderTree(root).names)
    files: dict[str, dict[str, list[str]]] = {}
    for part, table in zip(PARTS, tables, strict=True):
        classes: dict[str, list[str]] = files.setdefault(part, {})
        for name, label in _rows(table):
            classes.setdefault(label, []).append(name)
        missing = [name for names in classes.values() for name in names if name not in there]
        if missing:
            raise DataError(
                f"{table}: {len(missing)} of the files it names are not in {root}, the first is '{missing[0]}'; "
                "unpack all images there"
            )
    return _from_files(root, files, shape)


def _rows(table: Path) -> Iterator[tuple[str, str]]:
    try:
        with table.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                name, label = row.get("filename"), row.get("label")
                if not name or not label:
                    raise DataError(f"{table}: expected the columns 'filename' and 'label', got {list(row)}")
                if is_unsafe_name(name):
                    raise DataError(f"{table}: refused, because '{name}' leads out of the folder of images")
                yield name, label
    except (OSError, ValueError, csv.Error) as error:
        raise DataError(f"{table}: not a readable CSV file ({error}); get it again") from error


def _from_pickles(source: Source, shape: ImageShape) -> _Layout:
    # Each file is read twice, once for the classes and once for the images, so that one at a time is in memory.
    sizes = {
        part: {name: len(members) for name, members in _pickled(path)[1].items()}
        for part, path in zip(PARTS, source.inputs, strict=True)
    }

    def images() -> Iterator[UInt8Array]:
        for path in source.inputs:
            pixels, classes = _pickled(path)
            for _, members in sorted(classes.items()):
                for i in members:
                    image: UInt8Array = pixels[i]
                    yield to_array(Image.fromarray(image), shape)

    return sizes, images()


def _pickled(path: Path) -> tuple[UInt8Array, dict[str, list[int]]]:
    content: Any = load_pickle(path)
    try:
        pixels, classes = content["image_data"], content["class_dict"]
        if pixels.ndim != 4 or pixels.shape[3] != 3 or pixels.dtype != np.uint8:
            raise ValueError(f"image_data of shape {pixels.shape} and type {pixels.dtype}")
        members = {str(name): [int(i) for i in numbers] for name, numbers in classes.items()}
        if not members or any(not 0 <= i < len(pixels) for numbers in members.values() for i in numbers):
            raise ValueError(f"class_dict does not fit the {len(pixels)} images")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(
            f"{path}: not a miniImageNet cache with 'image_data' and 'class_dict' ({error!r}); get the file again"
        ) from error
    return pixels, members
