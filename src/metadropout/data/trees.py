"""Image files by relative path, whether they lie in a folder or in a zip archive; archives are never unpacked."""

from __future__ import annotations

import os
import stat
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path

from metadropout.errors import DataError

# Limits against archives made to fill memory: no benchmark image comes near them.
MAX_FILE_BYTES = 64 * 2**20
MAX_RATIO = 200
MAX_SLACK = 100 * 2**20


class FileTree(ABC):
    """Files to read, addressed by their path relative to a root, with `/` between the parts."""

    location: Path
    names: list[str]
    """Every regular file, sorted; without hidden files and what packers leave behind."""

    @abstractmethod
    def read(self, name: str) -> bytes:
        """Return the content of one file."""


class FolderTree(FileTree):
    """The files of a folder and its subfolders."""

    def __init__(self, location: Path) -> None:
        self.location = location
        try:
            self.names = sorted(name for name, entry in walk(location) if not entry.is_dir())
        except OSError as error:
            raise DataError(f"{error.filename}: cannot be read ({error.strerror}); mend or remove it") from error

    def read(self, name: str) -> bytes:
        """Return the content of one file."""
        path = self.location / name
        try:
            if path.stat().st_size > MAX_FILE_BYTES:
                raise DataError(f"{path}: larger than {MAX_FILE_BYTES} bytes; shrink the image or remove it")
            return path.read_bytes()
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror or error}); mend or remove it") from error


class ZipTree(FileTree):
    """The files of a zip archive, read in place; an archive that could do harm when unpacked is refused whole."""

    def __init__(self, location: Path) -> None:
        self.location = location
        try:
            self._archive = zipfile.ZipFile(location)
        except (zipfile.BadZipFile, OSError, NotImplementedError, ValueError) as error:
            raise DataError(
                f"{location}: not a readable zip archive ({error}); it may be cut short, fetch it again"
            ) from error
        self._members: dict[str, zipfile.ZipInfo] = {}
        total = 0
        for member in self._archive.infolist():
            self._refuse_harmful(member)
            total += member.file_size
            if not member.is_dir() and not any(_is_litter(part) for part in member.filename.split("/")):
                self._members[member.filename] = member
        if total > MAX_RATIO * location.stat().st_size + MAX_SLACK:
            self._refuse(f"its {len(self._members)} files unpack to {total} bytes, as a decompression bomb does")
        self.names = sorted(self._members)

    def read(self, name: str) -> bytes:
        """Return the content of one file, its checksum compared."""
        member = self._members[name]
        try:
            with self._archive.open(member) as file:
                # zipfile reads no more than the size declared, which was checked, and compares the checksum.
                return file.read()
        except Exception as error:  # zlib, lzma and zipfile each have their own errors
            raise DataError(
                f"{self.location}: '{name}' in it cannot be read ({error}); the archive is damaged, fetch it again"
            ) from error

    def _refuse_harmful(self, member: zipfile.ZipInfo) -> None:
        # orig_filename: zipfile cuts names at a null byte and turns the system's separators into slashes.
        name = member.orig_filename
        if is_unsafe_name(name):
            self._refuse(f"it holds the name {name!r}, which leads out of its folder")
        mode = member.external_attr >> 16
        if stat.S_IFMT(mode) not in (0, stat.S_IFREG, stat.S_IFDIR):
            self._refuse(f"'{name}' in it is a link or a device, not a file")
        if member.flag_bits & 0x1:
            self._refuse(f"'{name}' in it is encrypted")
        if member.file_size > MAX_FILE_BYTES:
            self._refuse(f"'{name}' in it unpacks to {member.file_size} bytes, as a decompression bomb does")

    def _refuse(self, reason: str) -> None:
        self._archive.close()
        raise DataError(f"{self.location}: refused, because {reason}; get the archive from its publisher")


def open_tree(location: Path) -> FileTree:
    """Return the files of a folder or of a zip archive."""
    return FolderTree(location) if location.is_dir() else ZipTree(location)


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
            found = sorted((entry for entry in entries if not _is_litter(entry.name)), key=lambda entry: entry.name)
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


def is_unsafe_name(name: str) -> bool:
    """Whether a name from an archive could lead outside the folder it is unpacked to, on any system."""
    parts = name.replace("\\", "/").split("/")
    return ".." in parts or parts[0] == "" or ":" in parts[0] or "\0" in name


def _is_litter(part: str) -> bool:
    return part.startswith(".") or part in {"__MACOSX", "Thumbs.db"}
