"""Reads files out of a tar archive in place; nothing is unpacked."""

from __future__ import annotations

import tarfile
from collections.abc import Collection, Iterator
from pathlib import Path

from metadropout.data.trees import is_unsafe_name
from metadropout.errors import DataError

MAX_MEMBER_BYTES = 512 * 2**20


def read_members(path: Path, wanted: Collection[str]) -> Iterator[tuple[str, bytes]]:
    """Give name and content of the members whose last part of the name is wanted.

    Raises:
        DataError: if the archive is damaged, lacks one of them, or could do harm when unpacked.
    """
    missing = set(wanted)
    try:
        with tarfile.open(path, "r:*") as archive:
            for member in archive:
                if is_unsafe_name(member.name):
                    _refuse(path, f"it holds the name {member.name!r}, which leads out of its folder")
                if not (member.isreg() or member.isdir()):
                    _refuse(path, f"'{member.name}' in it is a link or a device, not a file")
                if member.size > MAX_MEMBER_BYTES:
                    _refuse(path, f"'{member.name}' in it unpacks to {member.size} bytes, as a decompression bomb does")
                last = member.name.split("/")[-1]
                if last in missing and (file := archive.extractfile(member)) is not None:
                    missing.discard(last)
                    yield member.name, file.read()
    except DataError:
        raise
    except Exception as error:  # tarfile, zlib, lzma and gzip each have their own errors
        raise DataError(f"{path}: not a readable tar archive ({error}); it may be cut short, fetch it again") from error
    if missing:
        raise DataError(f"{path}: {', '.join(sorted(missing))} not in it; fetch the archive again")


def _refuse(path: Path, reason: str) -> None:
    raise DataError(f"{path}: refused, because {reason}; get the archive from its publisher")
