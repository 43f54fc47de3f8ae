"""The prepared cache: every image decoded once into one memory-mapped file, with a manifest that vouches for it.

A prepared set is two files. `STEM-CHECKSUM.u8` holds the pixels of all images, class after class. `STEM.json`, the
manifest, says what they are, where they came from and how long the pixel file is. The manifest is put in place last
and by renaming, so it is the moment at which a preparation counts: whatever stops one before, a killed process, a
full disk, leaves nothing that a later run would take for finished.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from metadropout.data.class_lists import SplitLists
from metadropout.data.images import ClassSubset, ImageSet, ImageShape, IntArray, Splits, UInt8Array
from metadropout.data.locations import cache_directory, data_directory
from metadropout.data.locks import exclusive
from metadropout.data.progress import progress_bar
from metadropout.data.sources import Source, file_digest
from metadropout.errors import DataError
from metadropout.files import move_into_place, write_atomically

# Raise it when the same source would give other bytes or another manifest: every cache is then rebuilt.
VERSION = 2

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Contents:
    """What a source holds: classes with their sizes, and their images in the same order."""

    class_sizes: Mapping[str, int]
    images: Iterable[UInt8Array | None]
    """Arrays (channels, height, width), class after class."""
    splits: Mapping[str, SplitLists] = field(default_factory=dict)
    """The splits that belong to the data, by name."""
    notes: Mapping[str, str] = field(default_factory=dict)
    """Whatever else a reader of the manifest may want to know."""


@dataclass(frozen=True)
class Preparation:
    """How one prepared set comes about."""

    stem: str
    """The name of its files."""
    image_shape: ImageShape
    settings: Mapping[str, Any]
    """Everything besides the source on which the pixels depend, as JSON."""
    directory: str | None
    """Where the user says the source is; None looks in the data directory."""
    find_in: Callable[[Path], Source | None]
    """Looks for the source in a directory; None where it is not there."""
    read: Callable[[Source], Contents]
    obtain: Callable[[], Source]
    """Called if there is neither a source nor a prepared set: fetches the source, or raises what tells how to."""


class PreparedSet(ImageSet):
    """The classes of a prepared cache; pixels stay on disk until they are gathered."""

    def __init__(self, manifest_path: Path, manifest: Mapping[str, Any]) -> None:
        self.manifest_path, self.manifest = manifest_path, manifest
        self.image_shape = ImageShape(*manifest["image_shape"])
        self.class_names = list(manifest["classes"])
        self.class_sizes = np.asarray(list(manifest["classes"].values()), dtype=np.int64)
        self.pixel_path = manifest_path.with_name(manifest["pixels"]["file"])
        total = int(self.class_sizes.sum())
        expected = total * int(np.prod(self.image_shape))
        actual = self.pixel_path.stat().st_size
        if actual != expected or expected != manifest["pixels"]["bytes"]:
            raise ValueError(f"{self.pixel_path} has {actual} bytes instead of {expected}")
        mapped = np.memmap(self.pixel_path, dtype=np.uint8, mode="r", shape=(total, *self.image_shape))
        self._pixels: UInt8Array = np.asarray(mapped)  # a plain view: indexing a memmap is slower
        self._first: IntArray = np.concatenate([[0], np.cumsum(self.class_sizes)[:-1]]).astype(np.int64)

    def gather(self, classes: IntArray, images: IntArray) -> UInt8Array:
        """Return the images at the given pairs as one array; see `ImageSet.gather`."""
        gathered: UInt8Array = self._pixels[self._first[classes] + images]
        return gathered

    def subset(self, names: Sequence[str]) -> ClassSubset:
        """Return the classes of the given names, in that order."""
        number = {name: i for i, name in enumerate(self.class_names)}
        return ClassSubset(self, [number[name] for name in names])

    def split(self, lists: SplitLists) -> Splits:
        """Return the classes in three parts; an empty or absent "validation" list gives None."""
        validation = lists.get("validation")
        return Splits(
            train=self.subset(lists["train"]),
            validation=self.subset(validation) if validation else None,
            test=self.subset(lists["test"]),
        )

    def checksum(self) -> str:
        """Return the manifest's checksum of the pixels, with the classes; see `ImageSet.checksum`."""
        described = [self.manifest[key] for key in ("image_shape", "classes")] + [self.manifest["pixels"]["sha256"]]
        return hashlib.sha256(json.dumps(described).encode()).hexdigest()

    def verify(self) -> None:
        """Compare the pixels with the checksum taken when they were prepared.

        Raises:
            DataError: if they differ.
        """
        digest = file_digest(self.pixel_path)
        if digest != self.manifest["pixels"]["sha256"]:
            raise DataError(
                f"{self.pixel_path}: its bytes have changed since they were prepared (the checksum differs); "
                "delete it and prepare again"
            )


def open_prepared(preparation: Preparation) -> PreparedSet:
    """Open a prepared set, preparing it first where it is missing, cut short or out of date.

    Raises:
        DataError: if it cannot be prepared, because the source is missing or damaged, or the cache cannot be written.
    """
    path = cache_directory() / f"{preparation.stem}.json"
    source = _find_source(preparation, path)
    if ready := _open_if_current(path, preparation, source):
        return ready
    if source is None:
        source = preparation.obtain()
    with _lock(path):
        # Another process may have finished the same work while this one waited for the lock.
        if ready := _open_if_current(path, preparation, source):
            return ready
        return PreparedSet(path, _build(path, preparation, source))


def _find_source(preparation: Preparation, path: Path) -> Source | None:
    if preparation.directory is not None:
        return preparation.find_in(Path(preparation.directory).expanduser()) or preparation.obtain()
    found = preparation.find_in(data_directory())
    if found is None and (manifest := read_manifest(path)):
        # Prepared from elsewhere: changes there still count. If it is gone, the prepared set speaks for itself.
        found = preparation.find_in(Path(manifest["source"]["directory"]))
    return found


def read_manifest(path: Path) -> dict[str, Any] | None:
    """Return a manifest; None if there is none, or none that this version can read."""
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return manifest if _is_manifest(manifest) else None


def _is_manifest(content: Any) -> bool:
    try:
        return bool(
            content["version"] == VERSION
            and isinstance(content["source"]["directory"], str)
            and isinstance(content["source"]["inputs"], list)
            and isinstance(content["settings"], dict)
            and len(content["image_shape"]) == 3
            and Path(content["pixels"]["file"]).name == content["pixels"]["file"]
            and isinstance(content["pixels"]["bytes"], int)
            and isinstance(content["splits"], dict)
            and all(isinstance(size, int) and size > 0 for size in content["classes"].values())
        )
    except (KeyError, TypeError, AttributeError):
        return False


def _open_if_current(path: Path, preparation: Preparation, source: Source | None) -> PreparedSet | None:
    manifest = read_manifest(path)
    if manifest is None or manifest["settings"] != preparation.settings:
        return None
    try:
        if source is not None and not source.matches(manifest["source"]):
            _log.info("%s: the source has changed, preparing again", path)
            return None
        return PreparedSet(path, manifest)
    except (OSError, ValueError, KeyError, TypeError) as error:
        _log.warning("%s: the prepared cache cannot be used (%s)", path, error)
        return None


def _build(path: Path, preparation: Preparation, source: Source) -> dict[str, Any]:
    # Described before it is read: a change in between shows as a difference the next time, and not as nothing.
    described = source.describe()
    contents = preparation.read(source)
    total = sum(contents.class_sizes.values())
    size = total * int(np.prod(preparation.image_shape))
    with _writing(path):
        free = shutil.disk_usage(path.parent).free
        if free < size:
            raise OSError(f"{size} bytes are needed and {free} are free")
        handle, name = tempfile.mkstemp(prefix=f"{preparation.stem}-", suffix=".tmp", dir=path.parent)
    temporary = Path(name)
    try:
        file = os.fdopen(handle, "wb")
        try:
            digest = _write_pixels(file.write, contents.images, preparation, total, path)
            with _writing(path):
                file.flush()
                os.fsync(file.fileno())
        finally:
            with contextlib.suppress(OSError):  # what cannot be written has been reported already
                file.close()
        pixels = path.with_name(f"{preparation.stem}-{digest[:16]}.u8")
        manifest = {
            "version": VERSION,
            "name": preparation.stem,
            "source": described,
            "settings": preparation.settings,
            "image_shape": list(preparation.image_shape),
            "pixels": {"file": pixels.name, "bytes": size, "sha256": digest},
            "splits": contents.splits,
            "notes": contents.notes,
            "classes": contents.class_sizes,
        }
        previous = read_manifest(path)
        with _writing(path):
            move_into_place(temporary, pixels)
            write_atomically(path, json.dumps(manifest, indent=1))
    finally:
        temporary.unlink(missing_ok=True)
    if previous and previous["pixels"]["file"] != pixels.name:
        # On POSIX, runs that have the old file mapped keep it. Elsewhere it stays in use, and so stays.
        with contextlib.suppress(OSError):
            path.with_name(previous["pixels"]["file"]).unlink()
    return manifest


def _write_pixels(
    write: Callable[[bytes], object],
    images: Iterable[UInt8Array | None],
    preparation: Preparation,
    total: int,
    path: Path,
) -> str:
    # Plain writes rather than a writable memory map, where a full disk would kill the process with a signal.
    digest, count = hashlib.sha256(), 0
    with progress_bar(f"preparing {preparation.stem}", total) as advance:
        for image in images:
            if image is None or image.shape != preparation.image_shape or image.dtype != np.uint8:
                raise DataError(f"{preparation.stem}: an image has another shape or type than announced")
            content = image.tobytes()
            digest.update(content)
            with _writing(path):
                write(content)
            count += 1
            advance(1)
    if count != total:
        raise DataError(f"{preparation.stem}: {count} images were read where {total} were announced; prepare again")
    return digest.hexdigest()


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(
            f"cannot write the prepared cache {path}: {error.strerror or error}; make room and check the permissions "
            f"of {path.parent}, or set METADROPOUT_CACHE to a folder that can be written to"
        ) from error


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Let one process at a time prepare a set. It only saves work: renaming keeps the cache whole without it."""
    with contextlib.ExitStack() as stack:
        with _writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            locked = stack.enter_context(exclusive(path.with_suffix(".lock")))
            if locked:  # nobody else is writing: what lies about is from a process that was killed
                for leftover in path.parent.glob(f"{glob.escape(path.stem)}-*.tmp"):
                    leftover.unlink(missing_ok=True)
        yield
