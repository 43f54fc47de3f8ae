"""Projections onto ball and image range together, and what the attack does with them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize

from metadropout.robustness.attacks import (
    NORMS,
    Norm,
    ascent_direction,
    project,
    projected_gradient_descent,
    random_movement,
    strongest_attack,
)

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


@pytest.mark.parametrize("norm", NORMS)
def test_a_step_has_length_one_and_leaves_stuck_coordinates_alone(norm: Norm) -> None:
    gradient = torch.tensor([[4.0, -5.0, 3.0, 2.0]])
    images = torch.tensor([[0.5, 0.0, 0.5, 1.0]])  # the second cannot fall any further, the last not rise
    expected = {"l1": [1.0, 0.0, 0.0, 0.0], "l2": [0.8, 0.0, 0.6, 0.0], "linf": [1.0, 0.0, 1.0, 0.0]}
    torch.testing.assert_close(ascent_direction(gradient, images, norm), torch.tensor([expected[norm]]))


@pytest.fixture
def linear() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Images, labels that a linear classifier gets right, and its weights."""
    g = torch.Generator().manual_seed(0)
    weight = torch.randn(3, 20, generator=g, dtype=torch.float64)
    x = 0.25 + 0.5 * torch.rand(9, 20, generator=g, dtype=torch.float64)
    return x, (x @ weight.T).argmax(dim=1), weight


@pytest.mark.parametrize("norm", NORMS)
def test_random_movements_fill_the_ball_and_follow_the_seed(norm: Norm) -> None:
    x = torch.zeros(4000, 2)
    moved = random_movement(x, norm, 3.0, torch.Generator().manual_seed(0))
    again = random_movement(x, norm, 3.0, torch.Generator().manual_seed(0))
    assert torch.equal(moved, again)
    sizes = torch.linalg.vector_norm(moved, ORDER[norm], dim=1)
    assert sizes.max() <= 3.0 * (1 + 1e-6)
    # In two dimensions a quarter of a ball lies within half its radius, and each quadrant holds a quarter.
    assert (sizes < 1.5).float().mean() == pytest.approx(0.25, abs=0.03)
    assert ((moved[:, 0] > 0) & (moved[:, 1] > 0)).float().mean() == pytest.approx(0.25, abs=0.03)


@pytest.mark.parametrize("jointly", [True, False])
@pytest.mark.parametrize("norm", NORMS)
def test_attack_does_nothing_at_radius_zero_and_fools_all_at_a_huge_one(
    norm: Norm, jointly: bool, linear: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
) -> None:
    x, y, weight = linear
    start = random_movement(x, norm, 1.0, torch.Generator().manual_seed(0))
    accuracies = []
    for radius in (0.0, 100.0):
        result = strongest_attack(
            lambda z: z @ weight.T, x, y, norm=norm, radius=radius, steps=40, starts=[start], jointly=jointly
        )
        assert torch.linalg.vector_norm(result.moved, ORDER[norm], dim=1).max() <= radius * (1 + 1e-9)
        accuracies.append(result.accuracy)
    assert accuracies == [1.0, 0.0]


@pytest.mark.parametrize("norm", NORMS)
def test_an_attack_cannot_be_weaker_than_its_start(
    norm: Norm, linear: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
) -> None:
    """Its steps lead back to where the classifier is right: the gradient has the wrong sign."""
    x, y, weight = linear
    good = strongest_attack(
        lambda z: z @ weight.T, x, y, norm=norm, radius=50.0, steps=40, starts=[torch.zeros_like(x)], jointly=True
    )

    def misleading(z: torch.Tensor) -> torch.Tensor:
        turned = 2 * z.detach() - z  # the same values, the opposite gradient
        return turned @ weight.T

    kept = strongest_attack(misleading, x, y, norm=norm, radius=60.0, steps=5, starts=[good.moved], jointly=True)
    assert kept.accuracy == good.accuracy == 0.0
    path = projected_gradient_descent(misleading, x, y, norm=norm, radius=60.0, steps=40, start=good.moved)
    assert ((path @ weight.T).argmax(dim=1) == y).any()  # where the last step would have ended


def test_a_batch_whose_images_depend_on_each_other_is_kept_as_a_whole_and_others_image_by_image() -> None:
    """Each start fools another image; only images that do not depend on each other can take the best of both."""
    x, y = torch.full((2, 1), 0.5), torch.tensor([0, 0])

    def classify(z: torch.Tensor) -> torch.Tensor:
        return torch.cat([0.6 - z, torch.zeros_like(z)], dim=1)  # right below 0.6

    starts = [torch.tensor([[0.3], [0.0]]), torch.tensor([[0.0], [0.4]])]
    results = [
        strongest_attack(
            # Without gradient no step moves anything: what counts are the starts.
            lambda z: classify(z.detach()) + 0 * z,
            x,
            y,
            norm="linf",
            radius=0.5,
            steps=1,
            starts=starts,
            jointly=jointly,
        )
        for jointly in (True, False)
    ]
    assert results[0].accuracy == 0.5
    torch.testing.assert_close(results[0].moved, starts[1])  # the same accuracy, a larger loss
    assert results[1].accuracy == 0.0
    torch.testing.assert_close(results[1].moved, torch.tensor([[0.3], [0.4]]))
