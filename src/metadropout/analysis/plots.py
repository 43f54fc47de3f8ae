"""Plots of runs; without matplotlib they are left out, and the caller is told so."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from metadropout.analysis.verdict import points
from metadropout.evaluation import Evaluation
from metadropout.files import write_atomically
from metadropout.robustness.attacks import Norm
from metadropout.robustness.curves import Curves
from metadropout.runs.folder import Run
from metadropout.training.metrics import load_metrics

# Okabe and Ito's, told apart by colour-blind readers; without yellow, which is hard to see on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "osD^vP*X<>hp"
LINES = ("-", "--", ":")
SMOOTHING = "exponential mean over a twentieth of the log points, ten at most"
"""What `smooth` does, in the words of pictures and reports."""

NORM_NAMES: dict[Norm, str] = {"l1": "ℓ1", "l2": "ℓ2", "linf": "ℓ∞"}


def plot_curves(run: Run) -> Path | None:
    """Draw a run's learning curves into its folder; return the picture's path, None without matplotlib."""
    return plot_comparison([run], run.folder / "curves.png")


def plot_accuracy_curves(
    curves: Mapping[str, Sequence[tuple[int, Evaluation]]], path: Path, *, title: str
) -> Path | None:
    """Draw accuracy on unseen classes over training, a line for each name; return the path, None without matplotlib.

    Args:
        curves: iterations and what was measured after each, by name.
        path: of the picture.
        title: stands above it.
    """
    if (plt := pyplot()) is None:
        return None
    figure, axis = plt.subplots(figsize=(7, 3.6 + 0.2 * len(curves)), layout="constrained")
    for number, (name, curve) in enumerate(curves.items()):
        values = [100 * result.mean for _, result in curve]
        errors = [100 * result.interval for _, result in curve]
        axis.errorbar(
            [iteration for iteration, _ in curve],
            values,
            errors,
            color=COLOURS[number % len(COLOURS)],
            marker=MARKERS[number % len(MARKERS)],
            markersize=4,
            capsize=2,
            label=f"{name}, 95 % interval over tasks",
        )
    axis.set(title=title, xlabel="iteration", ylabel="accuracy, %")
    axis.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=1 if len(curves) < 3 else 2, fontsize=8)
    save_figure(figure, path)
    plt.close(figure)
    return path


def plot_comparison(runs: Sequence[Run], path: Path, labels: Sequence[str] | None = None) -> Path | None:
    """Draw the learning curves of several runs into one picture: smoothed, with what was logged faintly behind."""
    if (plt := pyplot()) is None:
        return None
    names = list(labels or [run.folder.name for run in runs])
    figure, (loss_axis, accuracy_axis) = plt.subplots(1, 2, figsize=(9, 3.4 + 0.22 * len(names)), layout="constrained")
    for run, label, colour in zip(runs, names, COLOURS, strict=False):
        metrics = load_metrics(run.metrics)
        iterations = [line.iteration for line in metrics.training]
        losses = [line.loss for line in metrics.training]
        accuracies = [100 * line.accuracy for line in metrics.training]
        for axis, values in ((loss_axis, losses), (accuracy_axis, accuracies)):
            axis.plot(iterations, values, color=colour, alpha=0.4, linewidth=1.0)
            axis.plot(iterations, smooth(values), color=colour, label=f"{label}, training tasks, smoothed")
        if metrics.validation:
            accuracy_axis.errorbar(
                [line.iteration for line in metrics.validation],
                [100 * line.accuracy for line in metrics.validation],
                [100 * line.interval for line in metrics.validation],
                color=colour,
                marker="o",
                markersize=4,
                linestyle="--",
                capsize=2,
                label=f"{label}, validation classes, 95 % interval",
            )
    loss_axis.set(xlabel="iteration", ylabel="query loss")
    accuracy_axis.set(xlabel="iteration", ylabel="query accuracy, %")
    for axis in (loss_axis, accuracy_axis):
        axis.grid(alpha=0.3)
    figure.suptitle(f"smoothed: {SMOOTHING}; faint: as logged", fontsize=9)
    # Below the panels, where it covers nothing.
    figure.legend(*accuracy_axis.get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=8)
    save_figure(figure, path)
    plt.close(figure)
    return path


def plot_accuracies(results: Mapping[str, Evaluation], path: Path, title: str) -> Path | None:
    """Draw mean accuracies with their intervals and every episode, and how far each is ahead of the first."""
    if (plt := pyplot()) is None:
        return None
    (base, first), *others = results.items()
    heights = [len(results), len(others)] if others else [len(results)]
    size = (6.5, 1.1 + 0.8 * sum(heights) + 0.6 * bool(others))
    figure, axes = plt.subplots(
        len(heights), 1, figsize=size, height_ratios=heights, layout="constrained", squeeze=False
    )
    upper = axes[0, 0]
    for row, (result, colour) in enumerate(zip(results.values(), COLOURS, strict=False)):
        _draw_episodes(upper, row, result, colour, str(result))
    upper.set_yticks(range(len(results)), list(results))
    upper.set(xlabel="accuracy, %; a dot is a task", title=title, ylim=(len(results) - 0.5, -0.7))
    for lower in axes[1:, 0]:
        for row, ((_, result), colour) in enumerate(zip(others, COLOURS[1:], strict=False)):
            difference = result.minus(first)
            _draw_episodes(lower, row, difference, colour, points(difference))
        lower.axvline(0, color="black", linewidth=0.8)
        lower.set_yticks(range(len(others)), [f"{name}\n− {base}" for name, _ in others])
        lower.set(xlabel="difference on the same task, points", ylim=(len(others) - 0.5, -0.7))
    for axis in axes.flat:
        axis.grid(axis="x", alpha=0.3)
    save_figure(figure, path)
    plt.close(figure)
    return path


def _draw_episodes(axis: Any, row: int, result: Evaluation, colour: str, text: str) -> None:
    """Draw a row: each episode as a dot, the mean with its interval, and both in words."""
    # Episodes are spread over the row by their order, so that equal values do not hide each other.
    spread = [row + 0.32 * (2 * (i * 0.618 % 1) - 1) for i in range(len(result.accuracies))]
    size = 14 if len(result.accuracies) <= 300 else 6
    axis.scatter([100 * a for a in result.accuracies], spread, s=size, alpha=0.55, color=colour, linewidths=0)
    mean, interval = 100 * result.mean, 100 * result.interval
    style = {"fmt": "o", "color": "black", "capsize": 5, "markersize": 6, "elinewidth": 1.8, "zorder": 3}
    axis.errorbar(mean, row, xerr=interval, **style)
    box = {"facecolor": "white", "edgecolor": "none", "pad": 1}
    axis.text(mean, row - 0.38, text, ha="center", va="bottom", fontsize=9, bbox=box)


@dataclass(frozen=True)
class Difference:
    """How far one method is ahead of another."""

    name: str
    measured: Evaluation
    """Task by task."""
    reported: float | None
    """By figures that others report, in percentage points."""


@dataclass(frozen=True)
class Panel:
    """The differences in one setting, and where the reported ones come from."""

    title: str
    source: str
    differences: Sequence[Difference]


def plot_differences(panels: Sequence[Panel], base: str, path: Path) -> Path | None:
    """Draw how far methods are ahead of a base, with intervals over tasks, and beside it what is reported."""
    if (plt := pyplot()) is None:
        return None
    most = max(len(panel.differences) for panel in panels)
    size = (2.8 + 3.6 * len(panels), 1.6 + 0.3 * most)
    figure, axes = plt.subplots(1, len(panels), figsize=size, layout="constrained", squeeze=False)
    for axis, panel in zip(axes[0], panels, strict=True):
        for row, difference in enumerate(panel.differences):
            result = difference.measured
            style = {"color": COLOURS[0], "capsize": 3, "markersize": 5}
            axis.errorbar(
                100 * result.mean, row, xerr=100 * result.interval, fmt="o", **style, label="here" if row == 0 else None
            )
        quoted = [(d.reported, row) for row, d in enumerate(panel.differences) if d.reported is not None]
        if quoted:
            axis.scatter(*zip(*quoted, strict=True), marker="D", s=28, facecolors="none", edgecolors=COLOURS[1])
            axis.scatter([], [], marker="D", facecolors="none", edgecolors=COLOURS[1], label=panel.source)
        axis.axvline(0, color="black", linewidth=0.8)
        axis.set_yticks(range(len(panel.differences)), [d.name for d in panel.differences])
        axis.set(title=panel.title, xlabel=f"accuracy − {base}, points", ylim=(most - 0.5, -0.5))
        axis.grid(axis="x", alpha=0.3)
        # 5.5 font sizes below the panel: under its label, however high the panel is.
        axis.legend(fontsize=8, loc="upper right", bbox_to_anchor=(1, 0), borderaxespad=5.5, ncols=2)
    save_figure(figure, path)
    plt.close(figure)
    return path


def robustness_figure(results: Mapping[str, Curves]) -> tuple[list[dict[str, Any]], Any]:
    """Draw the accuracies of several runs under attack over the radius: one panel per norm, all runs in each.

    Above each panel its left end, the clean accuracies, is magnified. Runs are drawn side by side, a little off their
    radius, so that their intervals do not cover each other.

    Args:
        results: by the run's name, by norm, by radius.

    Returns:
        The numbers that are drawn, and matplotlib's figure: None where matplotlib is not installed.
    """
    rows = [
        {
            "run": name,
            "norm": norm,
            "radius": radius,
            "mean": result.mean,
            "interval_95": result.interval,
            "episodes": len(result.accuracies),
        }
        for name, curves in results.items()
        for norm, curve in curves.items()
        for radius, result in curve.items()
    ]
    if (plt := pyplot()) is None:
        return rows, None
    norms = list(next(iter(results.values())))
    size = (1 + 3.6 * len(norms), 5 + 0.12 * len(results))
    figure, axes = plt.subplots(2, len(norms), figsize=size, height_ratios=(1, 2), layout="constrained", squeeze=False)
    for norm, magnified, axis in zip(norms, *axes, strict=True):
        _draw_robustness(axis, magnified, norm, {name: curves[norm] for name, curves in results.items()})
    axes[1, 0].set_ylabel("accuracy, %")
    handles, labels = axes[1, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(3, len(results)), fontsize=8)
    plt.close(figure)  # it can be saved nevertheless
    return rows, figure


def _draw_robustness(axis: Any, magnified: Any, norm: Norm, curves: Mapping[str, Mapping[float, Evaluation]]) -> None:
    """Draw one panel, and the magnified region of its clean accuracies."""
    largest = max(max(curve) for curve in curves.values()) or 1.0
    gap = 0.03 * largest / len(curves)
    clean = [curve[0.0] for curve in curves.values()]
    for row, (name, curve) in enumerate(curves.items()):
        shift = gap * (row - (len(curves) - 1) / 2)
        style = {
            "color": COLOURS[row % len(COLOURS)],
            "marker": MARKERS[row % len(MARKERS)],
            "linestyle": LINES[row // len(COLOURS) % len(LINES)],
            "markersize": 5,
            "linewidth": 1.2,
            "capsize": 2,
        }
        means, intervals = [100 * r.mean for r in curve.values()], [100 * r.interval for r in curve.values()]
        axis.errorbar([radius + shift for radius in curve], means, intervals, label=name, **style)
        magnified.errorbar([shift], means[:1], intervals[:1], **style)
    low = 100 * min(result.mean - result.interval for result in clean)
    high = 100 * max(result.mean + result.interval for result in clean)
    margin = 0.15 * (high - low) + 0.2
    axis.set(ylim=(-3, 103), xlabel=f"radius ε, {NORM_NAMES[norm]} norm")
    corner, extent = (-0.02 * largest, low - margin), (0.04 * largest, high - low + 2 * margin)
    axis.indicate_inset((*corner, *extent), edgecolor="black")
    magnified.set(xlim=(corner[0], corner[0] + extent[0]), ylim=(corner[1], corner[1] + extent[1]), xticks=[])
    magnified.set_title("framed region (clean accuracies), magnified", fontsize=9)
    for each in (axis, magnified):
        each.grid(alpha=0.3)


def pyplot() -> Any:
    """Import matplotlib for drawing into files; None where it is not installed."""
    try:
        import matplotlib as mpl  # noqa: PLC0415 (optional)

        mpl.use("Agg")
        from matplotlib import pyplot as plt  # noqa: PLC0415
    except ImportError:
        return None
    return plt


def save_figure(figure: Any, path: Path) -> None:
    """Write a figure as a PNG that is the same for the same figure."""
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=130, metadata={"Software": None})
    write_atomically(path, content.getvalue())


def smooth(values: Sequence[float]) -> list[float]:
    """Average exponentially, without the start's bias, so that a curve of noisy tasks can be read.

    The fewer values there are the less they are averaged: the mean lags behind what it is of.
    """
    window = min(10.0, max(1.0, len(values) / 20))
    weight = 1 - 1 / window
    smoothed, mean, total = [], 0.0, 0.0
    for value in values:
        mean, total = weight * mean + (1 - weight) * value, weight * total + (1 - weight)
        smoothed.append(mean / total)
    return smoothed
