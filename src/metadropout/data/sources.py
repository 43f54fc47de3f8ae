"""What a prepared set was made from: files and folders, and how to see that they are still the same."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from metadropout.data.trees import walk

# Looking at every file of a folder costs about 5 µs each. Beyond this many, opening a prepared set would take long,
# and only the folders are looked at, which show files added, removed and renamed.
MAX_FILES_STAMPED = 100_000


@dataclass(frozen=True)
class Source:
    """The inputs of a preparation, below the directory that the user named or that is looked in by default."""

    directory: Path
    inputs: tuple[Path, ...]

    def describe(self) -> dict[str, Any]:
        """Return what the manifest keeps, as JSON."""
        return {
            "directory": str(self.directory.absolute()),
            "inputs": [
                {
                    "name": path.name,
                    "path": str(path.absolute()),
                    "stamp": _stamp(path),
                    "sha256": file_digest(path) if path.is_file() else None,
                }
                for path in self.inputs
            ],
        }

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
    if entry["sha256"] is None or not path.is_file() or (same_stamp and not thorough):
        return same_stamp
    same_content: bool = file_digest(path) == entry["sha256"]
    return same_content


def file_digest(path: Path, algorithm: str = "sha256") -> str:
    """Return the checksum of a file, reading it piece by piece."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.new(algorithm, usedforsecurity=False)).hexdigest()


def _stamp(path: Path) -> str:
    if path.is_file():
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
