"""Any folder of images, one folder for each class."""

from __future__ import annotations

import hashlib
import json
from functools import partial
from pathlib import Path
from typing import Literal

from metadropout.data.archives import open_tree
from metadropout.data.cache import Contents, Preparation, open_prepared
from metadropout.data.class_lists import SplitLists, by_share, check_lists
from metadropout.data.decode import SUFFIXES, decode_all, to_array
from metadropout.data.images import ImageShape, Splits
from metadropout.data.sources import Source
from metadropout.errors import DataError
from metadropout.options import ImageSize, Seed, Share

SPLIT_FOLDERS = {
    "train": "train",
    "val": "validation",
    "valid": "validation",
    "validation": "validation",
    "test": "test",
}


def folder(
    *,
    directory: str | None = None,
    image_size: ImageSize = 84,
    channels: Literal[1, 3] = 3,
    fit: Literal["crop", "stretch"] = "crop",
    validation_share: Share = 0.16,
    test_share: Share = 0.2,
    split_seed: Seed = 0,
    train_classes: list[str] | None = None,
    validation_classes: list[str] | None = None,
    test_classes: list[str] | None = None,
) -> Splits:
    """Your own images: `directory/<class>/<image>`, or `directory/{train,val,test}/<class>/<image>`.

    PNG, JPEG, BMP, GIF, WebP, TIFF and PPM of any size, grey or colour, turned upright by their EXIF data. Classes may
    have different numbers of images. The splits are those of the lists of classes; without lists, the folders
    `train` and `test` (and perhaps `val`); without those, shares of the classes.

    Args:
        directory: the folder, or a zip archive of it.
        image_size: height and width to bring all images to.
        channels: 1 for grey, 3 for colour.
        fit: "crop" keeps proportions and cuts the longer side, "stretch" keeps everything.
        validation_share: share of the classes that are validation classes.
        test_share: share of the classes that are test classes.
        split_seed: seed of the shuffle before the classes are shared out.
        train_classes: names of the training classes; then test_classes have to be given too.
        validation_classes: names of the validation classes.
        test_classes: names of the test classes.
    """
    if directory is None:
        raise DataError("which folder? Name it with --data.directory (or --from, where the data set is prepared)")
    if image_size < 1 or channels not in (1, 3):
        raise DataError(f"image_size {image_size} has to be at least 1, and channels {channels} has to be 1 or 3")
    root = Path(directory).expanduser()
    shape = ImageShape(channels, image_size, image_size)
    settings = {"image_size": image_size, "channels": channels, "fit": fit}
    key = hashlib.sha256(json.dumps([str(root.absolute()), settings]).encode()).hexdigest()[:12]
    prepared = open_prepared(
        Preparation(
            stem=f"folder-{root.stem[:40]}-{key}",
            image_shape=shape,
            settings=settings,
            directory=str(root),
            find_in=find_in,
            read=partial(_read, shape=shape, fit=fit),
            obtain=partial(_obtain, root),
        )
    )
    given = {"train": train_classes, "validation": validation_classes, "test": test_classes}
    lists: SplitLists
    if any(names is not None for names in given.values()):
        lists = {part: names or [] for part, names in given.items()}
        if not lists["train"] or not lists["test"]:
            raise DataError("lists of classes need both train_classes and test_classes")
        check_lists(lists, prepared.class_names, str(root))
    else:
        lists = prepared.manifest["splits"].get("folders") or by_share(
            prepared.class_names, validation_share, test_share, split_seed
        )
    return prepared.split(lists)


def find_in(directory: Path) -> Source | None:
    """Look for the folder in a directory."""
    return Source(directory, (directory,)) if directory.exists() else None


def _obtain(root: Path) -> Source:
    raise DataError(f"there is no folder {root}; correct --data.directory")


def _read(source: Source, shape: ImageShape, fit: Literal["crop", "stretch"]) -> Contents:
    tree = open_tree(source.directory)
    parts = {name: tuple(name.split("/")) for name in tree.names if name.lower().endswith(SUFFIXES)}
    if tree.location.is_file():
        # Most archives hold one folder with everything in it.
        while len({path[0] for path in parts.values()}) == 1 and min(len(path) for path in parts.values()) > 2:
            parts = {name: path[1:] for name, path in parts.items()}
    stray = [name for name, path in parts.items() if len(path) < 2]
    if not parts or stray:
        found = f"'{stray[0]}' lies outside of any class folder" if stray else "no images in it"
        raise DataError(f"{source.directory}: {found}; images have to be in one folder for each class")
    split = _is_split(list(parts.values()))
    classes: dict[str, list[str]] = {}
    lists: dict[str, list[str]] = {"train": [], "validation": [], "test": []}
    for name, path in parts.items():
        class_name = path[1] if split else path[0]
        if split and path[0] not in SPLIT_FOLDERS:
            raise DataError(f"{source.directory}: '{name}' is neither in train, nor val, nor test; move it")
        if split and class_name not in lists[SPLIT_FOLDERS[path[0]]]:
            lists[SPLIT_FOLDERS[path[0]]].append(class_name)
        classes.setdefault(class_name, []).append(name)
    if split:
        check_lists(lists, list(classes), str(source.directory))
    classes = dict(sorted(classes.items()))
    files = [name for names in classes.values() for name in names]
    return Contents(
        class_sizes={name: len(names) for name, names in classes.items()},
        images=decode_all(files, tree.read, partial(to_array, shape=shape, fit=fit), str(source.directory)),
        splits={"folders": lists} if split else {},
    )


def _is_split(paths: list[tuple[str, ...]]) -> bool:
    """Whether the first folders are splits: `train` could also be a class, but then its images lie right in it."""
    tops = {path[0] for path in paths}
    return {"train", "test"} <= tops and all(len(path) > 2 for path in paths if path[0] in SPLIT_FOLDERS)
