"""Spoiling files: bytes anywhere, values anywhere in a tree of lists and dictionaries, texts within JSON."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from typing import Any

NUMBERS = (0, 1, -1, 2, 3, 7, 255, 2**31 - 1, 2**31, 2**53 + 1, 2**63 - 1, 2**63, -(2**63), 10**19, 10**300)
FLOATS = (0.0, -0.0, 0.5, 1.0, 1.5, -1.0, 5e-324, 1e-38, 3.5e38, 1e308, -1e308, float("nan"), float("inf"))
TEXTS = ("", " ", "\0", "a", "..", "../../etc/passwd", "/", "\n", "nan", "1", "true", "ß±日本", "\ud800", "x" * 5000)
ODD: tuple[Any, ...] = (*NUMBERS, *FLOATS, *TEXTS, None, True, False, [], {}, [[]], {"": None}, [None] * 50)

RAW = (
    "1e999",
    "-1e999",
    "NaN",
    "Infinity",
    "9" * 5000,
    "1" + "0" * 400,
    "0." + "1" * 3000,
    "[" * 3000 + "]" * 3000,
    '{"a":' * 3000 + "1" + "}" * 3000,
    '"\\ud800"',
    '"\\u0000"',
    "{}",
    "[]",
    "null",
    "",
    ",",
    "\x00",
)
"""What no writer of JSON writes, to stand in the place of a value."""


def spoil_bytes(rng: random.Random, content: bytes, others: Sequence[bytes], words: Sequence[bytes] = ()) -> bytes:
    """Change, drop, repeat, move or insert bytes in a few places, or join two files."""
    spoilt = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        at = rng.randrange(len(spoilt) + 1)
        length = min(len(spoilt) - at, rng.choice((1, 1, 2, 4, 8, 64, 1000)))
        what = rng.randrange(9 if words else 8)
        if what == 0 and at < len(spoilt):
            spoilt[at] ^= 1 << rng.randrange(8)
        elif what == 1 and at < len(spoilt):
            spoilt[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        elif what == 2:
            del spoilt[at : at + length]
        elif what == 3:
            spoilt[at:at] = spoilt[at : at + length] * rng.choice((1, 1, 2, 100))
        elif what == 4:
            spoilt[at:at] = rng.randbytes(length or 1)
        elif what == 5:
            del spoilt[at:]
        elif what == 6:
            value = rng.choice(NUMBERS) % 2**64
            spoilt[at : at + 8] = value.to_bytes(8, rng.choice(("little", "big")))[-length or 1 :]
        elif what == 7 and others:
            other = rng.choice(others)
            spoilt[at:] = other[rng.randrange(len(other) + 1) :]
        elif what == 8:
            spoilt[at:at] = rng.choice(words)
    return bytes(spoilt)


def spoil_tree(rng: random.Random, tree: Any, odd: Sequence[Any] = ODD) -> Any:
    """Return a copy of lists and dictionaries with a few values changed, dropped, repeated, renamed or moved."""
    holder = [_copied(tree)]
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        places = list(_places(holder))
        parent, key = rng.choice(places)
        what = rng.randrange(7)
        if what <= 2:
            parent[key] = _copied(rng.choice(odd))
        elif what == 3 and len(places) > 1:
            other, at = rng.choice(places)
            parent[key] = _copied(other[at])
        elif what == 4 and parent is not holder:
            del parent[key]
        elif what == 5 and isinstance(parent, dict):
            parent[rng.choice((str(rng.choice(odd)), f"{key} ", str(key).upper()))] = parent.pop(key)
        elif what == 6 and isinstance(value := parent[key], int | float) and abs(value) < 1e300:
            parent[key] = rng.choice((-value, value + 1, value * 1000, value / 3, str(value), [value]))
        elif what == 6 and isinstance(value, list):
            parent[key] = value * rng.choice((0, 2, 30))
    return holder[0]


def spoil_json(rng: random.Random, tree: Any) -> str:
    """Return a spoilt tree as JSON, in whose text a value may be something that no writer would write."""
    text = json.dumps(spoil_tree(rng, tree))
    if rng.random() < 0.2:
        values = list(re.finditer(r'"(?:[^"\\]|\\.)*"|-?[0-9][0-9.eE+-]*|true|false|null', text))
        if values:
            start, end = rng.choice(values).span()
            text = text[:start] + rng.choice(RAW) + text[end:]
    return text


def _places(tree: Any) -> list[tuple[Any, Any]]:
    """Return where each value is: in which list or dictionary, and at which place."""
    found: list[tuple[Any, Any]] = []
    pending = [tree]
    while pending:
        parent = pending.pop()
        keys = parent.keys() if isinstance(parent, dict) else range(len(parent))
        for key in list(keys)[:60]:
            found.append((parent, key))
            if isinstance(parent[key], list | dict):
                pending.append(parent[key])
    return found


def _copied(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _copied(value) for key, value in tree.items()}
    return [_copied(value) for value in tree] if isinstance(tree, list | tuple) else tree
