"""Recipes: how a run differs from the defaults, and why.

A YAML file of this folder is a family: settings (data, sizes) and rows (learner, perturbation). Each setting with each
row is a recipe, so that a family of rows is written once and not once per setting. A family may take its settings from
others (`settings_of`), and is a table whose rows are printed in a given `order`, in groups where the rows are not all
of one protocol. A family that is `part_of` another has its settings, and rows for its table. Sections that a row
`replaces` are not taken from the setting: an inner_lr means nothing to a learner without inner steps.
Its `source` says who reports its figures. A setting or a row for which nobody reports any may be `like` one that has
some.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from metadropout.errors import ConfigError
from metadropout.safe_yaml import read_yaml

if TYPE_CHECKING:
    from metadropout.config import Config

FOLDER = Path(__file__).parent

FIRST = ("small", "table1", "table2", "table3", "robustness")
"""The families that most users look for, in that order; the others follow by name."""


@dataclass(frozen=True)
class Table:
    """A family of recipes, in the order in which its rows are printed."""

    title: str
    settings: dict[str, str]
    """What each setting is, by its name."""
    rows: dict[str, str]
    """What each row is, by its name; the recipe of a row in a setting is called SETTING-ROW."""
    like: dict[str, str] = field(default_factory=dict)
    """Whose reported figures a setting or a row is held against, where it has none of its own."""
    groups: dict[str, list[str]] = field(default_factory=dict)
    """The rows of each protocol by its name, where they are not all of one."""

    def rows_of(self, asked: Sequence[str]) -> list[str]:
        """Return the rows that are meant by names of rows and of groups, each once."""
        return list(dict.fromkeys(row for name in asked for row in self.groups.get(name, [name])))


def recipe_names() -> list[str]:
    """List the names of all shipped recipes."""
    return list(_recipes())


def recipe(name: str) -> dict[str, Any]:
    """Return a shipped recipe's differences from the defaults."""
    if name not in _recipes():
        close = difflib.get_close_matches(name, recipe_names(), n=3, cutoff=0.4)
        hint = f"; did you mean {' or '.join(close)}?" if close else ""
        raise ConfigError(f"there is no recipe '{name}'{hint} ('metadropout recipes' lists them)")
    return _recipes()[name]


def load_recipe(name: str, overrides: Mapping[str, Any] | None = None) -> Config:
    """Load a shipped recipe by its name, or one of the user's own by its path, and check it."""
    from metadropout.config import load_config, parse_config  # noqa: PLC0415 (loads PyTorch, which listing does not)

    path = Path(name)
    if path.suffix in (".yaml", ".yml"):
        return load_config(path, overrides)
    try:
        return parse_config(recipe(name), overrides)
    except ConfigError as error:
        raise ConfigError(f"recipe '{name}': {error}" if name in _recipes() else str(error)) from None


@cache
def tables() -> dict[str, Table]:
    """Return all tables by name."""
    rows = {name: row for family in _families().values() for name, row in family.get("rows", {}).items()}
    found = {}
    for name, family in _families().items():
        if "part_of" in family:
            continue
        order, settings = family.get("order", list(family.get("rows", {}))), _settings(name)
        groups = order if isinstance(order, dict) else {}
        shown = [row for group in groups.values() for row in group] if groups else order
        found[name] = Table(
            family["title"],
            {setting: options["title"] for setting, options in settings.items()},
            {row: rows[row]["title"] for row in shown},
            {each: options["like"] for each, options in (settings | rows).items() if "like" in options},
            groups,
        )
    return found


@cache
def sources() -> dict[str, str]:
    """Return who reports a figure, by the name of the recipe that has it."""
    return {
        f"{setting}-{name}": family["source"]
        for family in _families().values()
        for name, row in family.get("rows", {}).items()
        for setting in row.get("reported", {})
    }


@cache
def _families() -> dict[str, dict[str, Any]]:
    paths = {path.stem: path for path in sorted(FOLDER.glob("*.yaml"))}
    return {name: read_yaml(paths[name]) for name in sorted(paths, key=lambda name: (*FIRST, name).index(name))}


def _settings(family: str) -> dict[str, Any]:
    """Return a family's settings: its own, and those of the families it names."""
    found = _families()[family]
    settings = dict(found.get("settings", {}))
    for other in (*found.get("settings_of", []), *filter(None, [found.get("part_of")])):
        settings |= _settings(other)
    return settings


@cache
def _recipes() -> dict[str, dict[str, Any]]:
    families = _families()
    settings = {name: setting for family in families for name, setting in _settings(family).items()}
    return {
        f"{setting_name}-{row_name}": _combine(setting_name, setting, row)
        for setting_name, setting in settings.items()
        for name, family in families.items()
        if setting_name in _settings(name)
        for row_name, row in family.get("rows", {}).items()
    }


def _combine(setting_name: str, setting: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, Any]:
    combined: dict[str, Any] = {"description": f"{row['title']} on {setting['title']}"}
    special = row.get("only", {}).get(setting_name, {})
    kept = {section: options for section, options in setting.items() if section not in row.get("replaces", [])}
    for part in (kept, row, special):
        for section, options in part.items():
            if section not in ("title", "like", "reported", "only", "replaces"):
                combined[section] = {**combined.get(section, {}), **options}
    if (reported := row.get("reported", {}).get(setting_name)) is not None:
        combined["reported"] = dict(zip(("accuracy", "interval"), reported, strict=False))
    return combined
