"""What all figures have in common: data that describes itself, and the reasons why there is none."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from metadropout.analysis.tracing import draws_features
from metadropout.errors import MetadropoutError
from metadropout.learners import GradientLearner

FloatArray = NDArray[np.float32]


class FigureError(MetadropoutError):
    """A figure does not apply to this learner or run; the message says why."""


class FigureData(ABC):
    """What a figure shows, as plain arrays, with the words that belong to it."""

    @property
    @abstractmethod
    def title(self) -> str:
        """A few words for a heading."""

    @property
    @abstractmethod
    def caption(self) -> str:
        """What is drawn, how it was computed, and what it says here."""

    @property
    @abstractmethod
    def alt(self) -> str:
        """What someone who cannot see the picture has to know."""


def require_noise(learner: GradientLearner, figure: str) -> None:
    """Refuse a learner that puts no noise on features."""
    if not draws_features(learner.perturbation):
        name = type(learner.perturbation).__name__
        raise FigureError(f"{figure} show noise on features, and {name} draws none")


def pictures(images: Tensor) -> FloatArray:
    """Turn images (n, channels, height, width) into arrays to show: (n, height, width), or (n, height, width, 3)."""
    arrays = images.detach().float().clamp(0, 1).permute(0, 2, 3, 1).cpu().numpy()
    return arrays if arrays.shape[-1] == 3 else arrays.mean(axis=-1)


def plain(values: Tensor) -> FloatArray:
    """Turn a tensor into an array of its own."""
    return values.detach().float().cpu().numpy().copy()


def listing(words: list[str]) -> str:
    """Join words as one says them: a, b and c."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
