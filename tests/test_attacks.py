"""Projections onto ball and image range together, and what the attack does with them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize

from metadropout.attacks import Norm, ascent_direction, project, projected_gradient_descent

NORMS: list[Norm] = ["l1", "l2", "linf"]
ORDER = {"l1": 1, "l2": 2, "linf": float("inf")}


def oracle(v: np.ndarray, x: np.ndarray, norm: Norm, radius: float) -> np.ndarray:
    """The nearest point by bisection on the multiplier of the ball, clipped to the box: slow and plain."""
    low, high = -x, 1 - x

    def point(t: float) -> np.ndarray:
        if norm == "linf":
            return np.clip(v, np.maximum(low, -radius), np.minimum(high, radius))
        if norm == "l2":
            return np.clip(v / (1 + t), low, high)
        return np.clip(np.sign(v) * np.maximum(np.abs(v) - t, 0), low, high)

    def size(t: float) -> float:
        return float(np.linalg.norm(point(t), ORDER[norm])) - radius

    if size(0) <= 0:
        return point(0)
    upper = 1.0
    while size(upper) > 0:
        upper *= 2
    return point(float(optimize.brentq(size, 0, upper, xtol=1e-15, rtol=1e-15, maxiter=500)))


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    n=st.integers(1, 12),
    radius=st.sampled_from([0.001, 0.1, 0.5, 1.0, 3.0]),
    scale=st.sampled_from([0.01, 0.3, 2.0, 50.0]),
    norm=st.sampled_from(NORMS),
    on_edge=st.booleans(),
)
def test_projection_is_the_nearest_point_of_ball_and_box(
    seed: int, n: int, radius: float, scale: float, norm: Norm, on_edge: bool
) -> None:
    rng = np.random.default_rng(seed)
    x = rng.integers(0, 2, n).astype(float) if on_edge else rng.random(n)
    v = rng.normal(size=n) * scale * rng.integers(0, 2, n)
    got = project(torch.from_numpy(v)[None], torch.from_numpy(x)[None], norm, radius)[0].numpy()
    np.testing.assert_allclose(got, oracle(v, x, norm, radius), atol=1e-9)


@pytest.mark.parametrize("norm", NORMS)
def test_projection_agrees_with_a_quadratic_program(norm: Norm) -> None:
    rng = np.random.default_rng(0)
    x, v, radius = rng.random(6), rng.normal(size=6), 0.7
    got = project(torch.from_numpy(v)[None], torch.from_numpy(x)[None], norm, radius)[0].numpy()
    # d = p − q with p, q ≥ 0 makes the ℓ1 ball linear.
    solved = optimize.minimize(
        lambda z: float(((z[:6] - z[6:] - v) ** 2).sum()),
        np.zeros(12),
        jac=lambda z: np.concatenate([2 * (z[:6] - z[6:] - v), -2 * (z[:6] - z[6:] - v)]),
        bounds=[(0, None)] * 12,
        constraints=[
            {"type": "ineq", "fun": lambda z: radius - z.sum()}
            if norm == "l1"
            else {"type": "ineq", "fun": lambda z: radius**2 - ((z[:6] - z[6:]) ** 2).sum()}
            if norm == "l2"
            else {"type": "ineq", "fun": lambda z: radius - np.abs(z[:6] - z[6:])},
            {"type": "ineq", "fun": lambda z: z[:6] - z[6:] + x},
            {"type": "ineq", "fun": lambda z: 1 - x - (z[:6] - z[6:])},
        ],
        method="SLSQP",
        options={"ftol": 1e-14, "maxiter": 1000},
    )
    np.testing.assert_allclose(got, solved.x[:6] - solved.x[6:], atol=1e-5)


@pytest.mark.parametrize("norm", NORMS)
def test_attack_stays_inside_its_ball_and_the_image_range_and_raises_the_loss(norm: Norm) -> None:
    torch.manual_seed(0)
    weight = torch.randn(3, 20, dtype=torch.float64)
    x, y = torch.rand(8, 20, dtype=torch.float64), torch.randint(3, (8,))
    radius = {"l1": 1.0, "l2": 0.5, "linf": 0.1}[norm]

    def loss(images: torch.Tensor) -> float:
        return torch.nn.functional.cross_entropy(images @ weight.T, y).item()

    moved = projected_gradient_descent(lambda z: z @ weight.T, x, y, norm=norm, radius=radius, steps=20, start=None)
    assert not moved.requires_grad
    assert moved.min() >= 0
    assert moved.max() <= 1
    assert torch.linalg.vector_norm(moved - x, ORDER[norm], dim=1).max() <= radius * (1 + 1e-9)
    assert loss(moved) > loss(x) + 0.05


def test_an_l1_step_has_length_one_and_leaves_stuck_coordinates_alone() -> None:
    gradient = torch.tensor([[3.0, -5.0, 1.0]])
    images = torch.tensor([[0.5, 0.0, 0.5]])  # the second cannot fall any further
    assert ascent_direction(gradient, images, "l1").tolist() == [[1.0, 0.0, 0.0]]
