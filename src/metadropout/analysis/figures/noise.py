"""The noise's strength over training, from what runs have logged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from metadropout.analysis.figures.base import FigureData, FigureError, FloatArray, listing
from metadropout.analysis.figures.drawing import COLOURS, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LINES = ("-", "--", ":", "-.")


@dataclass(frozen=True)
class NoiseHistory:
    """What one run has logged; arrays have an entry for each logged iteration."""

    run: str
    iterations: NDArray[np.int64]
    strength: dict[str, FloatArray]
    """By layer: the noise's root mean square over that of the output without noise."""
    multiplier: dict[str, FloatArray]
    """By layer: the mean of the multiplier without noise; empty where the perturbation is not multiplicative."""


@dataclass(frozen=True)
class NoiseData(FigureData):
    """The histories of one or several runs."""

    runs: tuple[NoiseHistory, ...]
    without: tuple[str, ...] = ()
    """Runs that have logged none."""

    @property
    def title(self) -> str:
        return "The noise over training"

    @property
    def caption(self) -> str:
        return (
            "Strength of the noise on each layer (root mean square of the noise over that of the output without noise) "
            "and mean of the multiplier, for the query images of the first training task, before any inner step. "
            + self._ends()
            + (f" {listing(list(self.without))} logged no noise." if self.without else "")
        )

    @property
    def alt(self) -> str:
        return f"Curves over training iterations, one per layer. {self._ends()}"

    def _ends(self) -> str:
        said = []
        for run in self.runs:
            ends = [f"layer {n} {v[0]:.2f} to {v[-1]:.2f}" for n, v in enumerate(run.strength.values(), start=1)]
            said.append(f"{run.run}: strength of {listing(ends)}")
        return "; ".join(said) + "."


def noise_over_training(metrics: Mapping[str, Sequence[Mapping[str, Any]]]) -> NoiseData:
    """Collect the strengths that runs have logged.

    Args:
        metrics: the lines of each run's metrics (`read_metrics`), by the run's name.

    Raises:
        FigureError: if no run has logged any.
    """
    runs = []
    for run, lines in metrics.items():
        noise = [line for line in lines if line["kind"] == "noise"]
        if any(name.startswith("strength/") for line in noise for name in line):
            iterations = np.array([line["iteration"] for line in noise])
            runs.append(NoiseHistory(run, iterations, _series(noise, "strength/"), _series(noise, "multiplier/")))
    if not runs:
        raise FigureError(
            f"noise is drawn from what a run logs while it is trained, and {listing(list(metrics))} logged none: "
            "trained by an earlier version, or without noise on features"
        )
    drawn = {history.run for history in runs}
    return NoiseData(tuple(runs), without=tuple(run for run in metrics if run not in drawn))


def _series(lines: Sequence[Mapping[str, Any]], prefix: str) -> dict[str, FloatArray]:
    names = dict.fromkeys(name for line in lines for name in line if name.startswith(prefix))
    return {n.removeprefix(prefix): np.array([line.get(n, np.nan) for line in lines], dtype=np.float32) for n in names}


def draw_noise(data: NoiseData) -> Figure:
    """Draw a line per layer; several runs differ by their line style."""
    with_factor = any(run.multiplier for run in data.runs)
    figure = new_figure(8.5 if with_factor else 5, 3.3)
    axes = figure.subplots(1, 2 if with_factor else 1, squeeze=False)[0]
    labels = ("strength of the noise", "mean multiplier without noise")
    for axis, label, kind in zip(axes, labels, ("strength", "multiplier"), strict=False):
        for run, style in zip(data.runs, LINES, strict=False):
            for number, (layer, values) in enumerate(getattr(run, kind).items()):
                name = f"layer {number + 1}" if len(data.runs) == 1 else f"{run.run}, layer {number + 1}"
                shade = COLOURS[number % len(COLOURS)]
                axis.plot(run.iterations, values, linestyle=style, color=shade, label=name, gid=layer)
        axis.set_xlabel("training iteration", fontsize=9)
        axis.set_ylabel(label, fontsize=9)
        axis.tick_params(labelsize=8)
        axis.grid(alpha=0.3)
        axis.set_ylim(bottom=0)
    axes[0].legend(fontsize=8)
    figure.suptitle(data.title if len(data.runs) > 1 else f"{data.title}: {data.runs[0].run}", fontsize=11)
    return figure
