"""Any folder of images, one folder for each class."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from metadropout.data.archives import open_tree, paths_in
from metadropout.data.cache import Contents, Preparation, PreparedSet, open_prepared
from metadropout.data.class_lists import SplitLists, by_share, check_lists, counted, listed
from metadropout.data.dataset import data_set
from metadropout.data.decode import FORMATS, SUFFIXES, decode_all, to_array
from metadropout.data.images import ImageShape, Splits
from metadropout.data.sources import Source
from metadropout.data.trees import FileTree
from metadropout.errors import DataError
from metadropout.options import ImageSize, Limits, Seed, Share

SPLIT_FOLDERS = {
    "train": "train",
    "val": "validation",
    "valid": "validation",
    "validation": "validation",
    "test": "test",
}

_log = logging.getLogger(__name__)


@data_set("folder", prepared_as="folder-")
def folder(
    *,
    directory: str | None = None,
    image_size: ImageSize = 84,
    channels: Literal[1, 3] = 3,
    fit: Literal["crop", "stretch"] = "crop",
    skip_unreadable: bool = False,
    min_images: Annotated[int, Limits(1, 1_000_000)] = 1,
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
    `train`, `val` and `test`, those of them that exist; without those, shares of the classes. A folder with test
    classes only, to evaluate on, has only the folder `test`, or only `test_classes`, or a `test_share` of 1.

    Args:
        directory: the folder, or a zip or tar archive of it.
        image_size: height and width to bring all images to.
        channels: 1 for grey, 3 for colour.
        fit: "crop" keeps proportions and cuts the longer side, "stretch" keeps everything.
        skip_unreadable: leave out images that cannot be read, instead of stopping; they are named.
        min_images: leave out classes with fewer images than this; they are named.
        validation_share: share of the classes that are validation classes.
        test_share: share of the classes that are test classes.
        split_seed: seed of the shuffle before the classes are shared out.
        train_classes: names of the training classes; then test_classes have to be given, too.
        validation_classes: names of the validation classes.
        test_classes: names of the test classes.
    """
    if directory is None:
        raise DataError("which folder? Name it with --data.directory (or --from, where the data set is prepared)")
    if image_size < 1 or channels not in (1, 3):
        raise DataError(f"image_size {image_size} has to be at least 1, and channels {channels} has to be 1 or 3")
    root = Path(directory).expanduser()
    shape = ImageShape(channels, image_size, image_size)
    settings: dict[str, Any] = {"image_size": image_size, "channels": channels, "fit": fit}
    if skip_unreadable:
        settings["skip_unreadable"] = True
    key = hashlib.sha256(json.dumps([str(root.absolute()), settings]).encode()).hexdigest()[:12]
    prepared = open_prepared(
        Preparation(
            stem=f"folder-{root.stem[:40]}-{key}",
            image_shape=shape,
            settings=settings,
            directory=str(root),
            find_in=find_in,
            read=partial(_read, shape=shape, fit=fit, skip_unreadable=skip_unreadable),
            obtain=partial(_obtain, root),
        )
    )
    large = _large_enough(prepared, min_images, root)
    given = {"train": train_classes, "validation": validation_classes, "test": test_classes}
    lists: SplitLists
    if any(names is not None for names in given.values()):
        lists = {part: names or [] for part, names in given.items()}
        if not lists["test"]:
            raise DataError("lists of classes need test_classes (and train_classes, unless it is for testing only)")
        check_lists(lists, prepared.class_names, str(root))
    elif "folders" in prepared.manifest["splits"]:
        lists = prepared.lists_of_source("folders")
    else:
        lists = by_share(
            [name for name in prepared.class_names if name in large], validation_share, test_share, split_seed
        )
    return prepared.split({part: [name for name in names if name in large] for part, names in lists.items()})


def _large_enough(prepared: PreparedSet, min_images: int, root: Path) -> set[str]:
    sizes = prepared.manifest["classes"]
    small = [f"'{name}' ({size})" for name, size in sizes.items() if size < min_images]
    if small:
        count = counted(len(small), "class", "classes")
        _log.warning("%s: left out, %s with fewer than %d images: %s", root, count, min_images, listed(small))
    return {name for name, size in sizes.items() if size >= min_images}


def find_in(directory: Path) -> Source | None:
    """Look for the folder in a directory."""
    return Source(directory, (directory,)) if directory.exists() else None


def _obtain(root: Path) -> Source:
    raise DataError(f"there is no folder {root}; correct --data.directory")


def _read(source: Source, shape: ImageShape, fit: Literal["crop", "stretch"], skip_unreadable: bool) -> Contents:
    tree = open_tree(source.directory)
    paths = paths_in(tree, SUFFIXES, keep=SPLIT_FOLDERS)
    stray = [name for name, path in paths.items() if len(path) < 2]
    if not paths or stray:
        found = f"'{stray[0]}' lies outside of any class folder" if stray else "no images in it"
        raise DataError(f"{source.directory}: {found}; images have to be in one folder for each class")
    split = _is_split(list(paths.values()))
    classes: dict[str, list[str]] = {}
    lists: dict[str, list[str]] = {"train": [], "validation": [], "test": []}
    for name, path in paths.items():
        class_name = path[1] if split else path[0]
        if split and path[0] not in SPLIT_FOLDERS:
            raise DataError(f"{source.directory}: '{name}' is neither in train, nor val, nor test; move it")
        if split and class_name not in lists[SPLIT_FOLDERS[path[0]]]:
            lists[SPLIT_FOLDERS[path[0]]].append(class_name)
        classes.setdefault(class_name, []).append(name)
    if split:
        check_lists(lists, list(classes), str(source.directory))
    classes = dict(sorted(classes.items()))
    decoded = decode_all(
        [name for names in classes.values() for name in names],
        tree.read,
        partial(to_array, shape=shape, fit=fit),
        str(source.directory),
        skip=skip_unreadable,
        way_out=" or leave them out with --data.skip_unreadable true",
    )
    return Contents(
        class_sizes={name: len(names) for name, names in classes.items()},
        images=decoded,
        splits={"folders": lists} if split else {},
        notes={"left out": _left_out(tree, paths, split)},
    )


def _left_out(tree: FileTree, paths: Mapping[str, tuple[str, ...]], split: bool) -> list[str]:
    """Say which files and class folders are not used, as messages."""
    found = []
    if others := [name for name in tree.names if name not in paths]:
        found.append(f"{counted(len(others), 'file')} of other types than {', '.join(FORMATS)}: {listed(others)}")
    any_name, any_path = next(iter(paths.items()))
    depth = len(any_name.split("/")) - len(any_path) + (2 if split else 1)
    used = {"/".join(name.split("/")[:depth]) for name in paths}
    if empty := [name for name in tree.folders if name.count("/") == depth - 1 and name not in used]:
        found.append(f"{counted(len(empty), 'class folder')} without images: {listed(map(repr, empty))}")
    for text in found:
        _log.warning("%s: left out: %s", tree.location, text)
    return found


def _is_split(paths: list[tuple[str, ...]]) -> bool:
    """Whether the first folders are splits: `train` could also be a class, but then its images lie right in it."""
    tops = {path[0] for path in paths}
    named = tops <= SPLIT_FOLDERS.keys() or {"train", "test"} <= tops
    return named and all(len(path) > 2 for path in paths if path[0] in SPLIT_FOLDERS)
