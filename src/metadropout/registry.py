"""Parts by the names that recipes use: those of the library, and those that a user's own module adds.

    @md.register("network", "my-net")
    class MyNet(nn.Module):
        def __init__(self, way: int, *, in_channels: int, image_size: int, width: int = 8) -> None: ...

    metadropout train recipe.yaml --out runs/a --import my_module --network.name my-net --network.width 16

A module is imported because the user names it on the command line, never because a run's folder or a recipe says so.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from metadropout.errors import ConfigError

T = TypeVar("T", bound=Callable[..., Any])

AXES = {
    "data": "metadropout.data",
    "network": "metadropout.networks",
    "perturbation": "metadropout.perturbations",
    "learner": "metadropout.learners",
}
"""Where the parts of each axis are."""


class Registry(dict[str, Any]):
    """The parts of one axis by name, in the order in which they are listed."""

    def __init__(self, axis: str, parts: dict[str, Any]) -> None:
        super().__init__(parts)
        self.axis = axis
        REGISTRIES[axis] = self


REGISTRIES: dict[str, Registry] = {}

imported: list[str] = []
"""The user's modules, as they were named, for messages and for processes that are started from here."""


def title_of(axis: str, name: str) -> str:
    """Return what a part is called in reports: its own `title`, if it has one, or its name in recipes."""
    own = getattr(REGISTRIES[axis].get(name), "__dict__", {})  # a base class's title would name another part
    return str(own.get("title") or name)


def register(axis: str, name: str) -> Callable[[T], T]:
    """Return a decorator that adds a class or function to an axis, under the name that recipes use.

    Args:
        axis: "data", "network", "perturbation" or "learner".
        name: lower-case letters, digits and dashes.
    """
    if axis not in AXES:
        raise ValueError(f"'{axis}' is not an axis; use one of {', '.join(AXES)}")
    if not re.fullmatch(r"[a-z0-9][a-z0-9_-]*", name) or name == "custom":
        raise ValueError(
            f"'{name}' cannot be the name of a part: use lower-case letters, digits and dashes, not 'custom'"
        )

    def add(part: T) -> T:
        importlib.import_module(AXES[axis])  # so that the library's own parts are there
        registry = REGISTRIES[axis]
        before = registry.get(name)
        same = before is not None and (before.__module__, before.__qualname__) == (part.__module__, part.__qualname__)
        if before is not None and not same:
            raise ValueError(f"there is a {axis} '{name}' already: {before.__module__}.{before.__qualname__}")
        registry[name] = part
        return part

    return add


def import_parts(module: str) -> None:
    """Import a user's module, so that its decorators register its parts.

    Args:
        module: a module's name, looked for in the present folder, too, or the path of a Python file.

    Raises:
        ConfigError: if there is no such module, or it fails.
    """
    if module in imported:
        return
    try:
        if module.endswith(".py"):
            _import_file(Path(module))
        else:
            sys.path.insert(0, os.getcwd())
            try:
                importlib.import_module(module)
            finally:
                sys.path.remove(os.getcwd())
    except Exception as error:  # whatever the user's code does
        raise ConfigError(f"--import {module}: {type(error).__name__}: {error}") from error
    imported.append(module)


def _import_file(path: Path) -> None:
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # for what looks classes up by their module
    spec.loader.exec_module(module)
