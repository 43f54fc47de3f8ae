"""Progress: bars that fit the terminal, and a line now and then where there is none."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from metadropout.cli import progress

NAME = "omniglot-20way-1shot-metadropout-seed0"


def shown(display: progress._Display) -> list[str]:
    """What a display shows at the moment, line by line."""
    bars = display._progress
    with bars.console.capture() as capture:
        bars.console.print(bars.get_renderable())
    return capture.get().splitlines()


@pytest.fixture(params=[40, 60, 80, 132])
def width(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """The width of a terminal on which the displays under test are shown."""

    def terminal(**_: object) -> Console:
        return Console(file=io.StringIO(), width=request.param, force_terminal=True, color_system=None)

    monkeypatch.setattr(progress, "Console", terminal)
    clock = iter(range(0, 10**9, 9))
    monkeypatch.setattr(progress.time, "monotonic", lambda: float(next(clock)))
    return int(request.param)


def test_training_shows_bar_and_numbers_at_any_width(width: int) -> None:
    display = progress.TrainingDisplay(NAME, 40_000, 8)
    for iteration in (1, 2, 20_000):
        display.on_iteration(iteration, 1.25, 0.5)
    upper, lower = shown(display)
    assert len(upper) <= width
    assert "-seed0 " in upper or "…" in upper
    assert "━" in upper
    assert "20000/40000 left " in upper
    assert lower.rstrip() == "loss 1.250  accuracy 50.0 %  0.4 tasks/s"


def test_counts_and_runs_show_bar_and_numbers_at_any_width(width: int) -> None:
    count = progress.CountDisplay(f"evaluating {NAME}", 1000)
    for _ in range(500):
        count.advance()
    (line,) = shown(count)
    assert "━" in line
    assert line.rstrip().endswith("500/1000 left 01:15:00")
    runs = progress.RunsDisplay(30, 1000, 0)
    runs.update(15, 500)
    first, second = shown(runs)
    assert "━" in first
    assert "15/30" in first
    assert "500/1000 left " in second
    assert max(map(len, (line, first, second))) <= width


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
