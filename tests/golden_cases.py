"""Figures of other programs, and how results are held against them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import metadropout as md

FOLDER = Path(__file__).parent / "golden" / "learners"


def load(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / f"{name}.json").read_text())  # type: ignore[no-any-return]


def draw(r: np.random.RandomState, shape: tuple[int, ...] | list[int], scale: float = 1.0) -> Tensor:
    return torch.from_numpy((r.randn(*shape) * scale).astype("float32").astype("float64"))


def assert_agrees(
    value: Tensor, expected: dict[str, Any], tolerance: float = 1e-8, *, entries: float | None = None, name: str = ""
) -> None:
    """Compare norm, sum and the first entries of a tensor; for single entries there may be another tolerance."""
    array = value.numpy(force=True).astype("float64")
    norm = expected["norm"]
    assert list(array.shape) == expected["shape"], name
    assert np.linalg.norm(array) == pytest.approx(norm, rel=tolerance, abs=1e-14), name
    assert array.sum() == pytest.approx(expected["sum"], abs=tolerance * norm * math.sqrt(array.size) + 1e-14), name
    entry = (entries or tolerance) * norm / math.sqrt(array.size)
    np.testing.assert_allclose(array.ravel()[:5], expected["first"], rtol=0, atol=entry, err_msg=name)


class TwoLayers(nn.Module):
    """logits = tanh(x w1' + b1) w2' + b2."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))  # type: ignore[no-any-return]


NAMES = {"w1": "first.weight", "b1": "first.bias", "w2": "second.weight", "b2": "second.bias"}
"""What the figures call the parameters of `TwoLayers`."""


def vectors(case: dict[str, Any]) -> md.Episode:
    """The task of the cases on `TwoLayers`."""
    r = np.random.RandomState(case["seed"] + 1)
    way, shot, query = case["way"], case["shot"], case["query"]
    support, queries = draw(r, (way * shot, 6)), draw(r, (way * query, 6))
    labels = torch.arange(way)
    return md.Episode(support, labels.repeat_interleave(shot), queries, labels.repeat_interleave(query))


def recorded(case: dict[str, Any], passes: int, seed: int, mc_samples: int = 1) -> md.RecordedNoise:
    """The learner's own draws: of all parameters of `TwoLayers` in each pass."""
    r = np.random.RandomState(seed)
    draws = [draw(r, shape) for _ in range(passes) for shape in case["shapes"].values()]
    return md.RecordedNoise([], per_pass=0, own=md.RecordedNoise(draws, per_pass=4, mc_samples=mc_samples))
