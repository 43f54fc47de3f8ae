"""Options of a recipe on the command line: `--learner.inner_lr 0.4` or `--learner.inner_lr=0.4`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml

from metadropout.errors import ConfigError


def parse_overrides(arguments: Sequence[str]) -> dict[str, Any]:
    """Turn `--section.option value` pairs into a dictionary by dotted name."""
    overrides: dict[str, Any] = {}
    remaining = list(arguments)
    while remaining:
        argument = remaining.pop(0)
        name, equals, value = argument.removeprefix("--").partition("=")
        if not argument.startswith("--") or not name:
            raise ConfigError(f"'{argument}' is not understood; options look like --learner.inner_lr 0.4")
        if not equals:
            if not remaining or remaining[0].startswith("--"):
                raise ConfigError(f"{argument} needs a value")
            value = remaining.pop(0)
        overrides[name] = _value(value)
    return overrides


def _value(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text
