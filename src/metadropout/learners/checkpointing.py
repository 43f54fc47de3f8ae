"""Gradient checkpointing: inner steps without their graph, for less memory, each step taken twice.

The graph of a second-order inner loop grows with the number of steps. Here a step leaves nothing behind but its result;
the backward pass takes it again, this time differentiably, and frees it before the step before. Noise is a function of
the step and the sample, so both times are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Weights = dict[str, Tensor]


class Step(Protocol):
    """One inner step: all weights → those that it changes."""

    def __call__(self, weights: Weights, *, differentiable: bool) -> Weights:
        """Take the step, where asked to with a graph of its gradient."""
        ...


def recomputed(step: Step, weights: Weights, adapted: Sequence[str], changed: Sequence[str]) -> Weights:
    """Take a step that is taken again in the backward pass; same values, same gradients.

    Args:
        step: depends on no tensor that requires a gradient but the weights given to it, and on no hidden state.
        weights: all tensors of the task by name.
        adapted: names of those whose gradient the step takes.
        changed: names of those that it changes.
    """
    values = _RecomputedStep.apply(step, list(weights), adapted, changed, *weights.values())  # type: ignore[no-untyped-call]
    return dict(zip(changed, values, strict=True))


class _RecomputedStep(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, step: Step, names: list[str], adapted: Sequence[str], changed: Sequence[str], *values: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.step, ctx.names, ctx.changed = step, names, changed
        ctx.save_for_backward(*values)
        result = step(_leaves(names, values, [name in adapted for name in names]), differentiable=False)
        return tuple(result[name].detach() for name in changed)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[4:]
        leaves = _leaves(ctx.names, ctx.saved_tensors, needed)
        result = ctx.step(leaves, differentiable=True)
        pairs = zip(ctx.changed, cotangents, strict=True)
        # A state may hold constants, which have no gradient.
        outputs, given = zip(*[(result[n], c) for n, c in pairs if result[n].requires_grad], strict=True)
        inputs = [leaf for leaf in leaves.values() if leaf.requires_grad]
        gradients = iter(torch.autograd.grad(outputs, inputs, given, allow_unused=True))
        return None, None, None, None, *(next(gradients) if need else None for need in needed)


def _leaves(names: Sequence[str], values: Sequence[Tensor], needed: Sequence[bool]) -> Weights:
    """Cut the weights off from the graph they come from, and ask for the derivatives that are needed."""
    return {n: v.detach().requires_grad_(need) for n, v, need in zip(names, values, needed, strict=True)}
