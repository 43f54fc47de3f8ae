"""`metadropout options`: everything that a recipe or the command line can set.

The options come from the parts' signatures and docstrings. As reading those means loading PyTorch, what is shipped is
kept beside this file, as text, and a test compares the two; `python -m metadropout.cli.options` rewrites it.
"""

from __future__ import annotations

import argparse
import inspect
import json
import re
import shutil
import textwrap
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from metadropout import registry
from metadropout.files import write_atomically

SHIPPED = Path(__file__).with_name("options.json")
SECTIONS = ("data", "network", "perturbation", "learner", "episode", "training", "machine")


def register(parser: argparse.ArgumentParser) -> None:
    """Give the command's parser its arguments."""
    parser.description = "Lists everything that a recipe or the command line can set, with its default."
    parser.add_argument("section", nargs="?", choices=SECTIONS, help="show this section only")
    parser.set_defaults(run=run_command)


def run_command(namespace: argparse.Namespace) -> int:
    """Print the options."""
    described: Mapping[str, list[str]] = json.loads(SHIPPED.read_text(encoding="utf-8"))
    if registry.imported:  # parts of the user's own have options, too
        described = describe()
    width = shutil.get_terminal_size().columns
    for section, lines in described.items():
        if namespace.section in (None, section):
            for line in lines:
                indent = " " * (len(line) - len(line.lstrip()) + 4)
                print(textwrap.fill(line, width, subsequent_indent=indent) if line else "")
    return 0


def describe() -> dict[str, list[str]]:
    """Return the lines that describe the options of each section, from the parts themselves."""
    return {section: list(_lines(section)) for section in SECTIONS}


def _lines(section: str) -> Iterator[str]:
    from metadropout.config import AXES, DEFAULT_PARTS, FROM_DATA, PLAIN_SECTIONS  # noqa: PLC0415 (loads PyTorch)
    from metadropout.options import options_of  # noqa: PLC0415

    named: Mapping[str, Callable[..., Any]] = AXES.get(section) or {"": PLAIN_SECTIONS[section]}
    yield f"{section}:"
    for name, part in named.items():
        if name:
            default = " (default)" if DEFAULT_PARTS[section] == name else ""
            yield f"  --{section}.name {name}{default}: {_first_sentence(part)}"
        for option in options_of(part):
            if option.name not in FROM_DATA.get(section, ()):
                limits = f" {option.limits}" if option.limits else ""
                setting = f"--{section}.{option.name} {_type(option)}{limits} (default: {_default(option)})"
                yield f"      {setting}: {option.help}"
    yield ""


def _first_sentence(part: Any) -> str:
    return (inspect.getdoc(part) or "").split("\n\n")[0].replace("\n", " ")


def _type(option: Any) -> str:
    if typing.get_origin(option.type) is typing.Literal:
        return "|".join(map(str, typing.get_args(option.type)))
    text = option.type.__name__ if isinstance(option.type, type) else str(option.type)
    text = text.replace("collections.abc.", "").replace("typing.", "")
    return re.sub(r"^Optional\[(.*)\]$", r"\1 | None", text)


def _default(option: Any) -> str:
    return "required" if option.default is inspect.Parameter.empty else str(option.default)


if __name__ == "__main__":
    write_atomically(SHIPPED, json.dumps(describe(), indent=1, ensure_ascii=False) + "\n")
