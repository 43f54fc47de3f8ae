"""Options of a recipe on the command line: `--learner.inner_lr 0.4` or `--learner.inner_lr=0.4`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml

from metadropout.errors import ConfigError
from metadropout.registry import import_parts
from metadropout.safe_yaml import parse_text


def import_named_modules(arguments: Sequence[str]) -> list[str]:
    """Import the modules that `--import MODULE` names, which register parts of the user's own; return the rest."""
    rest, remaining = [], list(arguments)
    while remaining:
        argument = remaining.pop(0)
        name, equals, module = argument.partition("=")
        if name != "--import":
            rest.append(argument)
            continue
        if not equals and not remaining:
            raise ConfigError("--import needs the name of a module, or the path of a Python file")
        import_parts(module if equals else remaining.pop(0))
    return rest


def split_overrides(arguments: Sequence[str], *, several: bool = False) -> tuple[list[str], dict[str, Any]]:
    """Take the `--section.option value` pairs out of the arguments; return the rest and the pairs by dotted name.

    Args:
        arguments: the command line.
        several: whether an option takes all values that follow it, `--section.option value value`; its value is a list.
    """
    rest: list[str] = []
    overrides: dict[str, Any] = {}
    remaining = list(arguments)
    while remaining:
        argument = remaining.pop(0)
        name, equals, value = argument.removeprefix("--").partition("=")
        if not argument.startswith("--") or "." not in name:
            rest.append(argument)
            continue
        given = [value] if equals else []
        while remaining and not remaining[0].startswith("--") and not equals and (several or not given):
            given.append(remaining.pop(0))
        if not given:
            raise ConfigError(f"{argument} needs a value")
        try:
            values = [_value(text) for text in given]
            overrides[name] = values if several else values[0]
        except ConfigError as error:
            raise ConfigError(f"--{name}: {error}") from None
    return rest, overrides


def _value(text: str) -> Any:
    """Read lists and dictionaries, but leave numbers as text: the option's type decides what a class named 001 is."""
    if text in ("null", "None"):
        return None
    if not text.startswith(("[", "{")):
        return text
    try:
        return parse_text(text)
    except yaml.YAMLError:  # the name of a folder, say
        return text
