"""`metadropout options`: everything that a recipe or the command line can set."""

from __future__ import annotations

import argparse
import inspect
import re
import textwrap
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rich.console import Console

from metadropout.config import AXES, DEFAULT_PARTS, FROM_DATA, PLAIN_SECTIONS
from metadropout.options import Option, options_of


def register(commands: Any) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser("options", help="list every option of a recipe", description=__doc__)
    parser.add_argument("section", nargs="?", choices=[*AXES, *PLAIN_SECTIONS], help="show this section only")
    parser.set_defaults(run=run_command)


def run_command(namespace: argparse.Namespace) -> int:
    """Print the options."""
    width = Console().width
    for line in describe(namespace.section):
        indent = " " * (len(line) - len(line.lstrip()) + 4)
        print(textwrap.fill(line, width, subsequent_indent=indent) if line else "")
    return 0


def describe(only: str | None = None) -> Iterator[str]:
    """Yield the lines of the description of all sections, or of one."""
    for section in (*AXES, *PLAIN_SECTIONS):
        if only not in (None, section):
            continue
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


def _type(option: Option) -> str:
    if typing.get_origin(option.type) is typing.Literal:
        return "|".join(map(str, typing.get_args(option.type)))
    text = option.type.__name__ if isinstance(option.type, type) else str(option.type)
    text = text.replace("collections.abc.", "").replace("typing.", "")
    return re.sub(r"^Optional\[(.*)\]$", r"\1 | None", text)


def _default(option: Option) -> str:
    return "required" if option.default is inspect.Parameter.empty else str(option.default)
