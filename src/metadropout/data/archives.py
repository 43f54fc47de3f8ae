"""Files in zip and tar archives, read in place; an archive that could do harm when unpacked is refused whole."""

from __future__ import annotations

import gzip
import io
import stat
import tarfile
import zipfile
from abc import abstractmethod
from collections.abc import Container, Generator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NoReturn

from metadropout.data.trees import MAX_FILE_BYTES, FileTree, FolderTree, UnreadableError, is_litter
from metadropout.errors import DataError
from metadropout.files import open_regular

# Limits against archives made to fill memory.
MAX_ARCHIVE_BYTES = 64 * 2**30
MAX_RATIO = 200
MAX_SLACK = 100 * 2**20
MAX_INDEX_BYTES = 2**28  # of a zip archive: two million files
MAX_KEPT_BYTES = 2**30
MAX_PADDING_BYTES = 2**20

TAR_SUFFIXES = (".tar", ".tar.gz", ".tgz")


class Archive(FileTree):
    """The files of an archive.

    Args:
        location: where it is.
        max_file_bytes: the size of the largest file that can be meant.
    """

    kind: str

    def __init__(self, location: Path, max_file_bytes: int = MAX_FILE_BYTES) -> None:
        self.location, self.names, self.folders = location, [], []
        self.max_file_bytes = max_file_bytes
        try:
            sizes = dict(self._index())
            packed = location.stat().st_size
        except DataError:
            raise
        except Exception as error:  # zipfile, tarfile, zlib and gzip each have their own errors
            reason = getattr(error, "strerror", None) or error
            raise DataError(
                f"{location}: not a readable {self.kind} archive ({reason}); it may be cut short, fetch it again"
            ) from error
        if (total := sum(sizes.values())) > MAX_RATIO * packed + MAX_SLACK:
            self._refuse(f"its {len(sizes)} files unpack to {total} bytes, as a decompression bomb does")
        for name in sorted(sizes):
            if not any(is_litter(part) for part in name.split("/")):
                (self.folders if name.endswith("/") else self.names).append(name.rstrip("/"))

    @abstractmethod
    def _index(self) -> Iterator[tuple[str, int]]:
        """Give name and size of every file and folder, after `_check`; names of folders end in `/`."""

    def _check(self, name: str, size: int, is_plain: bool) -> None:
        if is_unsafe_name(name):
            self._refuse(f"it holds the name {name!r}, which leads out of its folder")
        if not is_plain:
            self._refuse(f"'{name}' in it is a link or a device, not a file")
        if size > self.max_file_bytes:
            self._refuse(f"'{name}' in it unpacks to {size} bytes, as a decompression bomb does")

    def _refuse(self, reason: str) -> NoReturn:
        raise DataError(f"{self.location}: refused, because {reason}; get the archive from its publisher")


class ZipTree(Archive):
    """The files of a zip archive."""

    kind = "zip"

    def _index(self) -> Iterator[tuple[str, int]]:
        with ExitStack() as on_failure:
            file = on_failure.enter_context(open_regular(self.location, MAX_ARCHIVE_BYTES))
            self._archive = zipfile.ZipFile(_Portions(file, MAX_INDEX_BYTES))
            for member in self._archive.infolist():
                mode = stat.S_IFMT(member.external_attr >> 16)
                # orig_filename: zipfile cuts names at a null byte and turns the system's separators into slashes.
                self._check(member.orig_filename, member.file_size, mode in (0, stat.S_IFREG, stat.S_IFDIR))
                if member.flag_bits & 0x1:
                    self._refuse(f"'{member.filename}' in it is encrypted")
                yield member.filename, member.file_size
            on_failure.pop_all()

    def read(self, name: str) -> bytes:
        """Return the content of one file, its checksum compared; see `FileTree.read`."""
        try:
            # zipfile reads no more than the size declared, which was checked.
            return self._archive.read(name)
        except Exception as error:  # zlib, lzma and zipfile each have their own errors
            raise UnreadableError(f"{error}; the archive is damaged, fetch it again") from error


class TarTree(Archive):
    """The files of a tar archive, plain or gzipped.

    A gzipped archive can only be read from front to back. What is passed on the way to the file asked for is kept until
    it is asked for, so to read in the archive's own order takes no memory.
    """

    kind = "tar"

    def _index(self) -> Iterator[tuple[str, int]]:
        seen = set()
        with self._open() as archive:
            for member in _members(archive):
                self._check(member.name, member.size, member.isreg() or member.isdir())
                if member.name in seen and member.isreg():
                    self._refuse(f"'{member.name}' is in it twice")
                seen.add(member.name)
                yield (f"{member.name}/", 0) if member.isdir() else (member.name, member.size)
            # The checksum of a gzipped archive is compared at its very end, after the zeros that end a tar archive.
            if len(archive.fileobj.read(MAX_PADDING_BYTES)) == MAX_PADDING_BYTES:
                self._refuse("it goes on after its end")
        self._contents = self._read_on()
        self._kept: dict[str, bytes] = {}
        self._kept_bytes = 0

    def read(self, name: str) -> bytes:
        """Return the content of one file, which can be had once; see `FileTree.read`."""
        if name in self._kept:
            content = self._kept.pop(name)
            self._kept_bytes -= len(content)
            return content
        try:
            for found, content in self._contents:
                if found == name:
                    return content
                self._keep(found, content)
        except DataError:
            self._contents.close()
            raise
        except Exception as error:
            raise UnreadableError(f"{error}; the archive is damaged, fetch it again") from error
        raise UnreadableError("not found in the archive again")

    def _keep(self, name: str, content: bytes) -> None:
        self._kept[name] = content
        self._kept_bytes += len(content)
        if self._kept_bytes > MAX_KEPT_BYTES:
            raise DataError(
                f"{self.location}: its files are in an order for which more than {MAX_KEPT_BYTES} bytes of memory are "
                "needed; unpack it"
            )

    def _read_on(self) -> Generator[tuple[str, bytes], None, None]:
        wanted = set(self.names)
        with self._open() as archive:
            for member in _members(archive):
                if member.name in wanted and (file := archive.extractfile(member)) is not None:
                    yield member.name, file.read()

    @contextmanager
    def _open(self) -> Iterator[tarfile.TarFile]:
        with open_regular(self.location, MAX_ARCHIVE_BYTES) as raw:
            gzipped = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            with gzip.GzipFile(fileobj=raw) if gzipped else raw as unpacked:
                # tarfile reads long names and such in one go, of whatever size the archive says.
                yield tarfile.TarFile(fileobj=_Portions(unpacked, self.max_file_bytes))


def _members(archive: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    while (member := archive.next()) is not None:
        archive.members = []  # type: ignore[attr-defined]  # it would remember all of them
        member.name = member.name.removeprefix("./")  # as in archives of a folder that was called "."
        yield member


class _Portions(io.RawIOBase):
    """A file that gives no more than that many bytes at a time, whatever is asked of it."""

    def __init__(self, file: io.BufferedReader | gzip.GzipFile, most: int) -> None:
        super().__init__()
        self._file, self._most = file, most

    def read(self, size: int | None = -1, /) -> bytes:
        wanted = self._most + 1 if size is None or size < 0 else min(size, self._most + 1)
        content = self._file.read(wanted)
        if len(content) > self._most:
            raise ValueError(f"more than {self._most} bytes in one go")
        return content

    def seek(self, offset: int, whence: int = 0, /) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def seekable(self) -> bool:
        return True

    def close(self) -> None:
        self._file.close()
        super().close()


def open_tree(location: Path) -> FileTree:
    """Return the files of a folder, or of a zip or tar archive."""
    if location.is_dir():
        return FolderTree(location)
    return TarTree(location) if location.name.lower().endswith(TAR_SUFFIXES) else ZipTree(location)


def paths_in(tree: FileTree, suffixes: tuple[str, ...], keep: Container[str] = ()) -> dict[str, tuple[str, ...]]:
    """Return files with the folders they lie in: `{"top/cat/1.png": ("cat", "1.png")}`.

    Most archives hold one folder with everything in it; of an archive, such folders do not count.

    Args:
        tree: where to look.
        suffixes: how the files' names end, in lower case.
        keep: folders that count nevertheless.
    """
    paths = {name: tuple(name.split("/")) for name in tree.names if name.lower().endswith(suffixes)}
    if isinstance(tree, Archive):
        while (
            len(tops := {path[0] for path in paths.values()}) == 1
            and min(len(path) for path in paths.values()) > 2
            and not any(top in keep for top in tops)
        ):
            paths = {name: path[1:] for name, path in paths.items()}
    return paths


def is_unsafe_name(name: str) -> bool:
    """Whether a name from an archive could lead outside the folder it is unpacked to, on any system."""
    parts = name.replace("\\", "/").split("/")
    return ".." in parts or parts[0] == "" or ":" in parts[0] or "\0" in name
