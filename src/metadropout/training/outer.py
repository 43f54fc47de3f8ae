"""The outer step: what is done with the averaged gradients of a meta-batch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from metadropout.config import TrainingOptions


class OuterOptimizer:
    """Clips averaged gradients and takes the optimiser's step at the rate of the schedule.

    Args:
        parameters: what is meta-learned, by the learner's names.
        options: optimiser, rates, schedule and clipping.
    """

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]], options: TrainingOptions) -> None:
        self.options = options
        named = dict(parameters)
        self.parameters = list(named.values())
        factors = [options.perturbation_rate if name.startswith("perturbation.") else 1.0 for name in named]
        groups: dict[float, list[nn.Parameter]] = {}
        for parameter, factor in zip(self.parameters, factors, strict=True):
            groups.setdefault(factor, []).append(parameter)
        self.optimizer = make_optimizer([{"params": p, "factor": f} for f, p in groups.items()], options)

    def step(self, gradients: Sequence[Tensor], iteration: int) -> None:
        """Take one step.

        Args:
            gradients: the mean over tasks for each parameter, in their order.
            iteration: number of the outer step, from 0.
        """
        clip, by = self.options.clip, self.options.clip_by
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = torch.empty_like(parameter).copy_(gradient.view_as(parameter))
            if by == "value":
                parameter.grad.clamp_(-clip, clip)
        if by == "norm":
            nn.utils.clip_grad_norm_(self.parameters, clip)
        for group in self.optimizer.param_groups:
            group["lr"] = group["factor"] * rate_at(iteration, self.options)
        self.optimizer.step()


def make_optimizer(groups: list[dict[str, Any]], options: TrainingOptions) -> torch.optim.Optimizer:
    """Return the optimiser that the options name.

    SGD without momentum at rate ε moves weights by ε along the averaged gradient. For a learner whose "gradient" is how
    far its weights are from the adapted ones, that is plain interpolation, as in Reptile.
    """
    if options.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=options.meta_lr, momentum=options.momentum)
    return torch.optim.Adam(groups, lr=options.meta_lr)


def rate_at(iteration: int, options: TrainingOptions) -> float:
    """Return the rate of an outer step, counted from 0."""
    rate = options.meta_lr
    done = iteration / options.iterations
    if options.schedule == "step":
        rate *= options.schedule_factor ** (iteration // options.schedule_every)
    elif options.schedule == "linear":
        rate *= 1 - done
    elif options.schedule == "cosine":
        rate *= (1 + math.cos(math.pi * done)) / 2
    return rate * min(1.0, (iteration + 1) / options.warmup) if options.warmup else rate
