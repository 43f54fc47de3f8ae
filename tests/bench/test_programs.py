"""The programs that measure one thing each: the documentation names those that exist, and they explain themselves."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAMS = (
    "episodes",
    "folders",
    "memory",
    "page",
    "precisions",
    "processes",
    "scaling",
    "versions",
    "where_time_goes",
)


def test_the_documentation_names_programs_that_exist() -> None:
    texts = [path.read_text() for path in (*ROOT.glob("docs/*.md"), ROOT / "CONTRIBUTING.md")]
    assert {name for text in texts for name in re.findall(r"metadropout\.bench\.(\w+)", text)} == {*PROGRAMS}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_explains_itself(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    monkeypatch.delitem(sys.modules, f"metadropout.bench.{name}", raising=False)  # another test may have loaded it
    with pytest.raises(SystemExit, match="0"):
        runpy.run_module(f"metadropout.bench.{name}", run_name="__main__")
    assert f"python -m metadropout.bench.{name}" in capsys.readouterr().out
