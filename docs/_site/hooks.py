"""What the site adds to the pages: a reference of every public name, and links that lead out of docs/ as plain text."""

from __future__ import annotations

import inspect
import re
from collections import defaultdict
from typing import Any

from mkdocs.structure.files import File, Files

import metadropout as md

PAGES = {
    "training": "Fit, evaluate, load",
    "learners": "Classes of learners",
    "perturbations": "Classes of perturbations",
    "networks": "Networks",
    "data": "Images and episodes",
    "noise": "Noise",
    "registry": "Registering parts",
    "errors": "Errors",
}
"""Titles of the reference's pages, by the package that a name comes from."""

OUTWARD = re.compile(r"\[([^\]]+)\]\((?:\.\./)+(?!\.)[^)]*\)")


def reference() -> dict[str, str]:
    """Return the text of each page of the reference, by path: one for each package with public names."""
    names: dict[str, list[str]] = defaultdict(list)
    for name in md.__all__:
        value = getattr(md, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            names[value.__module__.split(".")[1]].append(f"{value.__module__}.{value.__qualname__}")
    order = [*(package for package in PAGES if package in names), *sorted(names.keys() - PAGES.keys())]
    return {
        f"reference/{package}.md": f"# {PAGES.get(package, package.capitalize())}\n\n"
        + "\n\n".join(f"::: {path}" for path in names[package])
        + "\n"
        for package in order
    }


def on_config(config: Any) -> Any:
    """Put the reference's pages into the menu."""
    config.nav.append({"Reference": list(reference())})
    return config


def on_files(files: Files, config: Any) -> Files:
    """Make the reference's pages."""
    for path, text in reference().items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Show links to files that are not a part of the site as the names that they are."""
    return OUTWARD.sub(r"\1", markdown) if page.file.src_uri.count("/") == 0 else markdown
