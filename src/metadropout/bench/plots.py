"""Pictures of what was measured; without matplotlib they are left out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from metadropout.analysis.plots import COLOURS, pyplot, save_figure
from metadropout.bench.adaptation import AdaptationCost
from metadropout.bench.comparison import Comparison
from metadropout.bench.report import TITLES

LABELS = {"image_size": "image size, pixels", "steps": "inner steps", "shot": "shots", "way": "ways"}
WAYS = {"batch": "one batch in chunks", "loop": "loop over samples", "plain": "loop in plain PyTorch"}


def plot_comparisons(comparisons: Sequence[Comparison], path: Path) -> Path | None:
    """Draw each implementation's time as a bar, from the fastest to the slowest round as a line."""
    if (plt := pyplot()) is None:
        return None
    figure, axes = plt.subplots(1, len(comparisons), figsize=(5.5 * len(comparisons), 3), layout="constrained")
    for axis, comparison in zip([axes] if len(comparisons) == 1 else axes, comparisons, strict=True):
        for row, result in enumerate(comparison.results):
            axis.barh(row, result.median, color=COLOURS[row % len(COLOURS)])
            axis.plot([min(result.seconds), max(result.seconds)], [row, row], color="black")
        axis.axvline(comparison.convolutions.median, color="black", linestyle="--", label="convolutions alone")
        axis.set_yticks(range(len(comparison.results)), [result.name for result in comparison.results])
        axis.invert_yaxis()
        axis.set(xlabel="seconds per meta-iteration", title=TITLES[comparison.method])
        axis.legend(fontsize=8)
    save_figure(figure, path)
    plt.close(figure)
    return path


def plot_adaptation(costs: Sequence[AdaptationCost], path: Path) -> Path | None:
    """Draw time and memory against the number of samples."""
    if (plt := pyplot()) is None:
        return None
    figure, (time_axis, memory_axis) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for shot, style in zip(sorted({cost.setting.shot for cost in costs}), ("o-", "s--", "^:"), strict=False):
        mine = [cost for cost in costs if cost.setting.shot == shot]
        samples = [cost.samples for cost in mine]
        for (way, name), colour in zip(WAYS.items(), COLOURS, strict=False):
            measured, label = [getattr(cost, way) for cost in mine], f"{name}, {shot}-shot"
            time_axis.plot(samples, [m.median for m in measured], style, color=colour, label=label)
            memory_axis.plot(samples, [m.peak_memory / 1e6 for m in measured], style, color=colour, label=label)
    time_axis.set(ylabel="seconds per task", xlabel="noise samples per inner step")
    memory_axis.set(ylabel="peak memory, MB", xlabel="noise samples per inner step")
    time_axis.legend(fontsize=8)
    for axis in (time_axis, memory_axis):
        axis.grid(alpha=0.3)
        axis.set_ylim(bottom=0)
    save_figure(figure, path)
    plt.close(figure)
    return path


def plot_growth(measured: Sequence[tuple[str, int, Comparison]], path: Path) -> Path | None:
    """Draw time above and memory below, one column for each parameter."""
    if (plt := pyplot()) is None:
        return None
    parameters = list(dict.fromkeys(parameter for parameter, _, _ in measured))
    size = (3 * len(parameters), 5.5)
    figure, axes = plt.subplots(2, len(parameters), figsize=size, layout="constrained", squeeze=False)
    for column, parameter in enumerate(parameters):
        for method, style in (("maml", "o--"), ("metadropout", "s-")):
            mine = [(v, c) for p, v, c in measured if (p, c.method) == (parameter, method)]
            for index, colour in enumerate(COLOURS[: len(mine[0][1].results)] if mine else ()):
                results = [comparison.results[index] for _, comparison in mine]
                values, label = [value for value, _ in mine], f"{results[0].name}, {TITLES[method]}"
                axes[0][column].plot(values, [r.median for r in results], style, color=colour, label=label)
                axes[1][column].plot(values, [r.peak_memory / 1e6 for r in results], style, color=colour)
        axes[1][column].set_xlabel(LABELS.get(parameter, parameter))
    axes[0][0].set_ylabel("seconds per meta-iteration")
    axes[1][0].set_ylabel("peak memory, MB")
    axes[0][0].legend(fontsize=7)
    for axis in axes.flat:
        axis.grid(alpha=0.3)
        axis.set_ylim(bottom=0)
    save_figure(figure, path)
    plt.close(figure)
    return path
