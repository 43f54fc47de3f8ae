"""The index of a folder of figures, `figures.json`: what is drawn, and what was asked for and is not."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from metadropout.data.class_lists import is_text
from metadropout.errors import RunFileError, shortened
from metadropout.files import write_atomically
from metadropout.runs.reading import read_checked

LONGEST_NAME = 255
"""Bytes of a file's name that every system takes."""
DAMAGED = "delete it and draw the figures again"


@dataclass(frozen=True)
class FigureEntry:
    """A figure that has been drawn."""

    files: Annotated[list[str], Field(min_length=1)]
    title: str
    caption: str
    alt: str
    state: str = "last"
    """Which of the run's checkpoints is shown."""
    iteration: int | None = None
    """Outer steps of training that it shows; None where an earlier version drew it."""


@dataclass(frozen=True)
class FigureRequest:
    """How a command wants a figure to be drawn."""

    runs: tuple[str, ...]
    """Folders of the run and of what it is compared with."""
    options: tuple[str, ...] = ()
    """Other arguments of the command."""


@dataclass
class FigureIndex:
    """What a folder of figures holds."""

    figures: dict[str, FigureEntry] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    """Figures that do not apply to the run, with the reason."""
    pending: dict[str, FigureRequest] = field(default_factory=dict)
    """Figures that a command was to draw and has not got to: listed before it begins, taken off one by one."""
    version: Literal[2] = 2

    def write(self, folder: Path) -> None:
        """Write the index atomically."""
        write_atomically(folder / "figures.json", _INDEX.dump_json(self, indent=1) + b"\n")


def read_index(folder: Path) -> FigureIndex:
    """Read a folder's index; an empty one where there is none.

    Raises:
        RunFileError: if it is damaged.
    """
    path = folder / "figures.json"
    if not path.exists():
        return FigureIndex()
    content = read_checked(path, _ANY, DAMAGED)
    if "version" in content:
        index = read_checked(path, _INDEX, DAMAGED)
    else:  # what earlier versions wrote: figures by their names, and nothing else
        index = FigureIndex(read_checked(path, _FIGURES, DAMAGED))
    for name, drawn in index.figures.items():
        for file in drawn.files:
            if Path(file).name != file or not is_text(file) or len(file.encode()) > LONGEST_NAME:
                raise RunFileError(
                    f"{path}: is damaged: {shortened(name)}: {shortened(file)} is not in this folder; {DAMAGED}"
                )
    return index


_INDEX, _FIGURES = TypeAdapter(FigureIndex), TypeAdapter(dict[str, FigureEntry])
_ANY: TypeAdapter[dict[str, Any]] = TypeAdapter(dict[str, Any])
