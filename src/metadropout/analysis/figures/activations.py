"""Deterministic against sampled activations: what the noise does to the features of a support image."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from metadropout.analysis.figures.base import (
    FigureData,
    FigureError,
    FloatArray,
    listing,
    pictures,
    plain,
    require_noise,
)
from metadropout.analysis.figures.drawing import image_grid, label_row, new_figure, show, side_by_side
from metadropout.analysis.tracing import Probe, initial_weights
from metadropout.learners import GradientLearner
from metadropout.learners.base import TEST_SAMPLES
from metadropout.noise import SeededNoise

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class LayerActivations:
    """Activations of one layer for one image."""

    layer: int
    """Counted from 1, in the order in which layers run."""
    name: str
    channels: tuple[int, ...]
    """The channels that vary most over the image without noise, most first."""
    deterministic: FloatArray
    """Shape (channels, height, width)."""
    sampled: FloatArray
    """Shape (samples, channels, height, width)."""

    @property
    def spread(self) -> FloatArray:
        """Standard deviation over the samples, shape (channels, height, width)."""
        return self.sampled.std(axis=0)  # type: ignore[no-any-return]

    def high(self, number: int) -> float:
        """Return where a channel's scale ends: above nearly all of its activations."""
        return float(max(self.deterministic[number].max(), np.quantile(self.sampled[:, number], 0.995)))


@dataclass(frozen=True)
class ActivationData(FigureData):
    """Activations of several layers for the same image."""

    learner: str
    image: FloatArray
    layers: tuple[LayerActivations, ...]
    seed: int

    @property
    def title(self) -> str:
        return "Deterministic and sampled activations"

    @property
    def caption(self) -> str:
        return (
            f"{self.learner}: the most varied channels of {self._which()} for a support image, before the first inner "
            f"step: without noise, with noise, and the standard deviation over {len(self.layers[0].sampled)} samples. "
            f"Relative to the mean activation that deviation is {self._how_much()}."
        )

    @property
    def alt(self) -> str:
        return (
            f"Grids of activation maps of {self._which()}: a smooth one without noise and grainy ones with noise. "
            f"The deviation over samples relative to the mean activation is {self._how_much()}."
        )

    def _which(self) -> str:
        return listing([f"layer {layer.layer}" for layer in self.layers])

    def _how_much(self) -> str:
        parts = [f"{a.spread.mean() / max(a.sampled.mean(), 1e-12):.2f} in layer {a.layer}" for a in self.layers]
        return listing(parts)


def activation_samples(
    name: str,
    learner: GradientLearner,
    images: Tensor,
    *,
    layers: tuple[int, ...] = (1, 2),
    channels: int = 4,
    samples: int = TEST_SAMPLES,
    seed: int = 0,
) -> ActivationData:
    """Run a task's support images with and without noise, and keep the activations of the first.

    Activations are what the `nn.ReLU` after a layer gives; where a network has none, the layer's perturbed output.

    Args:
        name: what the learner is called.
        learner: what to look into; left unchanged.
        images: the support images of a task, normalised together as in an inner step.
        layers: which layers, counted from 1; those that have no height and width are left out.
        channels: how many channels of each layer.
        samples: how many samples of the noise.
        seed: of the noise.
    """
    require_noise(learner, "activations")
    probe, weights, noise = Probe(learner), initial_weights(learner), SeededNoise(seed)
    clean = probe(weights, images)
    noisy = [probe(weights, images, stream=noise.stream(0, number)) for number in range(samples)]
    found = []
    for number, layer in enumerate(clean.hidden, start=1):
        maps = clean.hidden[layer].activation[0]  # (channels, height, width)
        if number not in layers or maps.dim() != 3:
            continue
        best = maps.flatten(1).std(dim=1).topk(min(channels, len(maps))).indices
        sampled = torch.stack([trace.hidden[layer].activation[0][best] for trace in noisy])
        picked = tuple(int(c) for c in best)
        found.append(LayerActivations(number, layer, picked, plain(maps[best]), plain(sampled)))
    if not found:
        raise FigureError(f"activations show maps over the image, and layers {layers} have no height and width")
    return ActivationData(name, pictures(images[:1])[0], tuple(found), seed)


def draw_activations(data: ActivationData, samples: int = 4) -> Figure:
    """Draw, channel by channel, the deterministic activation, some sampled ones, and the deviation over all."""
    headings = ["no noise", *[f"sample {number + 1}" for number in range(samples)], "deviation"]
    rows = sum(len(layer.channels) for layer in data.layers)
    figure, axes = _grid(data, rows, len(headings))
    row = 0
    for layer in data.layers:
        for number, channel in enumerate(layer.channels):
            maps = [layer.deterministic[number], *layer.sampled[:samples, number], layer.spread[number]]
            for cell, values in zip(axes[row], maps, strict=True):
                show(cell, values, 0, layer.high(number), "magma")
            label_row(axes[row, 0], f"layer {layer.layer}\nchannel {channel}")
            row += 1
    for cell, heading in zip(axes[0], headings, strict=True):
        cell.set_title(heading, fontsize=8)
    return figure


def draw_frames(data: ActivationData, frames: int = 12) -> list[Figure]:
    """Draw the frames of an animation: the activations without noise, beside a new sample in each frame."""
    return [_frame(data, sample) for sample in range(min(frames, len(data.layers[0].sampled)))]


def _frame(data: ActivationData, sample: int) -> Figure:
    figure, axes = _grid(data, 2 * len(data.layers), max(len(layer.channels) for layer in data.layers))
    for number, layer in enumerate(data.layers):
        both = ("no noise", layer.deterministic), ("sampled", layer.sampled[sample])
        for cells, (label, maps) in zip(axes[2 * number : 2 * number + 2], both, strict=True):
            for channel, (cell, values) in enumerate(zip(cells, maps, strict=False)):
                show(cell, values, 0, layer.high(channel), "magma")
            label_row(cells[0], f"layer {layer.layer}\n{label}")
    return figure


def _grid(data: ActivationData, rows: int, columns: int) -> tuple[Figure, Any]:
    """Make a figure with the image at the left and cells for maps at the right."""
    figure = new_figure(0.85 * columns + 2.6, 0.85 * rows + 0.7)
    left, right = side_by_side(figure, 1.2, 0.85 * columns + 1.0)
    (cell,) = image_grid(left, 1, 1).flat
    show(cell, data.image, 0, 1)
    cell.set_title("input", fontsize=8)
    figure.suptitle(f"{data.title}: {data.learner}", fontsize=11)
    return figure, image_grid(right, rows, columns)
