"""One process at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def exclusive(path: Path) -> Iterator[bool]:
    """Hold a lock on a file, waiting for other processes to let go of it; it ends with its process, however that ends.

    Gives whether there is a lock: some systems and some network file systems have none.
    """
    with path.open("a") as file:
        locked = False
        with contextlib.suppress(ImportError, OSError):
            import fcntl  # noqa: PLC0415 - not on every system

            fcntl.flock(file, fcntl.LOCK_EX)
            locked = True
        yield locked
