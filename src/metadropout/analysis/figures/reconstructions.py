"""Perturbed features as images: what the noise means at input level, by a decoder trained on clean features."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from metadropout.analysis.figures.base import FigureData, FigureError, FloatArray, pictures, require_noise
from metadropout.analysis.figures.decoder import DecoderOptions, cached_decoder
from metadropout.analysis.figures.drawing import image_grid, label_row, new_figure, show
from metadropout.analysis.tracing import Probe, initial_weights
from metadropout.data import ImageSet
from metadropout.learners import GradientLearner
from metadropout.learners.base import TEST_SAMPLES
from metadropout.noise import SeededNoise

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TRAINING, SHOWING, PERTURBING = 0, 1, 2
"""Keys that keep the random numbers of the decoder's images, of the shown ones and of the noise apart."""


@dataclass(frozen=True)
class ReconstructionData(FigureData):
    """Images of unseen classes and what the decoder makes of their features."""

    learner: str
    images: FloatArray
    """Shape (images, height, width[, 3])."""
    clean: FloatArray
    """From features without noise, of the same shape."""
    perturbed: FloatArray
    """From features with noise, shape (samples, images, height, width[, 3])."""
    decoder: DecoderOptions

    @property
    def title(self) -> str:
        return "Perturbed features as images"

    @property
    def caption(self) -> str:
        return (
            f"{self.learner}: images of unseen classes, decoded from their layer-{self.decoder.layer} features without "
            f"noise, with noise, and the mean of {len(self.perturbed)} noisy ones. The decoder was trained for "
            f"{self.decoder.iterations} steps on clean features of the training classes (seed {self.decoder.seed}). "
            + self._errors()
        )

    @property
    def alt(self) -> str:
        return (
            f"A row of {len(self.images)} images; below, their reconstructions, clean and perturbed. {self._errors()}"
        )

    def _errors(self) -> str:
        clean = float(np.sqrt(np.square(self.clean - self.images).mean()))
        noisy = float(np.sqrt(np.square(self.perturbed - self.images).mean()))
        return f"Root mean square error per pixel: {clean:.3f} without noise, {noisy:.3f} with noise."


def reconstructions(
    name: str,
    learner: GradientLearner,
    training: ImageSet,
    unseen: ImageSet,
    *,
    cache: Path,
    state: str,
    options: DecoderOptions | None = None,
    shown: int = 8,
    samples: int = TEST_SAMPLES,
    seed: int = 0,
    on_step: Callable[[], None] = lambda: None,
) -> ReconstructionData:
    """Decode features of unseen images, with and without noise, before any inner step.

    All passes normalise a batch of `options.batch` images by its own statistics, so that the decoder meets features as
    it knows them.

    Args:
        name: what the learner is called.
        learner: what to look into; left unchanged.
        training: images that the decoder is trained on.
        unseen: where the shown images come from.
        cache: file in which the decoder is kept.
        state: what tells the learner's state apart from others, such as its checkpoint's checksum.
        options: of the decoder; its layer is the last hidden one where there are fewer.
        shown: how many images.
        samples: how many samples of the noise.
        seed: of the shown images and the noise.
        on_step: called after each step of the decoder's training.
    """
    require_noise(learner, "reconstructions")
    options = options or DecoderOptions(seed=seed)
    probe, weights = Probe(learner), initial_weights(learner)
    device = next(learner.parameters()).device
    if options.layer > len(probe.found.hidden):
        raise FigureError(f"there is no layer {options.layer}: this network has {len(probe.found.hidden)} hidden ones")

    def batch_of(images: ImageSet, *key: int) -> Tensor:
        return _random_images(images, options.batch, key).to(next(learner.parameters()).dtype).to(device)

    decoder = cached_decoder(
        cache,
        state,
        lambda step: batch_of(training, options.seed, TRAINING, step),
        lambda images: probe(weights, images).after(options.layer),
        options,
        on_step,
    )
    images = batch_of(unseen, seed, SHOWING)
    noise = SeededNoise(seed, PERTURBING)
    noisy = []
    for sample in range(samples):
        features = probe(weights, images, stream=noise.stream(0, sample)).after(options.layer)
        noisy.append(pictures(decoder.images(features[:shown])))
    clean = decoder.images(probe(weights, images).after(options.layer)[:shown])
    return ReconstructionData(name, pictures(images[:shown]), pictures(clean), np.stack(noisy), options)


def _random_images(images: ImageSet, n: int, key: tuple[int, ...]) -> Tensor:
    """Draw images of all classes as floats in [0, 1]; the same key gives the same ones."""
    rng = np.random.default_rng(key)
    classes = rng.integers(len(images), size=n)
    numbers = (rng.random(n) * images.class_sizes[classes]).astype(np.int64)
    return torch.from_numpy(images.gather(classes, numbers)).float() / 255


def draw_reconstructions(data: ReconstructionData, samples: int = 4) -> Figure:
    """Draw images, clean reconstructions, some perturbed ones and the mean of all of these, one below the other."""
    rows = [("input", data.images), ("no noise", data.clean)]
    rows += [(f"noise {number + 1}", images) for number, images in enumerate(data.perturbed[:samples])]
    rows.append((f"mean of {len(data.perturbed)}", data.perturbed.mean(axis=0)))
    columns = len(data.images)
    figure = new_figure(0.8 * columns + 1.3, 0.8 * len(rows) + 0.6)
    for cells, (label, images) in zip(image_grid(figure, len(rows), columns), rows, strict=True):
        for cell, image in zip(cells, images, strict=True):
            show(cell, image, 0, 1)
        label_row(cells[0], label)
    figure.suptitle(f"{data.title}: {data.learner}, layer {data.decoder.layer}", fontsize=11)
    return figure
