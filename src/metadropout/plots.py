"""Plots of runs; without matplotlib they are left out, and the caller is told so."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from metadropout.metrics import read_metrics
from metadropout.runs import Run

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")  # Okabe and Ito's, told apart by colour-blind readers


def plot_curves(run: Run) -> Path | None:
    """Draw a run's learning curves into its folder; return the picture's path, None without matplotlib."""
    return plot_comparison([run], run.folder / "curves.png")


def plot_comparison(runs: Sequence[Run], path: Path, labels: Sequence[str] | None = None) -> Path | None:
    """Draw the learning curves of several runs into one picture."""
    try:
        import matplotlib as mpl  # noqa: PLC0415 (optional)

        mpl.use("Agg")
        from matplotlib import pyplot as plt  # noqa: PLC0415
    except ImportError:
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
    _save(figure, path)
    plt.close(figure)
    return path


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path, dpi=130, metadata={"Software": None})


def _smooth(values: Sequence[float], weight: float = 0.9) -> list[float]:
    """Average exponentially, without the start's bias, so that a curve of noisy tasks can be read."""
    smoothed, mean, total = [], 0.0, 0.0
    for value in values:
        mean, total = weight * mean + (1 - weight) * value, weight * total + (1 - weight)
        smoothed.append(mean / total)
    return smoothed
