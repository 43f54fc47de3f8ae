"""Reading files that may be anything, and writing files atomically: complete, or not at all."""

from __future__ import annotations

import errno
import io
import json
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a folder",
}


def check_regular(path: Path, limit: int) -> None:
    """Refuse what is not a regular file of at most that many bytes: pipes and devices can wait or go on forever.

    Raises:
        OSError: saying what it is instead; readers turn it into their own error, as if it could not be opened.
    """
    _refuse_others(path, os.stat(path), limit)


def open_regular(path: Path, limit: int) -> io.BufferedReader:
    """Open a regular file of at most that many bytes for reading, and nothing else; see `check_regular`."""
    check_regular(path, limit)  # first, because even opening a device can do something
    # Not waiting for a writer, should a pipe have taken the file's place meanwhile.
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        _refuse_others(path, os.fstat(handle), limit)
        return os.fdopen(handle, "rb")
    except OSError:
        os.close(handle)
        raise


def read_regular(path: Path, limit: int) -> bytes:
    """Return the content of a regular file of at most that many bytes; see `check_regular`."""
    with open_regular(path, limit) as file:
        size = os.fstat(file.fileno()).st_size
        content = file.read(size + 1)
        if len(content) > size:  # it grows, or is one of those that the system makes up as they are read
            content += file.read(limit - size)
    if len(content) > limit:
        raise _too_large(path, limit)
    return content


def read_json(path: Path, limit: int) -> Any:
    """Return the content of a JSON file; see `read_regular`.

    Raises:
        OSError: if it cannot be read.
        ValueError: if it is not JSON.
    """
    content = read_regular(path, limit)
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _refuse_others(path: Path, status: os.stat_result, limit: int) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        raise OSError(errno.EINVAL, f"it is {kind}, not a regular file", str(path))
    if status.st_size > limit:
        raise _too_large(path, limit)


def _too_large(path: Path, limit: int) -> OSError:
    return OSError(errno.EFBIG, f"it has more than the {limit} bytes allowed", str(path))


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file by renaming a finished one into place; readers see the old or the new one, never a part.

    Raises:
        OSError: if it cannot be written, with the file's name; nothing is left behind then.
    """
    data = content.encode() if isinstance(content, str) else content
    with errors_naming(path):
        handle, name = tempfile.mkstemp(prefix=f"{path.stem}-", suffix=".tmp", dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            move_into_place(Path(name), path)
        finally:
            Path(name).unlink(missing_ok=True)


def move_into_place(temporary: Path, path: Path) -> None:
    """Give a finished temporary file its name, readable like any file that its user makes."""
    mask = os.umask(0)
    os.umask(mask)
    os.chmod(temporary, 0o666 & ~mask)  # mkstemp makes files private
    os.replace(temporary, path)
    if os.name == "posix":  # the new name itself must survive a power cut
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


@contextmanager
def errors_naming(path: Path | str) -> Iterator[None]:
    """Let an OSError name the file that is being written: one from a full disk names none, others a temporary one."""
    try:
        yield
    except OSError as error:
        error.filename, error.filename2 = str(path), None
        raise
