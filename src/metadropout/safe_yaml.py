"""The YAML of recipes and runs, read so that no file can do harm: plain values only, within limits."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from metadropout.errors import ConfigError, shortened
from metadropout.files import read_regular

MAX_BYTES = 2**20
MAX_NODES = 20_000
"""Values in a file, those behind an alias counted each time: more would take seconds to read, or fill the memory."""
MAX_DEPTH = 20


class _RefusedError(yaml.MarkedYAMLError):
    """Valid YAML that is not taken."""

    def __init__(self, problem: str, place: yaml.Event | yaml.Node) -> None:
        super().__init__(problem=problem, problem_mark=place.start_mark)  # type: ignore[arg-type]


class _Limited(yaml.BaseLoader):
    """Builds text, lists and dictionaries; refuses tags, repeated keys, and what is too deep or too much."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = self._nodes = 0
        self._sizes: dict[str | None, int] = {}
        """How many values stand behind an anchor, those behind aliases in it included."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        anchor = event.anchor if isinstance(event, yaml.NodeEvent) else None
        alias = isinstance(event, yaml.AliasEvent)
        if tag := getattr(event, "tag", None):
            raise _RefusedError(f"the tag '{shortened(tag)}' is not allowed: only plain values are", event)
        if isinstance(event, yaml.ScalarEvent) and any("\ud800" <= letter <= "\udfff" for letter in event.value):
            raise _RefusedError("half of a character (a surrogate) is no text", event)
        if alias and anchor in self.anchors and anchor not in self._sizes:
            raise _RefusedError("an alias stands for itself", event)
        before = self._nodes
        self._nodes += self._sizes.get(anchor, 0) if alias else 1
        self._depth += 1
        if self._nodes > MAX_NODES:
            raise _RefusedError(f"there are more than {MAX_NODES} values, aliases included", event)
        if self._depth > MAX_DEPTH:
            raise _RefusedError(f"values are nested more than {MAX_DEPTH} deep", event)
        node = super().compose_node(parent, index)
        self._depth -= 1
        if isinstance(node, yaml.MappingNode):
            _check_keys(node)
        self._sizes.setdefault(anchor, self._nodes - before)
        return node


class _Loader(_Limited, yaml.SafeLoader):
    """Builds numbers, truth values and null, too."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - filled below, as PyYAML wants it


# PyYAML's own, without dates, octal and base-60 numbers, which nobody means, and without numbers of endless length.
for _kind, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"yes|Yes|YES|no|No|NO|true|True|TRUE|false|False|FALSE|on|On|ON|off|Off|OFF", list("yYnNtTfFoO")),
    ("int", r"[-+]?(?:0|[1-9][0-9_]{0,29})", list("-+0123456789")),
    (
        "float",
        r"[-+]?(?:[0-9][0-9_]{0,29}\.[0-9_]{0,29}|\.[0-9][0-9_]{0,29})(?:[eE][-+][0-9]{1,4})?"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        list("-+0123456789."),
    ),
    ("merge", r"<<", ["<"]),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", re.compile(rf"(?:{_pattern})\Z"), _first)


def read_yaml(path: Path) -> Any:
    """Read a YAML file.

    Raises:
        ConfigError: if it cannot be read, is not YAML, or is not taken; names the file and the line.
    """
    try:
        text = read_regular(path, MAX_BYTES).decode("utf-8-sig")
        return yaml.load(text, Loader=_Loader)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not valid YAML: byte {error.start + 1} is not UTF-8 text") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}{_reason(error)}") from None


def parse_text(text: str) -> Any:
    """Read a value in YAML's notation; numbers and the like stay text.

    Raises:
        ConfigError: if it is valid YAML but is not taken.
        yaml.YAMLError: if it is not valid YAML.
    """
    try:
        return yaml.load(text, Loader=_Limited)
    except _RefusedError as error:
        raise ConfigError(str(error.problem)) from None


def _check_keys(node: yaml.MappingNode) -> None:
    known: dict[str, int] = {}
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode):
            raise _RefusedError("a key must be a plain word", key)
        if key.value in known:
            raise _RefusedError(
                f"the key '{shortened(key.value)}' is there twice: also in line {known[key.value]}", key
            )
        known[key.value] = key.start_mark.line + 1


def _reason(error: yaml.YAMLError) -> str:
    """Say where and why a text was not taken."""
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    where = f", line {mark.line + 1}: " if mark else ": "
    problem = " ".join(str(getattr(error, "problem", None) or error).split())
    return f"{where}{problem if isinstance(error, _RefusedError) else f'is not valid YAML: {problem}'}"
