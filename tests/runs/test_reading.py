"""Files beside a run's checkpoints may be damaged; that is said with the file, the field and the fix."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import TypeAdapter

from metadropout.errors import RunFileError
from metadropout.runs.reading import read_checked, set_aside

NUMBERS = TypeAdapter(dict[str, list[int]])


def test_what_is_wrong_with_a_file_is_said_with_its_place_and_the_fix(tmp_path: Path) -> None:
    path = tmp_path / "numbers.json"
    path.write_text('{"a": [1, 2]}')
    assert read_checked(path, NUMBERS, "delete it") == {"a": [1, 2]}
    path.write_text('{"a": [1, "two"]}')
    with pytest.raises(
        RunFileError, match=r"numbers\.json: is damaged: a\.1: input should be a valid integer.*; delete it$"
    ):
        read_checked(path, NUMBERS, "delete it")
    with pytest.raises(RunFileError, match=r"none\.json: cannot be read: No such file or directory; make it$"):
        read_checked(tmp_path / "none.json", NUMBERS, "make it")


def test_a_damaged_file_is_kept_under_another_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text in "ab":
        (tmp_path / "metrics.jsonl").write_text(text)
        set_aside(tmp_path / "metrics.jsonl")
    found = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert found == {"metrics.jsonl.damaged": "a", "metrics.jsonl.damaged-2": "b"}
    assert "it is kept as metrics.jsonl.damaged-2, and a new one is begun" in capsys.readouterr().err
