"""Progress where there is no terminal: a line now and then."""

from __future__ import annotations

import pytest

from metadropout.cli import progress


def test_a_count_is_told_now_and_then_with_the_time_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter([0.0, 10.0, 31.0, 40.0, 100_000.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    with progress.CountDisplay("evaluating first", 5) as display:
        for _ in range(4):
            display.advance()
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["evaluating first: 2/5  left 00:00:46", "evaluating first: 4/5  left 06:56:40"]


def test_other_processes_are_quiet(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", -1.0)
    with progress.CountDisplay("evaluating", 2, quiet=True) as display:
        display.advance()
    assert capsys.readouterr().err == ""


def test_several_runs_are_told_now_and_then_with_the_time_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter([0.0, 10.0, 31.0, 61.0, 62.5])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    with progress.RunsDisplay(3, 3000, done=1000) as display:
        for runs, iterations in ((1, 1000), (1, 1000), (1, 1100), (2, 2000)):
            display.update(runs, iterations)
    # Half of the 2000 iterations that are left at the start take a minute, so that the others will, too.
    assert capsys.readouterr().err.splitlines() == [
        "runs 1/3  iterations 1000/3000",
        "runs 2/3  iterations 2000/3000  left 00:01:02",
    ]
