"""Numbers among a command's arguments, held to the limits of their kind like the options of a recipe."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

from metadropout.options import check_value


def add_number(parser: argparse.ArgumentParser, name: str, kind: Any, **settings: Any) -> None:
    """Add an argument that takes one number or several.

    Args:
        parser: the command's.
        name: of the argument, such as "--episodes".
        kind: its type with its limits, such as `Annotated[int, Limits(1, 100)]`.
        **settings: those of `add_argument`.
    """
    parser.add_argument(name, type=partial(check_value, name, kind), **settings)
