"""Looking into adapted models, for the page: decision boundaries, multipliers and sampled features as plain numbers."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from metadropout.analysis.figures.activations import activation_samples
from metadropout.analysis.figures.base import FigureError
from metadropout.analysis.figures.boundaries import PERTURBED, QUERY, SUPPORT, decision_boundaries
from metadropout.analysis.figures.multipliers import multiplier_maps
from metadropout.data import Episode
from metadropout.learners import GradientLearner

KINDS = {SUPPORT: "support", PERTURBED: "perturbed", QUERY: "query"}
MOVED_COPIES = 8
"""Of each example, where a class has no other images to test with."""
SHOWN_SAMPLES = 6


def boundary(
    learners: Mapping[str, GradientLearner],
    support: tuple[Tensor, Tensor],
    others: tuple[Tensor, Tensor],
    mine: Tensor | None,
    samples: int,
) -> list[dict[str, Any]]:
    """Adapt learners to two classes and return where images lie about the decision boundary (appendix C).

    Args:
        learners: by name.
        support: images and labels, 0 or 1.
        others: more images of the two classes, with their labels.
        mine: an image of unknown class, shape (1, channels, height, width).
        samples: noise samples per step.
    """
    query_x, query_y = others
    if mine is not None:
        query_x, query_y = torch.cat([query_x, mine]), torch.cat([query_y, query_y.new_zeros(1)])
    episode = Episode(*support, query_x, query_y, inductive=True)
    found = []
    for (panel,) in decision_boundaries(learners, episode, mc_samples=samples).panels:
        count = len(panel.kind)
        points = [
            {
                "x": round(float(panel.distance[i]), 4),
                "y": round(float(panel.height[i]), 4),
                "kind": "mine" if mine is not None and i == count - 1 else KINDS[int(panel.kind[i])],
                "class": int(panel.true[i]),
                "predicted": int(panel.predicted[i]),
            }
            for i in range(count)
        ]
        tested = [point for point in points if point["kind"] == "query"]
        right = sum(point["class"] == point["predicted"] for point in tested)
        found.append({"weights": panel.learner, "points": points, "right": right, "tested": len(tested)})
    return found


def moved_copies(images: Tensor, copies: int = MOVED_COPIES) -> Tensor:
    """Return copies of images, each turned, resized and shifted a little; shape (n · copies, ...), image by image."""
    rng = np.random.default_rng(0)
    turn, scale = rng.uniform(-0.22, 0.22, copies), np.exp(rng.uniform(-0.15, 0.15, copies))
    shift = rng.uniform(-0.12, 0.12, (copies, 2))
    rows = [np.stack([np.cos(turn), -np.sin(turn)], 1) / scale[:, None], np.stack([np.sin(turn), np.cos(turn)], 1)]
    rows[1] = rows[1] / scale[:, None]
    matrix = np.concatenate([np.stack(rows, 1), shift[:, :, None]], axis=2)  # (copies, 2, 3)
    matrices = torch.from_numpy(matrix.astype(np.float32)).repeat(len(images), 1, 1)
    repeated = images.repeat_interleave(copies, dim=0)
    padding = "zeros" if images.shape[1] == 1 else "border"
    grid = F.affine_grid(matrices, list(repeated.shape), align_corners=False)
    return F.grid_sample(repeated, grid, padding_mode=padding, align_corners=False)


def multipliers(name: str, learner: GradientLearner, images: Tensor) -> dict[str, Any]:
    """Return what each layer's outputs are multiplied by, over each image; or why there is nothing to see."""
    try:
        data = multiplier_maps(name, learner, images, shown=20, channels=4)
    except FigureError as reason:
        return {"weights": name, "reason": str(reason)}
    layers = [
        {
            "layer": layer.layer,
            "channels": list(layer.channels),
            "maps": [[as_map(one, layer.low, layer.high) for one in channel] for channel in layer.maps],
            "low": round(layer.low, 3),
            "high": round(layer.high, 3),
        }
        for layer in data.layers
    ]
    return {"weights": name, "layers": layers}


def sampled_features(name: str, learner: GradientLearner, images: Tensor, image: int) -> dict[str, Any]:
    """Return activations of one of the images, without noise and with samples of it; or why there is no noise."""
    order = [image, *(number for number in range(len(images)) if number != image)]
    try:
        data = activation_samples(name, learner, images[order], channels=2, samples=30)
    except FigureError as reason:
        return {"weights": name, "reason": str(reason)}
    layers = []
    for layer in data.layers:
        channels = []
        for number, channel in enumerate(layer.channels):
            high = layer.high(number)
            shown = [layer.deterministic[number], *layer.sampled[:SHOWN_SAMPLES, number], layer.spread[number]]
            channels.append({"channel": channel, "maps": [as_map(one, 0.0, high) for one in shown]})
        layers.append({"layer": layer.layer, "channels": channels})
    return {"weights": name, "layers": layers, "samples": SHOWN_SAMPLES}


def as_map(values: NDArray[np.float32], low: float, high: float) -> dict[str, Any]:
    """Return a map over the image as bytes, from the lowest to the highest value of its scale."""
    scaled = np.clip((values - low) / max(high - low, 1e-12), 0, 1)
    content = np.rint(255 * scaled).astype(np.uint8)
    return {"height": values.shape[0], "width": values.shape[1], "data": base64.b64encode(content.tobytes()).decode()}
