"""Adaptation with several noise samples in plain PyTorch: one sample after the other, nothing tuned."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from metadropout.bench.plain import logits, weights_and_adapted_names
from metadropout.bench.problem import Problem, Work


def prepare(problem: Problem, samples: int) -> Work:
    """Return one task of an evaluation: inner steps on the mean loss of the samples, then the query images."""
    weights, adapted = weights_and_adapted_names(problem)
    episode, setting = problem.episodes()[0], problem.setting

    def adapt_and_classify() -> dict[str, Tensor]:
        fast = dict(weights)
        for step in range(setting.steps):
            total = {name: torch.zeros_like(fast[name]) for name in adapted}
            for sample in range(samples):
                noise = problem.noise(0).stream(step, sample)
                loss = F.cross_entropy(logits(fast, episode.support_x, noise), episode.support_y)
                gradients = torch.autograd.grad(loss, [fast[name] for name in adapted])
                for name, gradient in zip(adapted, gradients, strict=True):
                    total[name] += gradient
            for name in adapted:
                fast[name] = (fast[name] - setting.inner_lr * total[name] / samples).detach().requires_grad_()
        with torch.no_grad():
            return {"logits": logits(fast, episode.query_x, None)}

    return adapt_and_classify
