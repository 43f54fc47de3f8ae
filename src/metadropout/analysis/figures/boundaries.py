"""Decision boundaries in the space of the last features (appendix C of the paper): one task, over steps, over tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from metadropout.analysis.figures.base import FigureData, FloatArray, listing, pictures, plain
from metadropout.analysis.figures.drawing import COLOURS, image_grid, new_figure, require, show, side_by_side
from metadropout.analysis.tracing import Probe, draws_features
from metadropout.data import Episode
from metadropout.learners import GradientLearner
from metadropout.learners.base import TEST_SAMPLES
from metadropout.noise import SeededNoise

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUPPORT, PERTURBED, QUERY = 0, 1, 2
"""The kinds of points."""
ADAPTING, COPYING = 0, 1
"""Keys that keep the noise of inner steps and of perturbed copies apart."""


@dataclass(frozen=True)
class Panel:
    """One adapted model and the points that it sees; arrays have an entry for each point."""

    learner: str
    moment: str
    """Which task, or after how many inner steps."""
    distance: FloatArray
    """Signed distance of the last features from the decision boundary; class 0 is on the positive side."""
    height: FloatArray
    """t-SNE of all other directions; only nearness has a meaning."""
    kind: NDArray[np.int64]
    """SUPPORT, PERTURBED or QUERY."""
    true: NDArray[np.int64]
    """Class of each point, 0 or 1."""
    predicted: NDArray[np.int64]
    """The class that the network's own logits give."""

    def right(self, kind: int) -> tuple[int, int]:
        """Return how many points of a kind are classified correctly, and how many there are."""
        chosen = self.kind == kind
        return int((self.predicted == self.true)[chosen].sum()), int(chosen.sum())

    def margin(self, kind: int) -> float:
        """Return the mean distance of points of a kind from the boundary, on the side of their class."""
        towards = np.where(self.true == 0, self.distance, -self.distance)
        return float(towards[self.kind == kind].mean())


@dataclass(frozen=True)
class BoundaryData(FigureData):
    """Panels of one or several learners: a row for each learner, a column for each moment."""

    over: Literal["one task", "inner steps", "tasks"]
    panels: tuple[tuple[Panel, ...], ...]
    images: FloatArray
    """The four support images of the (first) task, class by class, shape (4, height, width[, 3])."""
    mc_samples: int
    copies: int
    seed: int

    @property
    def title(self) -> str:
        return {"one task": "Decision boundaries", "inner steps": "Decision boundaries over the inner steps"}.get(
            self.over, "Decision boundaries of several tasks"
        )

    @property
    def caption(self) -> str:
        what = (
            "Two unseen classes with two support images each; the head is cut to two outputs before adapting. "
            "Horizontal: signed distance of the last features from the boundary (the line at 0); vertical: t-SNE of "
            "all other directions. Support images and their perturbed copies are normalised as in an inner step, "
            "query images as the learner normalises them. "
        )
        if any((row[0].kind == PERTURBED).any() for row in self.panels):
            what += (
                f"Inner steps average {self.mc_samples} noise samples; {self.copies} perturbed copies of each support "
            )
            what += "image are drawn. "
        return what + self._results()

    @property
    def alt(self) -> str:
        return f"Scatter plots with a vertical decision line, {self.over}. {self._results()}"

    def _results(self) -> str:
        said = []
        for row in self.panels:
            right = [f"{panel.right(QUERY)[0]}" for panel in row]
            text = f"{row[0].learner}: {listing(right)} of {row[0].right(QUERY)[1]} query images right"
            if len(row) > 1:
                text += f" ({row[0].moment} to {row[-1].moment})"
            beyond = row[-1].right(PERTURBED)
            if beyond[1] and len(row) == 1:
                text += f", support images on average {row[0].margin(SUPPORT):.1f} from the line and their perturbed "
                text += f"copies {row[0].margin(PERTURBED):.1f}, {beyond[1] - beyond[0]} of {beyond[1]} beyond it"
            said.append(text)
        return "; ".join(said) + "."


@dataclass(frozen=True)
class Cell:
    """What a panel is computed for."""

    episode: Episode
    steps: int
    moment: str = ""
    task: int = 0
    """Gives each task noise of its own."""


def decision_boundaries(
    learners: Mapping[str, GradientLearner],
    episode: Episode,
    *,
    copies: int = 10,
    mc_samples: int = TEST_SAMPLES,
    seed: int = 0,
) -> BoundaryData:
    """Adapt learners to the same two-class task and find where its points lie about the decision boundary.

    Args:
        learners: what to compare, by the names to be shown; they are left unchanged.
        episode: a 2-way task; the paper takes two support images of each class.
        copies: perturbed copies of each support image.
        mc_samples: noise samples averaged in each inner step.
        seed: seed of the noise and of t-SNE.
    """
    rows = [
        _row(name, learner, [Cell(episode, learner.steps)], copies, mc_samples, seed)
        for name, learner in learners.items()
    ]
    return BoundaryData("one task", tuple(rows), pictures(episode.support_x), mc_samples, copies, seed)


def boundaries_over_steps(
    learners: Mapping[str, GradientLearner],
    episode: Episode,
    *,
    copies: int = 10,
    mc_samples: int = TEST_SAMPLES,
    seed: int = 0,
) -> BoundaryData:
    """As `decision_boundaries`, before the first inner step and after each."""
    rows = []
    for name, learner in learners.items():
        cells = [Cell(episode, step, f"step {step}") for step in range(learner.steps + 1)]
        rows.append(_row(name, learner, cells, copies, mc_samples, seed))
    return BoundaryData("inner steps", tuple(rows), pictures(episode.support_x), mc_samples, copies, seed)


def boundaries_over_tasks(
    learners: Mapping[str, GradientLearner],
    episodes: Sequence[Episode],
    *,
    copies: int = 10,
    mc_samples: int = TEST_SAMPLES,
    seed: int = 0,
) -> BoundaryData:
    """As `decision_boundaries`, for several tasks."""
    rows = []
    for name, learner in learners.items():
        cells = [Cell(episode, learner.steps, f"task {n + 1}", n) for n, episode in enumerate(episodes)]
        rows.append(_row(name, learner, cells, copies, mc_samples, seed))
    return BoundaryData("tasks", tuple(rows), pictures(episodes[0].support_x), mc_samples, copies, seed)


def cut_head(learner: GradientLearner, classes: tuple[int, int] = (0, 1)) -> GradientLearner:
    """Return a copy of a learner whose head has the outputs of two classes only.

    Labels are given to classes at random in meta-training, so it does not matter which two.
    """
    return learner.with_head_rows(lambda rows: rows[list(classes)])


def _row(
    name: str, learner: GradientLearner, cells: Sequence[Cell], copies: int, mc_samples: int, seed: int
) -> tuple[Panel, ...]:
    """Compute the panels of one learner."""
    require("sklearn")
    cut = cut_head(learner)
    panels = []
    for cell in cells:
        cut.steps = cell.steps
        panels.append(_panel(name, cut, cell, copies, mc_samples, seed))
    return tuple(panels)


def _panel(name: str, learner: GradientLearner, cell: Cell, copies: int, mc_samples: int, seed: int) -> Panel:
    """Adapt, run all points and measure their distances from the boundary."""
    episode = cell.episode
    x, y = episode.support_x, episode.support_y
    weights = learner.adapted_weights(x, y, mc_samples=mc_samples, generator=SeededNoise(seed, cell.task, ADAPTING))
    probe = Probe(learner)
    traces = [probe(weights, x)]
    kinds, labels = [np.full(len(x), SUPPORT)], [y]
    if draws_features(learner.perturbation):
        noise = SeededNoise(seed, cell.task, COPYING)
        traces += [probe(weights, x, stream=noise.stream(0, number)) for number in range(copies)]
        kinds.append(np.full(copies * len(x), PERTURBED))
        labels += [y] * copies
    normalisation = probe.for_queries(weights, x, inductive=episode.inductive)
    traces.append(probe(weights, episode.query_x, normalisation=normalisation))
    kinds.append(np.full(len(episode.query_x), QUERY))
    labels.append(episode.query_y)

    features = torch.cat([trace.features for trace in traces]).double()  # (points, features)
    logits = torch.cat([trace.logits for trace in traces])
    distance, rest = project(features, *_head_weights(learner, weights))
    true = torch.cat(labels).cpu().numpy()
    heights = _heights(rest.cpu().numpy(), seed)
    if heights[true == 0].mean() < heights[true == 1].mean():  # up and down have no meaning: class 0 is shown above
        heights = -heights
    predicted = logits.argmax(dim=1).cpu().numpy()
    return Panel(name, cell.moment, plain(distance), heights, np.concatenate(kinds), true, predicted)


def project(features: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Split features into the signed distance from the boundary between two classes, and all other directions.

    With w = w₀ − w₁ and b = b₀ − b₁ the boundary is h·w + b = 0, and the distance (h·w + b) / ‖w‖: the paper's
    horizontal coordinate, moved so that the boundary is at 0.

    Args:
        features: shape (points, features).
        weight: the head's, shape (2, features).
        bias: the head's, shape (2,).
    """
    normal = weight[0] - weight[1]
    length = normal.norm()
    along = features @ normal / length  # (points,)
    rest = features - along[:, None] * normal / length
    return along + (bias[0] - bias[1]) / length, rest


def _head_weights(learner: GradientLearner, weights: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    head = f"network.{learner.layers().head}"
    weight = weights[f"{head}.weight"].double()
    return weight, weights[f"{head}.bias"].double() if f"{head}.bias" in weights else weight.new_zeros(2)


def _heights(rest: NDArray[np.float64], seed: int) -> FloatArray:
    """Reduce vectors of shape (points, features) to one dimension by t-SNE."""
    from sklearn.manifold import TSNE  # noqa: PLC0415 (an extra)

    # It starts from the first principal component, so that the picture depends little on chance.
    centred = (rest - rest.mean(axis=0)) / max(float(rest.std()), 1e-12)
    start = centred @ np.linalg.svd(centred, full_matrices=False)[2][0]
    small = (1e-4 * start / max(float(np.std(start)), 1e-12)).astype(np.float32)
    perplexity = min(30.0, (len(rest) - 1) / 3)
    model = TSNE(1, perplexity=perplexity, init=small[:, None], method="exact", random_state=seed)
    return model.fit_transform(centred)[:, 0].astype(np.float32)  # type: ignore[no-any-return]


def draw_boundaries(data: BoundaryData) -> Figure:
    """Draw the panels; one task's support images stand at the left."""
    rows, columns = len(data.panels), max(len(row) for row in data.panels)
    if data.over == "one task":
        return _draw_side_by_side(data)
    figure = new_figure(max(6.0, 1.9 * columns), 2.0 * rows + 0.9)
    axes = figure.subplots(rows, columns, squeeze=False, sharex="row")
    for row, cells in zip(axes, data.panels, strict=True):
        for axis, panel in zip(row, cells, strict=False):
            _draw_panel(axis, panel, size=0.6)
            axis.set_title(f"{panel.moment}: {panel.right(QUERY)[0]} of {panel.right(QUERY)[1]}", fontsize=11)
        for axis in row[len(cells) :]:
            axis.set_axis_off()
        row[0].set_ylabel(cells[0].learner, fontsize=10)
    figure.suptitle(f"{data.title} (query images classified correctly)", fontsize=13)
    for axis in axes[-1]:
        axis.set_xlabel("distance from boundary", fontsize=10)
    _legend(figure, data)
    return figure


def _draw_side_by_side(data: BoundaryData) -> Figure:
    panels = [row[0] for row in data.panels]
    figure = new_figure(1.2 + 3.9 * len(panels), 3.9)
    left, right = side_by_side(figure, 1.0, 3.9 * len(panels))
    cells = image_grid(left, len(data.images), 1)
    for number, (cell, image) in enumerate(zip(cells.flat, data.images, strict=True)):
        show(cell, image, 0, 1)
        side = number * 2 // len(data.images)
        for edge in cell.spines.values():
            edge.set_color(COLOURS[side])
            edge.set_linewidth(2.5)
    left.suptitle("support", fontsize=9)
    axes = right.subplots(1, len(panels), squeeze=False)
    for axis, panel in zip(axes.flat, panels, strict=True):
        _draw_panel(axis, panel)
        correct, total = panel.right(QUERY)
        axis.set_title(f"{panel.learner}\n{correct} of {total} query images right", fontsize=10)
        axis.set_xlabel("signed distance from the decision boundary", fontsize=9)
    axes.flat[0].set_ylabel("other directions (t-SNE)", fontsize=9)
    _legend(figure, data)
    return figure


def _draw_panel(axis: Axes, panel: Panel, size: float = 1.0) -> None:
    """Draw the points; colour and shape tell the class, filling and size the kind."""
    for side, (colour, shape) in enumerate(zip(COLOURS, "o^", strict=False)):
        for kind, area, face, edge in (
            (QUERY, 26, colour, "none"),
            (PERTURBED, 20, "none", colour),
            (SUPPORT, 130, colour, "black"),
        ):
            chosen = (panel.kind == kind) & (panel.true == side)
            axis.scatter(
                panel.distance[chosen],
                panel.height[chosen],
                s=area * size,
                marker=shape,
                facecolors=face,
                edgecolors=edge,
                linewidths=1.2 if kind == SUPPORT else 0.8,
                alpha=0.65 if kind == QUERY else 1,
                zorder=2 + (kind == SUPPORT),
            )
    # Panels of a row share their scale, so it never shrinks from one to the next.
    reach = max(1.1 * float(np.abs(panel.distance).max()), *map(abs, axis.get_xlim()))
    axis.axvspan(0, 10 * reach, color=COLOURS[0], alpha=0.07, linewidth=0)
    axis.axvspan(-10 * reach, 0, color=COLOURS[1], alpha=0.07, linewidth=0)
    axis.axvline(0, color="black", linewidth=1.5)
    axis.set_xlim(-reach, reach)
    axis.set_yticks([])
    axis.tick_params(labelsize=9)


def _legend(figure: Figure, data: BoundaryData) -> None:
    """Tell the marks: a row for each class, a column for each kind of points."""
    from matplotlib.lines import Line2D  # noqa: PLC0415 (an extra)

    kinds = [("support", 9.0, True), ("query", 5.0, False)]
    if any((row[0].kind == PERTURBED).any() for row in data.panels):
        kinds.insert(1, ("perturbed support", 5.0, False))
    entries = []
    for kind, size, framed in kinds:
        for side, colour in enumerate(COLOURS[:2]):
            entry = Line2D([], [], linestyle="none", marker="o^"[side], markersize=size, color=colour)
            entry.set_label(f"class {side + 1}: {kind}")
            entry.set_markeredgecolor("black" if framed else colour)
            if kind == "perturbed support":
                entry.set_markerfacecolor("none")
            entries.append(entry)
    figure.legend(handles=entries, loc="outside lower center", ncols=len(kinds), fontsize=10, frameon=False)
