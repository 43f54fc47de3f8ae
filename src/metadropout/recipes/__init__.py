"""Recipes: YAML files that say how a run differs from the defaults, and why."""

from __future__ import annotations

import difflib
from pathlib import Path

from metadropout.errors import ConfigError

FOLDER = Path(__file__).parent


def recipe_names() -> list[str]:
    """List the names of all shipped recipes."""
    return sorted(path.stem for path in FOLDER.rglob("*.yaml"))


def find_recipe(name: str) -> Path:
    """Return the file of a shipped recipe, or of a recipe of the user's own given by its path."""
    for path in FOLDER.rglob("*.yaml"):
        if path.stem == name:
            return path
    own = Path(name)
    if own.suffix in (".yaml", ".yml") or own.exists():
        return own
    close = difflib.get_close_matches(name, recipe_names(), n=3, cutoff=0.4)
    hint = f"; did you mean {' or '.join(close)}?" if close else ""
    raise ConfigError(f"there is no recipe '{name}'{hint} ('metadropout recipes' lists them)")
