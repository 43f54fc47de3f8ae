"""Writing files so that they are there whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file by renaming a finished one into place; readers see the old or the new one, never a part.

    Raises:
        OSError: if it cannot be written; nothing is left behind then.
    """
    data = content.encode() if isinstance(content, str) else content
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
