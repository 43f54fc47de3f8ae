"""Studies: which rows of which tables were trained, with which seeds and options, in a file beside their results."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from metadropout.errors import ConfigError
from metadropout.options import Episodes, Limits, Seed
from metadropout.recipes import tables
from metadropout.runs.reading import described
from metadropout.safe_yaml import read_yaml


class Study(BaseModel):
    """Everything that `metadropout reproduce` has to be told to train a study, or to print its tables."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    title: str
    tables: Annotated[list[str], Field(min_length=1)]
    """Names of tables; each is printed with those of the rows that it has."""
    settings: Annotated[list[str], Field(min_length=1)]
    rows: Annotated[dict[str, Annotated[list[Seed], Field(min_length=1)]], Field(min_length=1)]
    """The seeds of each row."""
    scale: Annotated[float, Limits(0, 1000, above=True)] = 1.0
    """Fraction of the recipes' iterations."""
    episodes: Episodes = 1000
    """Test episodes of each run."""
    options: dict[str, Any] = {}
    """By dotted name, those in which all runs differ from their recipes."""

    @field_validator("tables")
    @classmethod
    def _known(cls, names: list[str]) -> list[str]:
        for name in names:
            if name not in tables():
                raise ValueError(f"there is no table '{name}'; known are: {', '.join(tables())}")
        return names

    @field_validator("rows")
    @classmethod
    def _in_a_table(cls, rows: dict[str, list[int]], info: Any) -> dict[str, list[int]]:
        known = [row for name in info.data.get("tables", []) for row in tables()[name].rows]
        for row in rows:
            if known and row not in known:
                raise ValueError(f"none of the tables has a row '{row}'; known are: {', '.join(known)}")
        return rows

    def rows_of(self, table: str) -> Mapping[str, list[int]]:
        """Return the seeds of those rows that a table has."""
        return {row: seeds for row, seeds in self.rows.items() if row in tables()[table].rows}


def read_study(path: Path) -> Study:
    """Read a study and check it.

    Raises:
        ConfigError: with the file and the field.
    """
    raw = read_yaml(path)
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: a study is a YAML file with tables, settings and rows; this one is not")
    try:
        return Study(**raw)
    except (ValidationError, TypeError) as error:
        said = described(error) if isinstance(error, ValidationError) else str(error)
        raise ConfigError(f"{path}: {said}") from None
