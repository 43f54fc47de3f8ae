"""What a prepared set was made from: files and folders, and how to see that they are still the same."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from metadropout.data.archives import MAX_ARCHIVE_BYTES
from metadropout.data.trees import walk
from metadropout.errors import DataError
from metadropout.files import open_regular

# Looking at every file of a folder costs about 5 µs each. Beyond this many, opening a prepared set would take long,
# and only the folders are looked at, which show files added, removed and renamed.
MAX_FILES_STAMPED = 100_000


@dataclass(frozen=True)
class Source:
    """The inputs of a preparation, below the directory that the user named or that is looked in by default."""

    directory: Path
    inputs: tuple[Path, ...]

    def describe(self) -> dict[str, Any]:
        """Return what the manifest keeps, as JSON.

        Raises:
            DataError: if an input is neither a folder nor a regular file, or cannot be read.
        """
        try:
            return {
                "directory": str(self.directory.absolute()),
                "inputs": [
                    {
                        "name": path.name,
                        "path": str(path.absolute()),
                        "stamp": _stamp(path),
                        "sha256": None if path.is_dir() else file_digest(path),
                    }
                    for path in self.inputs
                ],
            }
        except OSError as error:
            raise DataError(
                f"{error.filename}: cannot be read ({error.strerror or error}); fix or replace it"
            ) from error

    def matches(self, recorded: Mapping[str, Any], *, thorough: bool = False) -> bool:
        """Whether the inputs are those that the manifest describes.

        Sizes and times are compared. A file with another time, such as a copy, is compared by checksum.

        Args:
            recorded: what `describe` gave.
            thorough: compare the checksums of files in any case.
        """
        known = recorded["inputs"]
        return len(known) == len(self.inputs) and all(
            path.name == entry["name"] and _same(path, entry, thorough)
            for path, entry in zip(self.inputs, known, strict=True)
        )


def _same(path: Path, entry: Mapping[str, Any], thorough: bool) -> bool:
    same_stamp: bool = _stamp(path) == entry["stamp"]
    if entry["sha256"] is None or path.is_dir() or (same_stamp and not thorough):
        return same_stamp
    same_content: bool = file_digest(path) == entry["sha256"]
    return same_content


def file_digest(path: Path, algorithm: str = "sha256", limit: int = MAX_ARCHIVE_BYTES) -> str:
    """Return the checksum of a regular file of at most `limit` bytes, reading it piece by piece."""
    with open_regular(path, limit) as file:
        return hashlib.file_digest(file, lambda: hashlib.new(algorithm, usedforsecurity=False)).hexdigest()


def _stamp(path: Path) -> str:
    if not path.is_dir():
        status = path.stat()
        return f"{status.st_size}-{status.st_mtime_ns}"
    digest = hashlib.sha256()
    for count, (name, entry) in enumerate(walk(path)):
        if count < MAX_FILES_STAMPED or entry.is_dir():
            try:
                status = entry.stat()
            except OSError:  # a link to nowhere, which matters only if it should have been an image
                status = entry.stat(follow_symlinks=False)
            digest.update(f"{name}\0{status.st_size}\0{status.st_mtime_ns}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()
