"""Class names as labels of a picture: in a font that has their characters, or spelt out."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

_log = logging.getLogger(__name__)


class Labels(NamedTuple):
    """What to write, and with what."""

    texts: list[str]
    families: list[str]
    """Font families for matplotlib, which takes each character from the first one that has it."""


def drawable(names: Sequence[str]) -> Labels:
    r"""Return names as matplotlib can draw them.

    Characters that the default font lacks, such as Chinese ones, are taken from installed fonts that have them. Where
    none has, they are written as escapes (`\u732b`), which is said in a warning.
    """
    from matplotlib import font_manager, rcParams  # noqa: PLC0415 - an extra

    families = list(rcParams["font.family"])
    default = font_manager.get_font(font_manager.findfont(font_manager.FontProperties(family=families))).get_charmap()
    names = ["".join(" " if c.isspace() and c != "\n" else c for c in name) for name in names]
    characters = {c for name in names for c in name if c != "\n"}
    unprintable = {c for c in characters if not c.isprintable()}
    missing = {c for c in characters - unprintable if ord(c) not in default}
    for entry in sorted(font_manager.fontManager.ttflist, key=_preference) if missing else ():
        if entry.name in families or "Last Resort" in entry.name:  # which has a box for every character
            continue
        try:
            font = font_manager.get_font(entry.fname)
            found = {c for c in missing if ord(c) in font.get_charmap()} if font.scalable else set()
        except (OSError, RuntimeError):
            continue
        if found:
            families.append(entry.name)
            missing -= found
    if missing:
        shown = "".join(sorted(missing)[:20])
        _log.warning(
            "no installed font has the characters %s: they are drawn as codes; install Noto Sans CJK, say", shown
        )
    spelt = {c: c.encode("unicode_escape").decode() for c in missing | unprintable}
    return Labels(["".join(spelt.get(c, c) for c in name) for name in names], families)


def _preference(entry: Any) -> tuple[bool, bool, str]:
    """Regular faces without serifs first."""
    return "Sans" not in entry.name, entry.weight != 400, entry.name
