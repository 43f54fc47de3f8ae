"""CIFAR-FS and FC100: two ways to split the 100 classes of CIFAR-100 (Krizhevsky 2009) for few-shot learning."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from metadropout.data.archives import TarTree, open_tree
from metadropout.data.cache import Contents, Preparation, open_prepared
from metadropout.data.class_lists import published
from metadropout.data.dataset import data_set
from metadropout.data.decode import SUFFIXES, decode_all, to_array
from metadropout.data.images import ImageShape, Splits, UInt8Array
from metadropout.data.locations import data_directory
from metadropout.data.safe_pickle import load_pickle, read_pickle
from metadropout.data.sources import Source, file_digest
from metadropout.data.trees import UnreadableError
from metadropout.errors import DataError
from metadropout.options import ImageSize

ARCHIVE = "cifar-100-python.tar.gz"
ARCHIVE_MD5 = "eb9058c3a382ffc7106e4002c42a8d85"
ARCHIVE_URL = "https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz"
SIDE = 32
BATCHES = ("meta", "train", "test")
"""The files of the published archive."""
MAX_BATCH_BYTES = 2**29

_log = logging.getLogger(__name__)


def find_in(directory: Path) -> Source | None:
    """Look for CIFAR-100 in a directory."""
    if directory.is_file():
        return Source(directory, (directory,))
    for folder in (directory, directory / "cifar100"):
        for name in (ARCHIVE, "cifar100.zip"):
            if (folder / name).is_file():
                return Source(directory, (folder / name,))
    folders = [directory / "cifar-100-python", directory / "cifar100" / "data", directory / "cifar100", directory]
    for folder in folders:
        if (folder / "apple").is_dir() or all((folder / name).is_file() for name in BATCHES):
            return Source(directory, (folder,))
    return None


@data_set("CIFAR-FS", citation="Bertinetto et al., 2019", prepared_as="cifar100-", find_in=find_in)
def cifar_fs(*, image_size: ImageSize = SIDE, directory: str | None = None) -> Splits:
    """CIFAR-FS: the classes of CIFAR-100 split at random into 64, 16 and 20 (Bertinetto et al., 2019).

    Args:
        image_size: height and width of the images; 32 is their own.
        directory: where CIFAR-100 is, as `cifar-100-python.tar.gz` or with a folder of images for each class in
            `cifar100.zip` or `cifar100`; by default it is looked for in the data directory.
    """
    return _open("cifar_fs", image_size, directory)


@data_set("FC100", citation="Oreshkin et al., 2018", prepared_as="cifar100-", find_in=find_in)
def fc100(*, image_size: ImageSize = SIDE, directory: str | None = None) -> Splits:
    """FC100: the classes of CIFAR-100 split by superclass into 60, 20 and 20 (Oreshkin et al., 2018).

    Args:
        image_size: height and width of the images; 32 is their own.
        directory: where CIFAR-100 is, as `cifar-100-python.tar.gz` or with a folder of images for each class in
            `cifar100.zip` or `cifar100`; by default it is looked for in the data directory.
    """
    return _open("fc100", image_size, directory)


def _open(benchmark: str, image_size: int, directory: str | None) -> Splits:
    if image_size < 1:
        raise DataError(f"image_size is {image_size}; it has to be at least 1")
    shape = ImageShape(3, image_size, image_size)
    prepared = open_prepared(
        Preparation(
            stem=f"cifar100-{image_size}",  # one cache for both benchmarks
            image_shape=shape,
            settings={"image_size": image_size},
            directory=directory,
            find_in=find_in,
            read=partial(_read, shape=shape),
            obtain=partial(_obtain, directory),
        )
    )
    return prepared.split(prepared.lists_of_source(benchmark))


def _obtain(directory: str | None) -> Source:
    where = Path(directory).expanduser() if directory is not None else data_directory()
    raise DataError(
        f"CIFAR-100 is not in {where}: download {ARCHIVE_URL} and put it there, or put `cifar100.zip` or the folder "
        "`cifar100` with one folder of images for each class there, or name the folder that has it "
        "(--data.directory, or METADROPOUT_DATA for all data sets)"
    )


def _read(source: Source, shape: ImageShape) -> Contents:
    (path,) = source.inputs
    if path.is_file() and path.name.endswith((".tar.gz", ".tgz")):
        if (md5 := file_digest(path, "md5")) != ARCHIVE_MD5:
            _log.warning(
                "%s is not the published archive (MD5 %s instead of %s); using it, as far as its contents check out",
                path,
                md5,
                ARCHIVE_MD5,
            )
        contents = _from_batches(_read_batches(path), path, shape)
    elif path.is_dir() and all((path / name).is_file() for name in BATCHES):
        contents = _from_batches({name: load_pickle(path / name) for name in BATCHES}, path, shape)
    else:
        contents = _from_images(path, shape)
    return contents


def _read_batches(path: Path) -> dict[str, Any]:
    tree = TarTree(path, MAX_BATCH_BYTES)
    members = {name.split("/")[-1]: name for name in tree.names}
    if missing := [batch for batch in BATCHES if batch not in members]:
        raise DataError(f"{path}: {', '.join(missing)} not in it; fetch {ARCHIVE_URL} again")
    batches = {}
    for batch in BATCHES:
        try:
            content = tree.read(members[batch])
        except UnreadableError as error:
            raise DataError(f"{path}: '{members[batch]}' in it cannot be read ({error})") from error
        batches[batch] = read_pickle(io.BytesIO(content), len(content), f"{path}: {members[batch]}")
    return batches


def _from_images(path: Path, shape: ImageShape) -> Contents:
    tree = open_tree(path)
    classes: dict[str, list[str]] = {}
    for name in tree.names:
        if name.lower().endswith(SUFFIXES) and "/" in name:
            classes.setdefault(name.split("/")[-2], []).append(name)
    names = _check(list(classes), path)
    files = [file for name in names for file in classes[name]]
    return Contents(
        class_sizes={name: len(classes[name]) for name in names},
        images=decode_all(files, tree.read, partial(to_array, shape=shape), str(path)),
        splits=_splits(),
    )


def _from_batches(batches: dict[str, Any], path: Path, shape: ImageShape) -> Contents:
    try:
        labels = [str(name) for name in batches["meta"]["fine_label_names"]]
        fine = np.concatenate([np.asarray(batches[part]["fine_labels"], dtype=np.int64) for part in ("train", "test")])
        pixels = [batches[part]["data"].reshape(-1, 3, SIDE, SIDE) for part in ("train", "test")]
        total = sum(len(part) for part in pixels)
        if len(fine) != total or any(part.dtype != np.uint8 for part in pixels) or fine.max() >= len(labels):
            raise ValueError(f"{total} images, {len(fine)} labels")
    except (LookupError, TypeError, ValueError, OverflowError, AttributeError) as error:
        raise DataError(f"{path}: not CIFAR-100 as published ({error!r}); fetch {ARCHIVE_URL} again") from error
    names = _check(labels, path)
    members = {name: np.flatnonzero(fine == labels.index(name)) for name in names}
    first_of_test = len(pixels[0])

    def images() -> Iterator[UInt8Array]:
        for name in names:
            for i in members[name]:
                image: UInt8Array = pixels[0][i] if i < first_of_test else pixels[1][i - first_of_test]
                same = shape.height == SIDE
                yield image if same else to_array(Image.fromarray(image.transpose(1, 2, 0)), shape)

    return Contents({name: len(members[name]) for name in names}, images(), _splits())


def _check(found: list[str], path: Path) -> list[str]:
    """Return the class names in order, if they are those of CIFAR-100."""
    expected = sorted(name for part in published("cifar_fs").values() for name in part)
    if sorted(found) != expected:
        missing = sorted(set(expected) - set(found))
        raise DataError(
            f"{path}: {len(found)} classes that are not the 100 of CIFAR-100"
            + (f" (missing: {', '.join(missing[:5])})" if missing else "")
            + "; it needs a folder of images for each class, named as in CIFAR-100"
        )
    return expected


def _splits() -> dict[str, Any]:
    return {benchmark: published(benchmark) for benchmark in ("cifar_fs", "fc100")}
