"""The page of the documentation that lists all parts, made from their titles, citations and docstrings.

`python -m metadropout.cli.members docs/members.md` writes it; a test compares it with the parts.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from metadropout.config import AXES
from metadropout.data.dataset import DataSet
from metadropout.files import write_atomically

HEAD = """\
# All learners, perturbations, networks and data sets

A run is one of each. The names in the first column are those of recipes and of the command line
(`--learner.name metasgd`), the second says what they are in Python, after `import metadropout as md`.
`metadropout options` lists the options of each. This page is made from the classes themselves
(`python -m metadropout.cli.members docs/members.md`).
"""

TITLES = {
    "learner": "Learners: how weights are adapted to a task",
    "perturbation": "Perturbations: what happens to the network on support images",
    "network": "Networks",
    "data": "Data sets",
}


def page() -> str:
    """Return the page as Markdown."""
    return HEAD + "".join(line + "\n" for axis in TITLES for line in _section(axis))


def _section(axis: str) -> Iterator[str]:
    yield from (
        "",
        f"## {TITLES[axis]}",
        "",
        "| name | in Python | called | by | what it is |",
        "|---|---|---|---|---|",
    )
    for name, part in AXES[axis].items():
        python = f'md.open_dataset("{name}")' if isinstance(part, DataSet) else f"md.{part.__name__}"
        about: Any = part
        yield f"| `{name}` | `{python}` | {about.title} | {about.citation} | {first_sentence(part)} |"


def first_sentence(part: Any) -> str:
    """Return the first sentence of a part's docstring, without the citation, which has a column of its own."""
    text = (inspect.getdoc(part) or "").split("\n\n")[0].replace("\n", " ")
    without = re.sub(r"\s*\((?:[^()]*;\s)?[^()]*\b(?:\d{4}|table \d)[^()]*\)", "", text)
    return without.replace("|", "\\|")


if __name__ == "__main__":
    write_atomically(Path(sys.argv[1]), page())
