"""Recipes: how a run differs from the defaults, and why.

A YAML file of this folder is a family: settings (data, sizes) and rows (learner, perturbation). Each setting with each
row is a recipe, so that a family of rows is written once and not once per setting.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from metadropout.config import Config, load_config, parse_config
from metadropout.errors import ConfigError

FOLDER = Path(__file__).parent


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
    path = Path(name)
    if path.suffix in (".yaml", ".yml"):
        return load_config(path, overrides)
    try:
        return parse_config(recipe(name), overrides)
    except ConfigError as error:
        raise ConfigError(f"recipe '{name}': {error}" if name in _recipes() else str(error)) from None


@cache
def _recipes() -> dict[str, dict[str, Any]]:
    found = {}
    for path in sorted(FOLDER.glob("*.yaml")):
        family = yaml.safe_load(path.read_text(encoding="utf-8"))
        for setting_name, setting in family["settings"].items():
            for row_name, row in family["rows"].items():
                found[f"{setting_name}-{row_name}"] = _combine(setting_name, setting, row)
    return found


def _combine(setting_name: str, setting: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, Any]:
    combined: dict[str, Any] = {"description": f"{row['title']} on {setting['title']}"}
    special = row.get("only", {}).get(setting_name, {})
    for part in (setting, row, special):
        for section, options in part.items():
            if section not in ("title", "reported", "only"):
                combined[section] = {**combined.get(section, {}), **options}
    if (reported := row.get("reported", {}).get(setting_name)) is not None:
        combined["reported"] = dict(zip(("accuracy", "interval"), reported, strict=False))
    return combined
