"""Where data sets are looked for, and where their prepared caches go."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from metadropout.errors import DataError


def data_directory() -> Path:
    """Return the folder in which archives and image folders are looked for.

    It is `METADROPOUT_DATA` where that is set and not empty, otherwise the user's cache folder, which need not exist.

    Raises:
        DataError: if `METADROPOUT_DATA` names no folder: most likely a slip, and nothing should be made at its place.
    """
    if not (chosen := _named("METADROPOUT_DATA")):
        return _user_cache() / "metadropout"
    if not chosen.is_dir():
        raise DataError(f"METADROPOUT_DATA is '{chosen}', but there is no such folder; make it or change the variable")
    return chosen


def cache_directory() -> Path:
    """Return the folder of the prepared caches: `METADROPOUT_CACHE`, or `prepared` in the data directory."""
    return _named("METADROPOUT_CACHE") or data_directory() / "prepared"


def _named(variable: str) -> Path | None:
    value = os.environ.get(variable)
    return Path(os.path.expanduser(value)) if value else None  # Path's own fails on unknown users


def _user_cache() -> Path:
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or "~/AppData/Local").expanduser()
    if sys.platform == "darwin":
        return Path("~/Library/Caches").expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
