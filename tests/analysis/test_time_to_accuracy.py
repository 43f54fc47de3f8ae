"""How long a run took to an accuracy, by its metrics."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from metadropout.cli import main


@pytest.fixture
def run(recipe: Path, tmp_path: Path) -> Path:
    """A run with metrics that are made up."""
    folder = tmp_path / "run"
    options = ["--training.iterations", "1", "--training.validate_every", "50", "--training.meta_batch", "4"]
    assert main(["train", str(recipe), "--out", str(folder), *options]) == 0
    training = [
        {"kind": "training", "iteration": i, "loss": 1.0, "accuracy": 0.5, "seconds": i, "tasks_per_second": speed}
        for i, speed in ((50, 2.0), (100, 8.0), (150, 8.0))
    ]
    validation = [
        {"kind": "validation", "iteration": i, "accuracy": accuracy, "interval": 0.01}
        for i, accuracy in ((50, 0.5), (100, 0.901), (150, 0.89))
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in training + validation))
    return folder


def test_the_first_validation_that_reaches_it_counts(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "accuracy", str(run), "--markdown", "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert "| run | 0.500 | 100 iterations, 50 s | not in 150 iterations |" in printed
    (written,) = (tmp_path / "out").glob("*.json")
    assert json.loads(written.read_text())["runs"][0]["reached"] == {"90.0": 100, "95.0": None}


def test_what_cannot_be_told_is_said(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "metrics.jsonl").unlink()
    for arguments, said in (
        ([str(run)], "has no validation in its metrics yet"),
        ([str(run), "--reach", "900"], "--reach is 900"),
        ([], "bench accuracy needs a run"),
    ):
        assert main(["bench", "accuracy", *arguments]) == 1
        assert said in capsys.readouterr().err
