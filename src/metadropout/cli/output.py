"""Output that reaches every terminal: what its encoding lacks is written in plain letters, never an error."""

from __future__ import annotations

import codecs
import io
import sys

PLAIN = {"±": "+-", "−": "-", "–": "-", "×": "x", "…": "...", "ε": "eps", "ℓ": "l", "∞": "inf", "²": "2", "γ": "gamma"}


def lenient_output() -> None:
    """Let printing not fail on characters that the output's encoding does not have: it comes after all the work."""
    codecs.register_error("metadropout", _in_plain_letters)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="metadropout")


def _in_plain_letters(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(PLAIN.get(character, "?") for character in error.object[error.start : error.end]), error.end
