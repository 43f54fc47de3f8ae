"""miniImageNet: 100 classes of ImageNet, 600 images each, split into 64, 16 and 20 (Ravi and Larochelle 2017)."""

from __future__ import annotations

import csv
import hashlib
import io
import logging
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from metadropout.data.archives import TAR_SUFFIXES, is_unsafe_name, open_tree, paths_in
from metadropout.data.cache import Contents, Manifest, Preparation, open_prepared
from metadropout.data.class_lists import check_lists, listed, published
from metadropout.data.dataset import data_set
from metadropout.data.decode import SUFFIXES, decode_all, to_array
from metadropout.data.findings import Finding
from metadropout.data.images import ImageShape, Splits, UInt8Array
from metadropout.data.locations import data_directory
from metadropout.data.safe_pickle import load_pickle
from metadropout.data.sources import Source
from metadropout.data.trees import FolderTree
from metadropout.errors import DataError
from metadropout.files import read_regular
from metadropout.options import ImageSize

FOLDERS = ("miniimagenet", "mini-imagenet", "mini_imagenet", "miniImageNet", "mini-ImageNet", ".")
PARTS = {"train": "train", "val": "validation", "test": "test"}
CLASSES = {"train": 64, "validation": 16, "test": 20}
IMAGES_PER_CLASS = 600
MAX_TABLE_BYTES = 2**26

FILE_LISTS = {
    "train": "6dbe4fccc74f85174b9307d2b6c0c43879fd01bbd57077dbe574de5e5f7065d2",
    "validation": "151d46dee11986817fee63ca8d1d9088cb7caf92c08fae777e386f5555e87faf",
    "test": "26d8e229635a026f1368ff07623855953f72862ea530cde1a0c49e551792d2b6",
}
"""SHA-256 of the sorted lines `class/file` of Ravi and Larochelle's train.csv, val.csv and test.csv."""
OUR_COPY = "ede2dbf0cf11d5a2310f389cb7a2a88fbb26e97aaf201cefd0b95277be005a93"
"""SHA-256 of the sorted lines `class/file checksum` of the images with which this project's results were measured."""

_log = logging.getLogger(__name__)


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


def identify(manifest: Manifest) -> Iterator[Finding]:
    """Say whether prepared classes and files are the published ones, and which copy of the images it is."""
    for part, names in published("miniimagenet").items():
        found = manifest["splits"].get("published", {}).get(part, [])
        odd = sorted(set(names) ^ set(found))
        same = f"the {len(found)} {part} classes are Ravi and Larochelle's"
        yield Finding(not odd, f"{same} but for {listed(odd, 5)}" if odd else same)
    notes = manifest["notes"]
    if "images" not in notes:
        yield Finding(False, "the source holds no image files, so it cannot be said which copy of the images it is")
        return
    for part, digest in FILE_LISTS.items():
        same_files = notes.get("files", {}).get(part) == digest
        yield Finding(same_files, f"the {part} files are {'' if same_files else 'not '}those of their csv list")
    total, name = sum(manifest["classes"].values()), notes["images"][:16]
    if notes["images"] == OUR_COPY:
        yield Finding(True, f"the {total} images are the copy with which this project's results were measured ({name})")
    else:
        yield Finding(
            False,
            f"another copy of the images than the one with which this project's results were measured: {total} files "
            f"({name} instead of {OUR_COPY[:16]}); accuracies can differ by about a point",
        )


@data_set(
    "miniImageNet",
    citation="Vinyals et al., 2016; Ravi and Larochelle, 2017",
    prepared_as="miniimagenet-",
    find_in=find_in,
    identify=identify,
)
def miniimagenet(*, image_size: ImageSize = 84, directory: str | None = None) -> Splits:
    """miniImageNet, in colour, with Ravi and Larochelle's 64, 16 and 20 classes.

    Its licence keeps it from being downloaded here. These layouts are read: `images` with `train.csv`, `val.csv` and
    `test.csv`; `mini-imagenet-cache-{train,val,test}.pkl`; `{train,val,test}/<class>/<image>`; and `train.tar.gz`,
    `val.tar.gz` and `test.tar.gz` of these folders.

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
    return prepared.split(prepared.lists_of_source("published"))


def _layouts(folder: Path) -> list[list[Path]]:
    """The files and folders of each layout, as the inputs of a source."""
    return [
        [folder / f"mini-imagenet-cache-{part}.pkl" for part in PARTS],
        [*(folder / f"{part}.csv" for part in PARTS), folder / "images"],
        [folder / part for part in PARTS],
        *([folder / f"{part}{suffix}" for part in PARTS] for suffix in TAR_SUFFIXES),
    ]


def _obtain(directory: str | None) -> Source:
    where = Path(directory).expanduser() if directory is not None else data_directory() / "miniimagenet"
    raise DataError(
        f"miniImageNet is not in {where}, and its licence does not allow to download it for you: put there the folder "
        "`images` with train.csv, val.csv and test.csv, or mini-imagenet-cache-{train,val,test}.pkl, or the folders "
        "train, val and test with a folder of images for each class, or {train,val,test}.tar.gz of these, or name the "
        "folder that has one of them (--data.directory, or METADROPOUT_DATA for all data sets)"
    )


def _read(source: Source, shape: ImageShape) -> Contents:
    first = source.inputs[0]
    layout: Callable[[Source, ImageShape], _Layout]
    if first.suffix == ".pkl":
        layout = _from_pickles
    elif first.suffix == ".csv":
        layout = _from_tables
    else:
        layout = _from_trees
    sizes, images, notes = layout(source, shape)
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
    return Contents(merged, images, splits={"published": lists}, notes=notes)


class _Layout(NamedTuple):
    """What one of the layouts holds."""

    sizes: dict[str, dict[str, int]]
    """Split → class → number of images."""
    images: Iterator[UInt8Array | None]
    """Split after split, class after class in sorted order."""
    notes: dict[str, Any]
    """What identifies the files: complete after the last image."""


def _from_files(
    root: Path, files: dict[str, dict[str, list[str]]], read: Callable[[str], bytes], shape: ImageShape
) -> _Layout:
    """From the names of the files of each class of each split, and what reads a file of that name."""
    for part, classes in files.items():
        if not classes:
            raise DataError(f"{root}: no images of the {part} classes; put them there")
    # `class/file`, the same in every layout.
    known_as = {
        name: f"{label}/{name.split('/')[-1]}"
        for classes in files.values()
        for label, names in sorted(classes.items())
        for name in sorted(names)
    }
    notes: dict[str, Any] = {
        "files": {
            PARTS[part]: _digest(known_as[name] for names in classes.values() for name in names)
            for part, classes in files.items()
        }
    }
    checksums: dict[str, str] = {}

    def noted(name: str) -> bytes:
        content = read(name)
        checksums[name] = hashlib.sha256(content).hexdigest()
        return content

    def images() -> Iterator[UInt8Array | None]:
        yield from decode_all(known_as, noted, partial(to_array, shape=shape, fit="stretch"), str(root))
        notes["images"] = _digest(f"{known_as[name]} {checksum}" for name, checksum in checksums.items())

    sizes = {part: {name: len(names) for name, names in classes.items()} for part, classes in files.items()}
    return _Layout(sizes, images(), notes)


def _digest(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()


def _from_trees(source: Source, shape: ImageShape) -> _Layout:
    trees = {path.name: open_tree(path) for path in source.inputs}
    files: dict[str, dict[str, list[str]]] = {}
    for part, (place, tree) in zip(PARTS, trees.items(), strict=True):
        classes: dict[str, list[str]] = files.setdefault(part, {})
        for name, path in paths_in(tree, SUFFIXES).items():
            if len(path) > 1:
                classes.setdefault(path[0], []).append(f"{place}/{name}")

    def read(name: str) -> bytes:
        place, _, within = name.partition("/")
        return trees[place].read(within)

    return _from_files(source.inputs[0].parent, files, read, shape)


def _from_tables(source: Source, shape: ImageShape) -> _Layout:
    *tables, root = source.inputs
    tree = FolderTree(root)
    there = set(tree.names)
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
    return _from_files(root, files, tree.read, shape)


def _rows(table: Path) -> Iterator[tuple[str, str]]:
    try:
        text = read_regular(table, MAX_TABLE_BYTES).decode()
        for row in csv.DictReader(io.StringIO(text, newline="")):
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

    return _Layout(sizes, images(), {})


def _pickled(path: Path) -> tuple[UInt8Array, dict[str, list[int]]]:
    content: Any = load_pickle(path)
    try:
        pixels, classes = content["image_data"], content["class_dict"]
        if pixels.ndim != 4 or pixels.shape[3] != 3 or pixels.dtype != np.uint8:
            raise ValueError(f"image_data of shape {pixels.shape} and type {pixels.dtype}")
        members = {str(name): [int(i) for i in numbers] for name, numbers in classes.items()}
        if not members or any(not 0 <= i < len(pixels) for numbers in members.values() for i in numbers):
            raise ValueError(f"class_dict does not fit the {len(pixels)} images")
    except (LookupError, TypeError, ValueError, OverflowError, AttributeError) as error:
        raise DataError(
            f"{path}: not a miniImageNet cache with 'image_data' and 'class_dict' ({error!r}); get the file again"
        ) from error
    return pixels, members
