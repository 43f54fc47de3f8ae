"""Small sets of weights that nobody trained, and drawings to classify with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from metadropout.config import build_learner, parse_config
from metadropout.data import ImageShape
from metadropout.weights import WeightSet, save_weights
from metadropout.weights.card import Temperature, describe

TEMPERATURE = Temperature(
    protocol="inductive",
    value=2.0,
    fitted_on="train",
    episodes=1,
    ece_before=0.1,
    ece_after=0.05,
    nll_before=1.0,
    nll_after=0.9,
)


def toy_weights(
    folder: Path,
    data: str = "glyphs",
    perturbation: str = "metadropout",
    learner: str = "maml",
    name: str = "toy",
    temperatures: tuple[Temperature, ...] = (),
    **network: Any,
) -> WeightSet:
    """Write and read a set of untrained weights: 5-way, 4 channels; of drawings, or in colour for "cifar_fs"."""
    raw = {
        "data": {"name": data},
        "network": {"channels": 4, **network},
        "perturbation": {"name": perturbation},
        "learner": {"name": learner},
    }
    config = parse_config(raw)
    shape = ImageShape(1, 28, 28) if data in ("glyphs", "omniglot") else ImageShape(3, 32, 32)
    built = build_learner(config, shape)
    card = describe(name, config, iterations=0, parameters=1, version="0", temperatures=temperatures)
    return save_weights(folder / f"{name}.safetensors", built, config, shape, card)


def drawings(count: int, kinds: int = 3, seed: int = 0, side: int = 28) -> tuple[NDArray[np.float32], list[str]]:
    """Return noisy bars, a different place for each kind, ink = 1 on paper = 0, and the names of their kinds."""
    rng = np.random.default_rng(seed)
    images = 0.1 * rng.random((count, side, side), dtype=np.float32)
    labels = [f"kind {number % kinds}" for number in range(count)]
    for image, number in zip(images, range(count), strict=True):
        place = 3 + (number % kinds) * (side - 8) // max(1, kinds)
        image[4:-4, place : place + 4] = 1 - 0.1 * rng.random((side - 8, 4))
    return images, labels
