"""The multiplier over the image: what each unit's output is multiplied by, layer by layer, channel by channel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from metadropout.analysis.figures.base import FigureData, FigureError, FloatArray, pictures, plain
from metadropout.analysis.figures.drawing import image_grid, label_row, new_figure, show
from metadropout.analysis.tracing import Probe, initial_weights
from metadropout.learners import GradientLearner

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class LayerMaps:
    """Maps of one layer."""

    layer: int
    """Counted from 1, in the order in which layers run."""
    name: str
    channels: tuple[int, ...]
    """The channels whose multiplier varies most over images and positions, most first."""
    maps: FloatArray
    """Shape (channels, images, height, width)."""
    low: float
    high: float
    """Smallest and largest multiplier in the maps."""


@dataclass(frozen=True)
class MultiplierData(FigureData):
    """Maps of several layers for the same images."""

    learner: str
    images: FloatArray
    layers: tuple[LayerMaps, ...]

    @property
    def title(self) -> str:
        return "Multipliers over the image"

    @property
    def caption(self) -> str:
        return (
            f"{self.learner}: what the outputs of each layer are multiplied by on query images, before any inner step, "
            "for the channels in which it varies most. Bright: amplified; dark: suppressed. Ranges: " + self._ranges()
        )

    @property
    def alt(self) -> str:
        return f"A row of {len(self.images)} images and, below each, maps of its multipliers. Ranges: " + self._ranges()

    def _ranges(self) -> str:
        return ", ".join(f"layer {m.layer} {m.low:.2f} to {m.high:.2f}" for m in self.layers) + "."


def multiplier_maps(
    name: str, learner: GradientLearner, images: Tensor, *, shown: int = 8, channels: int = 3
) -> MultiplierData:
    """Compute the multipliers of all layers that keep a height and a width.

    Args:
        name: what the learner is called.
        learner: what to look into; left unchanged.
        images: a batch, normalised by its own statistics, shape (n, channels, height, width).
        shown: how many of them to show.
        channels: how many channels of each layer to show.
    """
    if not learner.perturbation.traits.multiplicative:
        reason = f"{type(learner.perturbation).__name__} multiplies nothing on query images"
        raise FigureError(f"multipliers show what layers are multiplied by, and {reason}")
    trace = Probe(learner)(initial_weights(learner), images)
    layers = []
    for number, (layer, values) in enumerate(trace.hidden.items(), start=1):
        if values.multiplier is None or values.multiplier.dim() != 4 or min(values.multiplier.shape[2:]) < 2:
            continue
        maps = values.multiplier[:shown].transpose(0, 1)  # (channels, images, height, width)
        best = maps.flatten(1).std(dim=1).topk(min(channels, len(maps))).indices
        chosen = plain(maps[best])
        picked = tuple(int(c) for c in best)
        layers.append(LayerMaps(number, layer, picked, chosen, float(chosen.min()), float(chosen.max())))
    if not layers:
        raise FigureError("multipliers show maps over the image, and no perturbed layer has a height and a width")
    return MultiplierData(name, pictures(images[:shown]), tuple(layers))


def draw_multipliers(data: MultiplierData) -> Figure:
    """Draw the images in a row and the maps below, each layer on a scale of its own."""
    columns = len(data.images)
    rows = 1 + sum(len(maps.channels) for maps in data.layers)
    figure = new_figure(0.72 * columns + 1.9, 0.72 * rows + 0.5)
    axes = image_grid(figure, rows, columns + 1, widths=[1.0] * columns + [0.2])  # scales in the last column
    for cell in axes[:, -1]:
        cell.remove()
    for cell, image in zip(axes[0], data.images, strict=False):
        show(cell, image, 0, 1)
    label_row(axes[0, 0], "input")
    row = 1
    for maps in data.layers:
        block = slice(row, row + len(maps.channels))
        for cells, channel, values in zip(axes[block], maps.channels, maps.maps, strict=True):
            for cell, value in zip(cells, values, strict=False):
                shown = show(cell, value, maps.low, maps.high, "viridis")
            label_row(cells[0], f"layer {maps.layer}\nchannel {channel}")
        scale = figure.add_subplot(axes[0, 0].get_gridspec()[block, -1])
        figure.colorbar(shown, cax=scale)
        scale.tick_params(labelsize=7)
        row += len(maps.channels)
    figure.suptitle(f"{data.title}: {data.learner}", fontsize=11)
    return figure
