"""What a check of a data set finds."""

from __future__ import annotations

from typing import NamedTuple


class Finding(NamedTuple):
    """One thing that was looked at, and what was found."""

    in_order: bool
    """False for something that the user should know, though the data can be used."""
    text: str

    def __str__(self) -> str:
        return f"{'ok' if self.in_order else 'note':<5}{self.text}"
