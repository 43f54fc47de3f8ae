"""The prepared cache: every image decoded once into one memory-mapped file, with a manifest that has its checksum.

A prepared set is two files. `STEM-CHECKSUM.u8` holds the pixels of all images, class after class. `STEM.json`, the
manifest, says what they are, where they came from and how long the pixel file is, and carries a checksum of itself.
It is put in place last and by renaming, so it is the moment at which a preparation counts: whatever stops one before, a
killed process, a full disk, leaves nothing that a later run would take for finished.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import itertools
import json
import logging
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict  # comes with pydantic, which on Python 3.11 does not take the one of typing

from metadropout.data.class_lists import SplitLists, is_text, listed
from metadropout.data.images import ClassSubset, ImageSet, ImageShape, IntArray, Splits, UInt8Array
from metadropout.data.locations import cache_directory, data_directory
from metadropout.data.locks import exclusive
from metadropout.data.progress import progress_bar
from metadropout.data.sources import Source, file_digest
from metadropout.errors import DataError
from metadropout.files import check_regular, move_into_place, read_json, write_atomically

# Raise it when the same source would give other bytes or another manifest: every cache is then rebuilt.
VERSION = 3
MAX_MANIFEST_BYTES = 2**28

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Contents:
    """What a source holds: classes with their sizes, and their images in the same order."""

    class_sizes: Mapping[str, int]
    images: Iterable[UInt8Array | None]
    """Arrays (channels, height, width), class after class; None for one that is left out."""
    splits: Mapping[str, SplitLists] = field(default_factory=dict)
    """The splits that belong to the data, by name."""
    notes: Mapping[str, Any] = field(default_factory=dict)
    """Whatever else a reader of the manifest may want to know, as JSON; looked at after the images."""


@dataclass(frozen=True)
class Preparation:
    """How one prepared set is made."""

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


class _InputEntry(TypedDict):
    name: str
    path: str
    stamp: str
    sha256: str | None


class _SourceEntry(TypedDict):
    directory: str
    inputs: list[_InputEntry]


_Notes = TypedDict("_Notes", {"left out": list[str], "files": dict[str, str], "images": str}, total=False)
_Notes.__pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[attr-defined]  # a data set's own


_Positive = Annotated[int, Field(gt=0, lt=2**63)]


class _PixelsEntry(TypedDict):
    file: Annotated[str, Field(pattern=r"^[^/\\]+\.u8$")]
    bytes: _Positive
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Manifest(TypedDict):
    """What stands in a manifest."""

    version: int
    name: str
    source: _SourceEntry
    settings: dict[str, Any]
    image_shape: tuple[_Positive, _Positive, _Positive]
    pixels: _PixelsEntry
    splits: dict[str, dict[str, list[str]]]
    notes: _Notes
    classes: dict[str, _Positive]
    class_digests: dict[str, Annotated[str, Field(pattern=r"^[0-9a-f]+$")]]


_MANIFEST = TypeAdapter(Manifest)
AGAIN = "prepare it again with --force: `metadropout data prepare NAME --force`, with the same options"


class PreparedSet(ImageSet):
    """The classes of a prepared cache; pixels stay on disk until they are gathered."""

    def __init__(self, manifest_path: Path, manifest: Manifest) -> None:
        self.manifest_path, self.manifest = manifest_path, manifest
        self.image_shape = ImageShape(*manifest["image_shape"])
        self.class_names = list(manifest["classes"])
        self.pixel_path = manifest_path.with_name(manifest["pixels"]["file"])
        total = sum(manifest["classes"].values())
        expected = total * math.prod(self.image_shape)
        check_regular(self.pixel_path, expected)
        actual = self.pixel_path.stat().st_size
        if actual != expected or expected != manifest["pixels"]["bytes"]:
            raise ValueError(f"{self.pixel_path} has {actual} bytes instead of {expected}")
        if list(manifest["class_digests"]) != self.class_names:
            raise ValueError("classes without a digest")
        if not all(map(is_text, self.class_names)):
            raise ValueError("a class name that is not text")
        self.class_sizes = np.asarray(list(manifest["classes"].values()), dtype=np.int64)
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

    def lists_of_source(self, name: str) -> SplitLists:
        """Return one of the splits that belong to the data."""
        lists = self.manifest["splits"].get(name, {})
        listed_classes = {c for part in lists.values() for c in part}
        if not {"train", "test"} <= lists.keys() or not listed_classes <= set(self.class_names):
            raise DataError(f"{self.manifest_path}: does not have the split '{name}' of this data; {AGAIN}")
        return lists

    def checksum(self) -> str:
        """Return the manifest's checksum of the pixels, with the classes; see `ImageSet.checksum`."""
        described = [list(self.image_shape), self.manifest["classes"], self.manifest["pixels"]["sha256"]]
        return hashlib.sha256(json.dumps(described).encode()).hexdigest()

    def class_digests(self) -> list[str]:
        """Return the manifest's digest of each class; see `ImageSet.class_digests`."""
        return list(self.manifest["class_digests"].values())

    def verify(self) -> None:
        """Compare the pixels with the checksum taken when they were prepared.

        Raises:
            DataError: if they differ.
        """
        try:
            digest = file_digest(self.pixel_path, limit=self.manifest["pixels"]["bytes"])
        except OSError as error:
            raise DataError(f"{self.pixel_path}: cannot be read ({error.strerror or error}); {AGAIN}") from error
        if digest != self.manifest["pixels"]["sha256"]:
            raise DataError(
                f"{self.pixel_path}: its bytes have changed since they were prepared (the checksum differs); {AGAIN}"
            )


_forced: ContextVar[bool] = ContextVar("forced", default=False)


@contextlib.contextmanager
def preparing_again() -> Iterator[None]:
    """Within this, sets are prepared again whatever there is of them; what a set is opened from is never trusted."""
    token = _forced.set(True)
    try:
        yield
    finally:
        _forced.reset(token)


def open_prepared(preparation: Preparation) -> PreparedSet:
    """Open a prepared set, preparing it first where it is missing, damaged, cut short or out of date.

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
        if ready := _open_if_current(path, preparation, source, silent=True):
            return ready
        return PreparedSet(path, _build(path, preparation, source))


def _find_source(preparation: Preparation, path: Path) -> Source | None:
    if preparation.directory is not None:
        return preparation.find_in(Path(preparation.directory).expanduser()) or preparation.obtain()
    found = preparation.find_in(data_directory())
    if found is None and (manifest := read_manifest(path)):
        # Prepared from elsewhere: changes there still count. If it is gone, the prepared set is enough.
        found = preparation.find_in(Path(manifest["source"]["directory"]))
    return found


def read_manifest(path: Path) -> Manifest | None:
    """Return a manifest; None if there is none, or none that this version can use."""
    try:
        return _load_manifest(path)
    except (OSError, ValueError):
        return None


def _load_manifest(path: Path) -> Manifest:
    content = read_json(path, MAX_MANIFEST_BYTES)
    if isinstance(content, dict) and content.get("version") != VERSION:
        raise _OtherVersionError
    if not isinstance(content, dict) or content.pop("sha256", None) != _checksum(content):
        raise ValueError("its checksum differs")
    return _MANIFEST.validate_python(content)


class _OtherVersionError(ValueError):
    """The manifest is of another version of the program, which is no damage."""


def _checksum(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _open_if_current(
    path: Path, preparation: Preparation, source: Source | None, *, silent: bool = False
) -> PreparedSet | None:
    if _forced.get():
        return None
    try:
        manifest = _load_manifest(path)
        if manifest["settings"] != preparation.settings:
            return None
        if source is not None and not source.matches(manifest["source"]):
            _log.info("%s: the source has changed, preparing again", path)
            return None
        return PreparedSet(path, manifest)
    except (FileNotFoundError, NotADirectoryError, _OtherVersionError):
        return None
    except (OSError, ValueError, KeyError) as error:
        strange = "contents of another kind" if isinstance(error, ValidationError) else error
        reason = getattr(error, "strerror", None) or strange
        if not silent:
            _log.warning("%s: the prepared set is damaged (%s), so it is prepared again", path, reason)
        return None


def _build(path: Path, preparation: Preparation, source: Source) -> Manifest:
    # Described before it is read: a change in between shows as a difference the next time, and not as nothing.
    described = source.describe()
    contents = preparation.read(source)
    for name in (str(source.directory), *contents.class_sizes):
        if not is_text(name):
            raise DataError(f"the name {name!r} is not UTF-8; rename the folder")
    size = sum(contents.class_sizes.values()) * math.prod(preparation.image_shape)
    with _writing(path):
        free = shutil.disk_usage(path.parent).free
        if free < size:
            raise OSError(f"{size} bytes are needed and {free} are free")
        handle, name = tempfile.mkstemp(prefix=f"{preparation.stem}-", suffix=".tmp", dir=path.parent)
    temporary = Path(name)
    try:
        file = os.fdopen(handle, "wb")
        try:
            written = _write_pixels(file.write, contents, preparation, path)
            with _writing(path):
                file.flush()
                os.fsync(file.fileno())
        finally:
            with contextlib.suppress(OSError):  # what cannot be written has been reported already
                file.close()
        pixels = path.with_name(f"{preparation.stem}-{written.digest[:16]}.u8")
        manifest: dict[str, Any] = {
            "version": VERSION,
            "name": preparation.stem,
            "source": described,
            "settings": preparation.settings,
            "image_shape": list(preparation.image_shape),
            "pixels": {"file": pixels.name, "bytes": temporary.stat().st_size, "sha256": written.digest},
            "splits": {
                name: {part: [c for c in classes if c in written.class_sizes] for part, classes in lists.items()}
                for name, lists in contents.splits.items()
            },
            "notes": contents.notes,
            "classes": written.class_sizes,
            "class_digests": written.class_digests,
        }
        previous = read_manifest(path)
        with _writing(path):
            move_into_place(temporary, pixels)
            write_atomically(path, json.dumps({**manifest, "sha256": _checksum(manifest)}, indent=1))
    finally:
        temporary.unlink(missing_ok=True)
    if previous and previous["pixels"]["file"] != pixels.name:
        # On POSIX, runs that have the old file mapped keep it. Elsewhere it stays in use, and so stays.
        with contextlib.suppress(OSError):
            path.with_name(previous["pixels"]["file"]).unlink()
    return _MANIFEST.validate_python(manifest)


class _Written(NamedTuple):
    """What is in a pixel file."""

    digest: str
    class_sizes: dict[str, int]
    class_digests: dict[str, str]


def _write_pixels(
    write: Callable[[bytes], object], contents: Contents, preparation: Preparation, path: Path
) -> _Written:
    # Plain writes rather than a writable memory map, where a full disk would kill the process with a signal.
    announced = contents.class_sizes
    total, count = sum(announced.values()), 0
    digest, sizes = hashlib.sha256(), dict.fromkeys(announced, 0)
    of_class = {name: hashlib.sha256() for name in announced}
    names = itertools.chain.from_iterable(itertools.repeat(name, size) for name, size in announced.items())
    with progress_bar(f"preparing {preparation.stem}", total) as advance:
        for image in contents.images:
            count += 1
            advance(1)
            name = next(names, None)
            if image is None or name is None:
                continue
            if image.shape != preparation.image_shape or image.dtype != np.uint8:
                raise DataError(f"{preparation.stem}: an image has shape {image.shape} and type {image.dtype}")
            content = image.tobytes()
            digest.update(content)
            of_class[name].update(content)
            sizes[name] += 1
            with _writing(path):
                write(content)
    if count != total:
        raise DataError(f"{preparation.stem}: {count} images were read where {total} were announced; prepare again")
    if empty := [name for name, size in sizes.items() if not size]:
        _log.warning("%s: left out, as none of their images can be read: classes %s", path, listed(map(repr, empty)))
    if len(empty) == len(sizes):
        raise DataError(f"{preparation.stem}: there is no image that can be read")
    kept = {name: size for name, size in sizes.items() if size}
    return _Written(digest.hexdigest(), kept, {name: of_class[name].hexdigest()[:32] for name in kept})


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        at = f" at {error.filename2 or error.filename}" if error.filename else ""
        raise DataError(
            f"cannot write the prepared cache {path}: {error.strerror or error}{at}; make room and check the "
            f"permissions of {path.parent}, or set METADROPOUT_CACHE to a folder that can be written to"
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
