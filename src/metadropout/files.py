"""Writing files so that they are there whole or not at all, and reading them without surprises."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


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


def read_regular_file(path: Path, most: int) -> bytes:
    """Read a file, but no pipe or device, which may never end, and no more than that many bytes.

    Raises:
        OSError: if it cannot be read, is not a regular file or is too large.
    """
    # Without O_NONBLOCK, opening a pipe would wait for somebody to write to it.
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    with os.fdopen(handle, "rb") as file, errors_naming(path):
        status = os.fstat(handle)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "is not a regular file")
        data = file.read(most + 1)
        if len(data) > most:
            raise OSError(errno.EFBIG, f"is larger than {most} bytes")
        return data
