"""`metadropout recipes`: what there is to run."""

from __future__ import annotations

import argparse
from fnmatch import fnmatch
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from metadropout.errors import ConfigError
from metadropout.recipes import load_recipe, recipe, recipe_names


def register(commands: Any) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser("recipes", help="list the recipes, or show one", description=__doc__)
    parser.add_argument("recipe", nargs="?", help="show this recipe, or list those that fit a pattern: 'omniglot-*'")
    parser.set_defaults(run=run_command)


def run_command(namespace: argparse.Namespace) -> int:
    """Print the list or one recipe."""
    wanted = namespace.recipe or "*"
    if not set("*?[") & set(wanted):
        text = yaml.safe_dump(recipe(wanted), sort_keys=False, allow_unicode=True)
        print(f"# metadropout train {wanted} --out runs/{wanted}\n{text}", end="")
        return 0
    names = [name for name in recipe_names() if fnmatch(name, wanted)]
    if not names:
        raise ConfigError(f"no recipe fits '{wanted}' ('metadropout recipes' lists them)")
    table = Table(box=None, padding=(0, 2, 0, 0))
    for title in ("recipe", "what it is", "reported, %"):
        table.add_column(title, no_wrap=title == "recipe")
    for name in names:
        config = load_recipe(name)
        table.add_row(name, config.description, " ± ".join(f"{v:.2f}" for v in config.reported.values()))
    # A pipe has no width of its own: do not cut names for it.
    console = Console()
    Console(width=None if console.is_terminal else 160).print(table)
    return 0
