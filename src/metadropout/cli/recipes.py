"""`metadropout recipes`: what there is to run."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch

import yaml
from rich.console import Console
from rich.table import Table

from metadropout import recipes
from metadropout.errors import ConfigError
from metadropout.recipes import recipe, recipe_names

EPILOG = """\
  metadropout recipes                          the settings and rows that recipes are made of
  metadropout recipes glyphs                   the recipes with this word, or with all of several words
  metadropout recipes 'omniglot-*-maml'        the recipes of this pattern; '*' lists all
  metadropout recipes glyphs-5way-1shot-maml   what is in one
"""


def register(parser: argparse.ArgumentParser) -> None:
    """Give the command's parser its arguments."""
    parser.description = __doc__
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("words", nargs="*", metavar="WORD", help="a recipe's name, or what to look for")
    parser.set_defaults(run=run_command)


def run_command(namespace: argparse.Namespace) -> int:
    """Print an overview, the recipes that were looked for, or one recipe."""
    words: list[str] = namespace.words
    if not words:
        for line in overview():
            print(line)
    elif words[0] in recipe_names() and len(words) == 1:
        text = yaml.safe_dump(recipe(words[0]), sort_keys=False, allow_unicode=True)
        print(f"# metadropout train {words[0]} --out runs/{words[0]}\n{text}", end="")
    else:
        _print_list(_found(words))
    return 0


def overview() -> Iterator[str]:
    """Yield the lines that say which settings and rows there are, and how they make recipes."""
    yield "A recipe is a setting and a row, SETTING-ROW. One that needs no download:"
    yield "  metadropout train glyphs-5way-1shot-metadropout --out runs/first"
    for group in groups():
        yield "\nsettings"
        yield from _aligned({name: title for table in group for name, title in table.settings.items()})
        shown: set[str] = set()
        for table in group:
            if rows := {name: title for name, title in table.rows.items() if name not in shown}:
                yield f"rows: {[other.title for other in group if other.rows == table.rows][-1]}"
                yield from _aligned(rows)
                shown |= rows.keys()
    yield "\nmetadropout recipes WORD ... lists the recipes with these words, metadropout recipes NAME prints one."


def groups() -> list[list[recipes.Table]]:
    """Return the families in groups: within one, every setting goes with every row."""
    found: list[list[recipes.Table]] = []
    for table in recipes.tables().values():
        near = [group for group in found if any(table.settings.keys() & other.settings for other in group)]
        place = found.index(near[0]) if near else len(found)
        found = [group for group in found if group not in near]
        found.insert(place, [*(other for group in near for other in group), table])
    return found


def _aligned(texts: dict[str, str]) -> Iterator[str]:
    for name, text in texts.items():
        yield f"  {name:<30} {text}"


def _found(words: Sequence[str]) -> list[str]:
    """Return the names of the recipes in whose name or description all words occur; a word may be a pattern."""
    found = [name for name in recipe_names() if all(_fits(name, word) for word in words)]
    if found:
        return found
    if len(words) == 1 and not _is_pattern(words[0]):
        recipe(words[0])  # raises the error that names the closest
    raise ConfigError(f"no recipe fits '{' '.join(words)}' ('metadropout recipes' shows what there is)")


def _fits(name: str, word: str) -> bool:
    if _is_pattern(word):
        return fnmatch(name, word)
    return word.lower() in f"{name} {recipe(name)['description']}".lower()


def _is_pattern(word: str) -> bool:
    return bool(set("*?[") & set(word))


def _print_list(names: Sequence[str]) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for title in ("recipe", "what it is", "reported, %"):
        table.add_column(title, no_wrap=title == "recipe")
    for name in names:
        described = recipe(name)
        reported = " ± ".join(f"{value:.2f}" for value in described.get("reported", {}).values())
        table.add_row(name, described["description"], reported)
    # A pipe has no width of its own: do not cut names for it.
    console = Console()
    Console(width=None if console.is_terminal else 160).print(table)
