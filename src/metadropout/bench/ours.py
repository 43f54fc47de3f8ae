"""This project, as `metadropout train` runs it: the tasks of a meta-batch side by side, a thread each."""

from __future__ import annotations

import torch
from torch import Tensor

from metadropout.bench.problem import Problem, Work
from metadropout.data import Episode
from metadropout.learners import Learner
from metadropout.ops.precision import Precision
from metadropout.training.workers import Workers, on_one_thread, threads_to_use


def prepare(problem: Problem, precision: Precision = "full") -> Work:
    """Return one meta-iteration up to the averaged gradient."""
    learner = problem.learner(precision)
    learner.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    parameters, episodes = dict(learner.named_parameters()), problem.episodes()
    sizes = [parameter.numel() for parameter in parameters.values()]
    workers = Workers(learner, len(episodes), threads=threads_to_use(0))

    def task(learner: Learner, item: tuple[int, Episode]) -> Tensor:
        number, episode = item
        gradients = learner.task_gradient(episode, generator=problem.noise(number)).gradients
        return torch.cat([gradients[name].reshape(-1) for name in parameters])

    def iterate() -> dict[str, Tensor]:
        with on_one_thread():
            mean = workers.run(task, enumerate(episodes), width=sum(sizes)).mean(dim=0)
        parts = zip(parameters.items(), torch.split(mean, sizes), strict=True)
        return {name: part.view_as(parameter) for (name, parameter), part in parts}

    return iterate
