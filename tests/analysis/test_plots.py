"""Pictures of runs: what is smoothed says so, nothing is covered, and differences are drawn task by task."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from metadropout.analysis import plots
from metadropout.evaluation import Evaluation
from metadropout.recipes import load_recipe
from metadropout.runs.folder import Run

pytest.importorskip("matplotlib")


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that are saved."""
    figures: list[Any] = []
    monkeypatch.setattr(plots, "save_figure", lambda figure, path: figures.append(figure))
    return figures


def logged(folder: Path, losses: list[float]) -> Run:
    folder.mkdir()
    lines: list[dict[str, Any]] = [
        {"kind": "training", "iteration": i, "loss": loss, "accuracy": 0.5} for i, loss in enumerate(losses)
    ]
    lines.append({"kind": "validation", "iteration": 1, "accuracy": 0.5, "interval": 0.1})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return Run(folder, load_recipe("glyphs-5way-1shot-maml"))


def test_curves_say_that_they_are_smoothed_and_the_legend_lies_beside_the_panels(
    tmp_path: Path, drawn: list[Any]
) -> None:
    losses = [float(i % 7) for i in range(100)]
    plots.plot_comparison([logged(tmp_path / "a", losses), logged(tmp_path / "b", losses)], tmp_path / "curves.png")
    (figure,) = drawn
    assert f"smoothed: {plots.SMOOTHING}" in figure.get_suptitle()
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [
        "a, training tasks, smoothed",
        "b, training tasks, smoothed",
        "a, validation classes, 95 % interval",
        "b, validation classes, 95 % interval",
    ]
    figure.draw_without_rendering()
    for axis in figure.axes:
        assert axis.get_legend() is None
        assert not legend.get_window_extent().overlaps(axis.get_window_extent())
    raw, smoothed = figure.axes[0].lines[:2]
    assert list(raw.get_ydata()) == losses  # what was logged is there, too
    assert max(smoothed.get_ydata()[20:]) < 6


def test_few_points_are_not_smoothed_and_many_are_by_at_most_ten() -> None:
    assert plots.smooth([5.0, 1.0, 3.0]) == [5.0, 1.0, 3.0]
    step = plots.smooth([0.0] * 1000 + [1.0] * 1000)
    assert step[1009] == pytest.approx(1 - 0.9**10)


def test_accuracies_are_drawn_with_visible_dots_and_the_difference_task_by_task(
    tmp_path: Path, drawn: list[Any]
) -> None:
    results = {"A": Evaluation([0.5, 0.75]), "B": Evaluation([0.75, 0.75])}
    plots.plot_accuracies(results, tmp_path / "accuracy.png", "title")
    (figure,) = drawn
    upper, lower = figure.axes
    assert [label.get_text() for label in lower.get_yticklabels()] == ["B\n− A"]
    assert lower.texts[0].get_text() == "+12.50 ± 17.32 points"
    (dots,) = (c for c in lower.collections if hasattr(c, "get_sizes") and len(c.get_offsets()) == 2)
    assert dots.get_offsets()[:, 0].tolist() == [25.0, 0.0]
    for axis in (upper, lower):
        for dots in (c for c in axis.collections if hasattr(c, "get_sizes")):
            assert dots.get_alpha() >= 0.5
            assert min(dots.get_sizes()) >= 6


def test_a_single_method_has_no_panel_of_differences(tmp_path: Path, drawn: list[Any]) -> None:
    plots.plot_accuracies({"A": Evaluation([0.5, 0.75])}, tmp_path / "accuracy.png", "title")
    assert len(drawn[0].axes) == 1
