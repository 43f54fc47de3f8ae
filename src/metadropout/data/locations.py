"""Where data sets are looked for, and where their prepared caches go."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def data_directory() -> Path:
    """Return the folder in which archives and image folders are looked for.

    It is `METADROPOUT_DATA` where that is set and not empty, otherwise the user's cache folder. It need not exist.
    """
    chosen = os.environ.get("METADROPOUT_DATA")
    return Path(chosen).expanduser() if chosen else _user_cache() / "metadropout"


def cache_directory() -> Path:
    """Return the folder of the prepared caches: `METADROPOUT_CACHE`, or `prepared` in the data directory."""
    chosen = os.environ.get("METADROPOUT_CACHE")
    return Path(chosen).expanduser() if chosen else data_directory() / "prepared"


def _user_cache() -> Path:
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or "~/AppData/Local").expanduser()
    if sys.platform == "darwin":
        return Path("~/Library/Caches").expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
