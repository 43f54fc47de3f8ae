"""Image files by relative path, whatever they lie in; `archives` adds archives to the folders here."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path

from metadropout.errors import DataError
from metadropout.files import read_regular

# No benchmark image comes near this: a larger file is a mistake, or made to fill memory.
MAX_FILE_BYTES = 64 * 2**20


class UnreadableError(Exception):
    """One file cannot be read or decoded; the caller knows its name."""


class FileTree(ABC):
    """Files to read, addressed by their path relative to a root, with `/` between the parts."""

    location: Path
    names: list[str]
    """Every file, sorted; without hidden files and what packers leave behind."""
    folders: list[str]
    """Every folder, sorted, as far as the tree knows; those that hold files need not be in it."""

    @abstractmethod
    def read(self, name: str) -> bytes:
        """Return the content of one file.

        Raises:
            UnreadableError: if it cannot be read.
        """


class FolderTree(FileTree):
    """The files of a folder and its subfolders."""

    def __init__(self, location: Path) -> None:
        self.location, self.names, self.folders = location, [], []
        try:
            for name, entry in walk(location):
                (self.folders if entry.is_dir() else self.names).append(name)
        except OSError as error:
            raise DataError(f"{error.filename}: cannot be read ({error.strerror}); fix or remove it") from error
        self.names.sort()
        self.folders.sort()

    def read(self, name: str) -> bytes:
        """Return the content of one file; see `FileTree.read`."""
        try:
            return read_regular(self.location / name, MAX_FILE_BYTES)
        except OSError as error:
            raise UnreadableError(error.strerror or str(error)) from error


def walk(root: Path) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Give everything below a folder with its relative name, without hidden files; links to folders are followed.

    People collect classes by linking to them. A folder that was entered before is not entered again, so a link that
    leads upwards does no harm.
    """
    entered = {_identity(root)}
    pending = [""]
    while pending:
        folder = pending.pop()
        with os.scandir(root / folder) as entries:
            found = sorted((entry for entry in entries if not is_litter(entry.name)), key=lambda entry: entry.name)
        for entry in found:
            name = f"{folder}/{entry.name}" if folder else entry.name
            if entry.is_dir():
                if (identity := _identity(entry.path)) in entered:
                    continue
                entered.add(identity)
                pending.append(name)
            yield name, entry


def _identity(folder: str | Path) -> tuple[int, int]:
    status = os.stat(folder)
    return status.st_dev, status.st_ino


def is_litter(part: str) -> bool:
    """Whether a file or folder of that name is what desktops and packers leave behind."""
    return part.startswith(".") or part in {"__MACOSX", "Thumbs.db"}
