"""Omniglot: 1623 hand-drawn characters of 50 alphabets, 20 drawings each (Lake et al., Science 2015)."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import numpy as np
from PIL import Image

from metadropout.data.archives import open_tree
from metadropout.data.cache import Contents, Preparation, PreparedSet, open_prepared
from metadropout.data.class_lists import SplitLists
from metadropout.data.dataset import data_set
from metadropout.data.decode import decode_all, to_array
from metadropout.data.download import download as fetch
from metadropout.data.images import ImageSet, ImageShape, Splits, UInt8Array
from metadropout.data.locations import data_directory
from metadropout.data.rotations import RotatedClasses
from metadropout.data.sources import Source, file_digest
from metadropout.data.trees import FileTree, UnreadableError
from metadropout.errors import DataError
from metadropout.options import ImageSize, Limits, Seed

TRAIN_CHARACTERS = 1200
DRAWINGS = 20
SIDE = 105
SPLIT_SEED = 0
"""The seed of the split of characters into 1200 for training and 423 for testing."""

_log = logging.getLogger(__name__)


class PublishedArchive(NamedTuple):
    """One of the two published archives."""

    name: str
    characters: int
    md5: str


URL = "https://raw.githubusercontent.com/brendenlake/omniglot/master/python/{name}.zip"
PARTS = (
    PublishedArchive("images_background", 964, "68d2efa1b9178cc56df9314c21c6e718"),
    PublishedArchive("images_evaluation", 659, "6b91aef0f799c5bb55b94e3f2daec811"),
)


def find_in(directory: Path) -> Source | None:
    """Look for both parts in a directory."""
    folder = directory.parent if directory.is_file() else directory
    inputs = [found for part in PARTS if (found := _find_part(folder, part))]
    return Source(folder, tuple(inputs)) if len(inputs) == len(PARTS) else None


@data_set(
    "Omniglot",
    citation="Lake et al., 2015",
    prepared_as="omniglot-",
    find_in=find_in,
    absent="downloaded when needed",
)
def omniglot(
    *,
    split: Literal["random", "original"] = "random",
    split_seed: Seed = SPLIT_SEED,
    validation_characters: Annotated[int, Limits(0, 1622)] = 0,
    image_size: ImageSize = 28,
    directory: str | None = None,
    download: bool = True,
) -> Splits:
    """Omniglot, each character rotated by 0, 90, 180 and 270 degrees into four classes of its own.

    Images have one channel, ink 255 and paper 0, shrunk from 105 x 105 by Lanczos and not binarised.

    Args:
        split: "random" shuffles all characters and trains on 1200 of them; "original" trains on the 964 of the
            published background set and tests on the 659 of the evaluation set.
        split_seed: seed of that shuffle.
        validation_characters: how many of the training characters to set aside as validation classes.
        image_size: height and width of the images.
        directory: where `images_background` and `images_evaluation` are, as zip archives or folders; by default
            they are looked for in the data directory and its folder `omniglot`.
        download: whether to fetch the archives into the data directory if they do not exist.
    """
    if image_size < 1:
        raise DataError(f"image_size is {image_size}; it has to be at least 1")
    prepared = open_prepared(preparation(image_size, directory, download))
    lists = prepared.lists_of_source("original")
    if split == "random":
        lists = _shuffled(prepared.class_names, split_seed)
    elif split != "original":
        raise DataError(f"omniglot has no split '{split}'; choose 'random' or 'original'")
    return _split(prepared, lists, validation_characters, split_seed)


def preparation(image_size: int, directory: str | None, download: bool) -> Preparation:
    """How Omniglot's characters, upright, are prepared."""
    shape = ImageShape(1, image_size, image_size)
    return Preparation(
        stem=f"omniglot-{image_size}",
        image_shape=shape,
        settings={"image_size": image_size, "resampling": "lanczos", "ink": 255},
        directory=directory,
        find_in=find_in,
        read=partial(_read, shape=shape),
        obtain=partial(_obtain, directory, download),
    )


def _shuffled(characters: Sequence[str], seed: int) -> SplitLists:
    # RandomState, because its stream is frozen: the split is the same with every version of NumPy.
    order = np.random.RandomState(seed).permutation(len(characters))
    names = [characters[i] for i in order]
    return {"train": names[:TRAIN_CHARACTERS], "test": names[TRAIN_CHARACTERS:]}


def _split(prepared: PreparedSet, lists: SplitLists, validation_characters: int, seed: int) -> Splits:
    train = list(lists["train"])
    if not 0 <= validation_characters < len(train):
        raise DataError(
            f"validation_characters is {validation_characters}; it has to be between 0 and {len(train) - 1}, "
            f"as the training classes come from {len(train)} characters"
        )
    # The original split lists characters by alphabet, so those set aside are drawn at random.
    order = np.random.RandomState(seed).permutation(len(train))
    aside = {train[i] for i in order[:validation_characters]}
    upright = prepared.split(
        {
            "train": [name for name in train if name not in aside],
            "validation": [name for name in train if name in aside],
            "test": lists["test"],
        }
    )
    return Splits(_rotated(upright.train), upright.validation and _rotated(upright.validation), _rotated(upright.test))


def _rotated(characters: ImageSet) -> ImageSet:
    return RotatedClasses(characters)


def _find_part(directory: Path, part: PublishedArchive) -> Path | None:
    candidates = [
        directory / folder / name
        for folder in ("omniglot", ".", "omniglot-py")  # the last is where torchvision puts it
        for name in (f"{part.name}.zip", part.name)
    ]
    return next((path for path in candidates if path.exists()), None)


def _obtain(directory: str | None, download: bool) -> Source:
    if directory is None and download:
        folder = data_directory() / "omniglot"
        for part in PARTS:
            if _find_part(data_directory(), part) is None:
                fetch(URL.format(name=part.name), folder / f"{part.name}.zip", part.md5)
        if source := find_in(data_directory()):
            return source
    where = Path(directory).expanduser() if directory is not None else data_directory() / "omniglot"
    raise DataError(
        f"Omniglot is not in {where}: put images_background.zip and images_evaluation.zip there, as they are or "
        "unpacked, or name the folder that has them (--data.directory, or METADROPOUT_DATA for all data sets)"
    )


def _read(source: Source, shape: ImageShape) -> Contents:
    trees, sizes, files, lists = [], {}, [], []
    for part, path in zip(PARTS, source.inputs, strict=True):
        if path.is_file() and (md5 := file_digest(path, "md5")) != part.md5:
            _log.warning(
                "%s is not the published archive (MD5 %s instead of %s); using it, as far as its contents check out",
                path,
                md5,
                part.md5,
            )
        tree = open_tree(path)
        characters = _characters(tree, part)
        trees.append(tree)
        files.append([name for names in characters.values() for name in names])
        sizes.update({f"{part.name}/{character}": len(names) for character, names in characters.items()})
        lists.append([f"{part.name}/{character}" for character in characters])

    def images() -> Iterator[UInt8Array | None]:
        for tree, names in zip(trees, files, strict=True):
            yield from decode_all(names, tree.read, partial(_ink, shape=shape), str(tree.location))

    random = _shuffled(list(sizes), SPLIT_SEED)
    return Contents(
        sizes,
        images(),
        splits={"original": {"train": lists[0], "test": lists[1]}, f"random, seed {SPLIT_SEED}": random},
        notes={"classes": "characters; each makes four classes, rotated by 0, 90, 180 and 270 degrees"},
    )


def _characters(tree: FileTree, part: PublishedArchive) -> dict[str, list[str]]:
    """The files of each character, `alphabet/character` → names, checked against what the archive has to hold."""
    characters: dict[str, list[str]] = {}
    for name in tree.names:
        parts = name.split("/")
        if parts[-1].lower().endswith(".png") and len(parts) >= 3:
            characters.setdefault("/".join(parts[-3:-1]), []).append(name)
    wrong = [f"{name} ({len(files)})" for name, files in characters.items() if len(files) != DRAWINGS]
    if len(characters) != part.characters or wrong:
        raise DataError(
            f"{tree.location}: {len(characters)} characters instead of {part.characters}"
            + (f", and not {DRAWINGS} drawings of {', '.join(wrong[:5])}" if wrong else "")
            + f"; get {part.name}.zip again from its publisher"
        )
    return dict(sorted(characters.items()))


def _ink(image: Image.Image, shape: ImageShape) -> UInt8Array:
    if image.size != (SIDE, SIDE):
        raise UnreadableError(f"{image.width} x {image.height} instead of {SIDE} x {SIDE} pixels")
    inverted: UInt8Array = ~np.asarray(image.convert("L"))  # 255 - x
    return to_array(Image.fromarray(inverted), shape)
