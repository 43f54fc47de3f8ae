"""Projected gradient descent within ℓ1, ℓ2 and ℓ∞ balls, with exact projections onto ball and image range together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

Norm = Literal["l1", "l2", "linf"]

NORMS: tuple[Norm, ...] = get_args(Norm)

L1_COORDINATES = 0.01
"""Share of the coordinates that an ℓ1 step moves along: those of largest gradient."""


def projected_gradient_descent(
    classify: Callable[[Tensor], Tensor],
    x: Tensor,
    y: Tensor,
    *,
    norm: Norm,
    radius: float,
    steps: int,
    start: Tensor | None,
) -> Tensor:
    """Move images so that the loss of their labels rises, within a ball around each and within [0, 1].

    The images are attacked jointly: with batch statistics each one's answer depends on all. The step size is
    2.5 · radius / steps.

    Args:
        classify: images → logits; differentiable in the images.
        x: images in [0, 1], shape (n, ...).
        y: labels.
        norm: which ball.
        radius: its radius.
        steps: how many steps.
        start: movement to start from, None for none.

    Returns:
        The moved images, without graph.
    """
    x = x.detach()
    moved = project(torch.zeros_like(x) if start is None else start, x, norm, radius)
    for _ in range(steps):
        moved, _ = ascend(classify, x, y, moved, norm=norm, radius=radius, size=2.5 * radius / steps)
    return moved_images(x, moved)


@dataclass(frozen=True)
class AttackOutcome:
    """The strongest movement that an attack has found, and what the classifier makes of it.

    What is attacked as a whole is a unit: a batch whose images depend on each other, or else each image.
    """

    moved: Tensor
    """Movement of the images, of their shape."""
    correct: Tensor
    """Fraction of a unit's images that are still classified right, shape (units,)."""
    loss: Tensor
    """Mean loss of a unit, shape (units,)."""

    @property
    def accuracy(self) -> float:
        """Fraction of all images that are still classified right."""
        return float(self.correct.mean())

    def or_stronger(self, other: AttackOutcome) -> AttackOutcome:
        """Return for each unit the movement that fools more images, of equal ones that with the larger loss."""
        stronger = (other.correct < self.correct) | ((other.correct == self.correct) & (other.loss > self.loss))
        per_image = stronger.repeat_interleave(len(self.moved) // len(stronger))
        return AttackOutcome(
            torch.where(per_image.view(-1, *[1] * (self.moved.dim() - 1)), other.moved, self.moved),
            torch.where(stronger, other.correct, self.correct),
            torch.where(stronger, other.loss, self.loss),
        )


def strongest_attack(
    classify: Callable[[Tensor], Tensor],
    x: Tensor,
    y: Tensor,
    *,
    norm: Norm,
    radius: float,
    steps: int,
    starts: Sequence[Tensor],
    jointly: bool,
) -> AttackOutcome:
    """Move images by projected gradient descent from several starts, and keep the strongest point of all paths.

    A start inside the ball is itself such a point: an attack that starts from the result of a smaller radius cannot be
    weaker than that. An attack that has fooled the classifier on all images ends early.

    Args:
        classify: images → logits; differentiable in the images.
        x: images in [0, 1], shape (n, ...).
        y: labels.
        norm: which ball.
        radius: its radius.
        steps: how many steps from each start.
        starts: movements to start from.
        jointly: whether the answer for one image depends on the others, so that movements of different paths cannot
            be mixed: then the strongest is chosen for the batch, otherwise for each image.
    """
    size = 2.5 * radius / steps
    best: AttackOutcome | None = None
    for start in starts:
        moved = project(start, x, norm, radius)
        for _ in range(steps):
            following, logits = ascend(classify, x, y, moved, norm=norm, radius=radius, size=size)
            best = _stronger(best, moved, logits, y, jointly)
            if best.accuracy == 0:
                return best
            moved = following
        with torch.no_grad():
            best = _stronger(best, moved, classify(moved_images(x, moved)), y, jointly)
    if best is None:
        raise ValueError("an attack needs a movement to start from")
    return best


def _stronger(best: AttackOutcome | None, moved: Tensor, logits: Tensor, y: Tensor, jointly: bool) -> AttackOutcome:
    """Judge a movement by its logits, and return the stronger of it and the best one so far."""
    units = 1 if jointly else len(y)
    correct = (logits.argmax(dim=1) == y).to(logits).view(units, -1).mean(dim=1)
    loss = F.cross_entropy(logits, y, reduction="none").view(units, -1).mean(dim=1)
    point = AttackOutcome(moved, correct, loss)
    return point if best is None else best.or_stronger(point)


def ascend(
    classify: Callable[[Tensor], Tensor], x: Tensor, y: Tensor, moved: Tensor, *, norm: Norm, radius: float, size: float
) -> tuple[Tensor, Tensor]:
    """Take one step that raises the loss; return the movement after it, and the logits before it."""
    images = moved_images(x, moved).requires_grad_()
    with torch.enable_grad():
        logits = classify(images)
        (gradient,) = torch.autograd.grad(F.cross_entropy(logits, y, reduction="sum"), images)
    direction = ascent_direction(gradient, images.detach(), norm)
    return project(moved + size * direction, x, norm, radius), logits.detach()


def moved_images(x: Tensor, moved: Tensor) -> Tensor:
    """Add a movement to images; rounding may leave [0, 1] by the last bit, and is cut off."""
    return (x + moved).clamp(0, 1).detach()


def random_movement(x: Tensor, norm: Norm, radius: float, generator: torch.Generator) -> Tensor:
    """Draw a movement of each image uniformly from its ball; it may lead out of [0, 1].

    Args:
        x: images, shape (n, ...).
        norm: which ball.
        radius: its radius.
        generator: on the CPU, so that draws are the same for all devices.
    """
    shape = (len(x), x[0].numel())
    if norm == "linf":
        moved = 2 * torch.rand(shape, generator=generator) - 1
    elif norm == "l2":
        direction = torch.randn(shape, generator=generator)
        distance = torch.rand((len(x), 1), generator=generator) ** (1 / shape[1])
        moved = direction / direction.norm(dim=1, keepdim=True) * distance
    else:
        # n + 1 exponential variables divided by their sum are uniform where all are positive and their sum is one.
        sizes = torch.empty(shape[0], shape[1] + 1).exponential_(generator=generator)
        signs = torch.randint(2, shape, generator=generator) * 2 - 1
        moved = signs * (sizes / sizes.sum(dim=1, keepdim=True))[:, 1:]
    return (radius * moved).view_as(x).to(x)


def ascent_direction(gradient: Tensor, images: Tensor, norm: Norm) -> Tensor:
    """Return for each image the step of length 1 in a norm that raises the loss most (ℓ1: along some coordinates).

    A coordinate that is at the end of the range already cannot be moved further, and takes no part of the step.
    """
    stuck = ((images <= 0) & (gradient < 0)) | ((images >= 1) & (gradient > 0))
    gradient = gradient.masked_fill(stuck, 0)
    if norm == "linf":
        return gradient.sign()
    flat = gradient.flatten(1)
    if norm == "l2":
        length: Tensor = flat.norm(dim=1, keepdim=True)
        return (flat / length.clamp_min(1e-12)).view_as(gradient)
    count = max(1, int(L1_COORDINATES * flat.shape[1]))
    top = flat.abs().topk(count, dim=1).indices
    direction = torch.zeros_like(flat).scatter(1, top, flat.gather(1, top).sign() / count)
    return direction.view_as(gradient)


def project(moved: Tensor, x: Tensor, norm: Norm, radius: float) -> Tensor:
    """Return the nearest movement whose norm is at most the radius and that keeps x + movement in [0, 1].

    Onto both sets together and not one after the other, which would give another point.
    """
    if norm == "linf":
        return torch.minimum(torch.maximum(moved, (-x).clamp_min(-radius)), (1 - x).clamp_max(radius))
    # Signs of a nearest point are those of `moved`, so it is enough to look at sizes v and how far each may go.
    v = moved.flatten(1).abs()
    room = torch.where(moved > 0, 1 - x, x).flatten(1)
    sizes = (_project_l1 if norm == "l1" else _project_l2)(v, room.clamp_min(0), radius)
    return (moved.flatten(1).sign() * sizes).view_as(moved)


def _project_l1(v: Tensor, room: Tensor, radius: float) -> Tensor:
    """Nearest point to v ≥ 0 in {0 ≤ d ≤ room, Σd ≤ radius}: d = clip(v − λ, 0, room), λ found exactly.

    Σd falls piecewise linearly with λ: a coordinate starts to fall at v − room and ends at v. Going through the sorted
    ends from the largest, slope and value at each are cumulative sums.
    """
    inside = torch.minimum(v, room)
    ends = torch.cat([v, v - room], dim=1)  # falling coordinates start to count below v, stop below v − room
    slopes = torch.cat([torch.ones_like(v), -torch.ones_like(v)], dim=1)
    ends, order = ends.sort(dim=1, descending=True)
    slope = slopes.gather(1, order).cumsum(dim=1)  # between this end and the next smaller one
    gaps = torch.cat([ends[:, :-1] - ends[:, 1:], torch.zeros_like(ends[:, :1])], dim=1)
    value = torch.cat([torch.zeros_like(gaps[:, :1]), (slope * gaps).cumsum(dim=1)[:, :-1]], dim=1)  # Σd at each end
    # The last end at which Σd is still at most the radius; λ lies between it and the next.
    index = (value <= radius).sum(dim=1, keepdim=True) - 1
    level = ends.gather(1, index) - (radius - value.gather(1, index)) / slope.gather(1, index).clamp_min(1)
    outside = inside.sum(dim=1, keepdim=True) > radius
    return torch.where(outside, torch.minimum((v - level).clamp_min(0), room), inside)


def _project_l2(v: Tensor, room: Tensor, radius: float) -> Tensor:
    """Nearest point to v ≥ 0 in {0 ≤ d ≤ room, |d|₂ ≤ radius}: d = min(t·v, room), t in (0, 1] found exactly.

    |d|² rises with t, piecewise quadratically: coordinate i is t·v_i below t = room_i / v_i and room_i above.
    """
    inside = torch.minimum(v, room)
    turning = torch.where(v > 0, room / v.clamp_min(torch.finfo(v.dtype).tiny), torch.full_like(v, torch.inf))
    turning, order = turning.sort(dim=1)
    squares, caps = v.square().gather(1, order), room.square().gather(1, order)
    moving = squares.sum(dim=1, keepdim=True) - (squares.cumsum(dim=1) - squares)  # Σv² of those not turned yet
    capped = caps.masked_fill(turning.isinf(), 0).cumsum(dim=1) - caps.masked_fill(turning.isinf(), 0)
    # |d|² at each turning point; the solution lies before the first at which it exceeds the radius.
    at_turn = capped + torch.where(turning.isinf(), torch.inf, turning.square()) * moving.clamp_min(0)
    index = (at_turn.nan_to_num(nan=torch.inf) < radius**2).sum(dim=1, keepdim=True).clamp_max(v.shape[1] - 1)
    remaining = (radius**2 - capped.gather(1, index)).clamp_min(0)
    t = (remaining / moving.gather(1, index).clamp_min(torch.finfo(v.dtype).tiny)).sqrt()
    outside = inside.square().sum(dim=1, keepdim=True) > radius**2
    return torch.where(outside, torch.minimum(t * v, room), inside)
