"""This project, as `metadropout train` runs it."""

from __future__ import annotations

import torch
from torch import Tensor

from metadropout.bench.problem import Problem, Work


def prepare(problem: Problem) -> Work:
    """Return one meta-iteration up to the averaged gradient."""
    learner = problem.learner()
    learner.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    episodes = problem.episodes()

    def iterate() -> dict[str, Tensor]:
        tasks = [learner.task_gradient(e, generator=problem.noise(task)) for task, e in enumerate(episodes)]
        return {name: torch.stack([task.gradients[name] for task in tasks]).mean(0) for name in tasks[0].gradients}

    return iterate
