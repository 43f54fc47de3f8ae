"""Reading what stands beside a run's checkpoints: any of it may be damaged, and none of it is needed to go on."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from metadropout.errors import RunFileError, shortened
from metadropout.files import read_regular

T = TypeVar("T")
MAX_BYTES = 48 * 2**20
"""More than a million episodes take, and little enough to be read into memory."""


def read_checked(path: Path, kind: TypeAdapter[T], fix: str) -> T:
    """Read a JSON file and check that it holds what it should.

    Args:
        path: the file.
        kind: what it should hold.
        fix: what to do where it is damaged, such as "delete it and evaluate again".

    Raises:
        RunFileError: if it cannot be read or holds something else.
    """
    try:
        return kind.validate_json(read_regular(path, MAX_BYTES))
    except OSError as error:
        raise RunFileError(f"{path}: cannot be read: {error.strerror}; {fix}") from None
    except ValidationError as error:
        raise RunFileError(f"{path}: is damaged: {described(error)}; {fix}") from None


def described(error: ValidationError) -> str:
    """Say in one line where the first mistake is, and what it is."""
    first = error.errors(include_url=False, include_input=False)[0]
    where = shortened(" ".join(".".join(map(str, first["loc"])).split()))
    said = " ".join(first["msg"].removeprefix("Value error, ").split())
    return f"{where}: {said[:1].lower()}{said[1:]}" if where else f"{said[:1].lower()}{said[1:]}"


def set_aside(path: Path) -> None:
    """Give a damaged file, or what stands in a file's place, another name, and say so; nothing is deleted."""
    kept = path.with_name(f"{path.name}.damaged")
    number = 1
    while kept.exists() or kept.is_symlink():
        number += 1
        kept = path.with_name(f"{path.name}.damaged-{number}")
    path.rename(kept)
    print(f"{path}: is damaged; it is kept as {kept.name}, and a new one is begun", file=sys.stderr)
