"""Keeps glibc from giving large blocks back to the system, which costs a training loop up to half its time."""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # from <malloc.h>
_LARGE = 2**31 - 1


def keep_freed_memory() -> bool:
    """Raise glibc's mmap and trim thresholds, so that freed blocks are reused; return whether that was possible.

    Without it every tensor of more than a few hundred kilobytes is mapped, zeroed page by page and unmapped again.
    All threads draw on one arena, as the others give memory back whatever the thresholds are. The process keeps its
    peak memory until it ends.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library than glibc
        return False
    settings = {_M_MMAP_THRESHOLD: _LARGE, _M_TRIM_THRESHOLD: _LARGE, _M_ARENA_MAX: 1}
    return all(mallopt(name, value) for name, value in settings.items())
