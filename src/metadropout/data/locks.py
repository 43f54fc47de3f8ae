"""One process at a time.

Not filelock: where a file system has no locks, it makes files that outlive a killed process, and a run could not go on.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def exclusive(path: Path, *, wait: bool = True) -> Iterator[bool]:
    """Hold a lock on a file; it ends with its process, however that ends.

    Gives whether there is a lock: some systems and some network file systems have none.

    Args:
        path: the file; it is made where it is missing.
        wait: whether to wait for another process to let go of it.

    Raises:
        BlockingIOError: if another process holds it and there is no waiting.
    """

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | getattr(os, "O_NONBLOCK", 0), 0o666)  # a named pipe would wait for a reader

    with open(path, "a", opener=opener) as file:
        locked = False
        try:
            import fcntl  # noqa: PLC0415 - not on every system

            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            locked = True
        except BlockingIOError:
            raise
        except (ImportError, OSError):
            pass
        yield locked
