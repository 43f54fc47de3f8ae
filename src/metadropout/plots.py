"""Plots of runs; without matplotlib they are left out, and the caller is told so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from metadropout.evaluation import Evaluation
from metadropout.metrics import read_metrics
from metadropout.runs import Run

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")  # Okabe and Ito's, told apart by colour-blind readers


def plot_curves(run: Run) -> Path | None:
    """Draw a run's learning curves into its folder; return the picture's path, None without matplotlib."""
    return plot_comparison([run], run.folder / "curves.png")


def plot_comparison(runs: Sequence[Run], path: Path, labels: Sequence[str] | None = None) -> Path | None:
    """Draw the learning curves of several runs into one picture."""
    if (plt := pyplot()) is None:
        return None
    figure, (loss_axis, accuracy_axis) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for run, label, colour in zip(runs, labels or [run.folder.name for run in runs], COLOURS, strict=False):
        lines = read_metrics(run.metrics)
        training = [line for line in lines if line["kind"] == "training"]
        validation = [line for line in lines if line["kind"] == "validation"]
        iterations = [line["iteration"] for line in training]
        loss_axis.plot(iterations, _smooth([line["loss"] for line in training]), color=colour, label=label)
        accuracy = _smooth([100 * line["accuracy"] for line in training])
        accuracy_axis.plot(iterations, accuracy, color=colour, label=f"{label}, training tasks")
        if validation:
            accuracy_axis.errorbar(
                [line["iteration"] for line in validation],
                [100 * line["accuracy"] for line in validation],
                [100 * line["interval"] for line in validation],
                color=colour,
                marker="o",
                markersize=4,
                linestyle="--",
                capsize=2,
                label=f"{label}, validation classes",
            )
    loss_axis.set(xlabel="iteration", ylabel="query loss")
    accuracy_axis.set(xlabel="iteration", ylabel="query accuracy, %")
    for axis in (loss_axis, accuracy_axis):
        axis.grid(alpha=0.3)
    accuracy_axis.legend(fontsize=8)
    save_figure(figure, path)
    plt.close(figure)
    return path


def plot_accuracies(results: Mapping[str, Evaluation], path: Path, title: str) -> Path | None:
    """Draw the mean accuracies of several methods with their intervals, and every episode as a faint point."""
    if (plt := pyplot()) is None:
        return None
    figure, axis = plt.subplots(figsize=(6, 0.9 + 0.8 * len(results)), layout="constrained")
    for row, (result, colour) in enumerate(zip(results.values(), COLOURS, strict=False)):
        # Episodes are spread over the row by their order, so that equal accuracies do not hide each other.
        spread = [row + 0.3 * (2 * (i * 0.618 % 1) - 1) for i in range(len(result.accuracies))]
        axis.scatter([100 * a for a in result.accuracies], spread, s=4, alpha=0.15, color=colour, linewidths=0)
        axis.errorbar(100 * result.mean, row, xerr=100 * result.interval, fmt="o", color="black", capsize=4)
        axis.annotate(
            str(result), (100 * result.mean, row), (0, 9), textcoords="offset points", ha="center", fontsize=9
        )
    axis.set_yticks(range(len(results)), list(results))
    axis.set(xlabel="accuracy, %", title=title, ylim=(len(results) - 0.5, -0.6))
    axis.grid(axis="x", alpha=0.3)
    save_figure(figure, path)
    plt.close(figure)
    return path


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
    figure.savefig(path, dpi=130, metadata={"Software": None})


def _smooth(values: Sequence[float], weight: float = 0.9) -> list[float]:
    """Average exponentially, without the start's bias, so that a curve of noisy tasks can be read."""
    smoothed, mean, total = [], 0.0, 0.0
    for value in values:
        mean, total = weight * mean + (1 - weight) * value, weight * total + (1 - weight)
        smoothed.append(mean / total)
    return smoothed
