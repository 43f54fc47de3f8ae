"""Inner steps without their graph: less memory, each step taken twice.

The graph of a second-order inner loop grows with the number of steps. Here a step leaves nothing behind but its result;
the backward pass takes it again, this time differentiably, and frees it before the step before. Noise is a function of
the step and the sample, so both times are the same.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Weights = dict[str, Tensor]


class Step(Protocol):
    """One inner step: all weights → the adapted ones after it."""

    def __call__(self, weights: Weights, *, differentiable: bool) -> Weights:
        """Take the step, where asked to with a graph of its gradient."""
        ...


def recomputed(step: Step, weights: Weights) -> Weights:
    """Take a step that is taken again in the backward pass; same values, same gradients.

    Args:
        step: depends on no tensor that requires a gradient but the weights given to it, and on no hidden state.
        weights: all parameters of the learner by name.
    """
    adapted: list[str] = []  # filled by the step: the names of its results
    values = _RecomputedStep.apply(step, list(weights), adapted, *weights.values())  # type: ignore[no-untyped-call]
    return dict(zip(adapted, values, strict=True))


class _RecomputedStep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, step: Step, names: list[str], adapted: list[str], *values: Tensor) -> tuple[Tensor, ...]:
        ctx.step, ctx.names = step, names
        ctx.save_for_backward(*values)
        result = step(_leaves(names, values, [True] * len(names)), differentiable=False)
        adapted += result
        return tuple(value.detach() for value in result.values())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[3:]
        leaves = _leaves(ctx.names, ctx.saved_tensors, needed)
        result = ctx.step(leaves, differentiable=True)
        wanted = [leaf for leaf in leaves.values() if leaf.requires_grad]
        gradients = iter(torch.autograd.grad(list(result.values()), wanted, cotangents, allow_unused=True))
        return None, None, None, *(next(gradients) if need else None for need in needed)


def _leaves(names: list[str], values: tuple[Tensor, ...], needed: list[bool]) -> Weights:
    """Cut the weights off from the graph they come from."""
    return {n: v.detach().requires_grad_(need) for n, v, need in zip(names, values, needed, strict=True)}
