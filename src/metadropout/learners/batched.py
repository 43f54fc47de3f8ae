"""Several tasks as one: a leading task axis on every tensor, and `torch.vmap` over it.

A GPU is not filled by the few images of one task. Here the convolutions of all tasks, each with its own adapted
weights, become one grouped convolution. The inner loop is the one of `gradient.py`; derivatives are taken outside of
`vmap`, of the sum over tasks, which depend on nothing of each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from metadropout.data import Episode
from metadropout.errors import TrainingError
from metadropout.learners.base import TaskGradient, accuracy
from metadropout.noise import NoiseSource, NoiseStream

if TYPE_CHECKING:
    from metadropout.learners.gradient import GradientLearner

OverTasks = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Turns a function of one task's tensors into a function of the stacked tensors of several."""


def one_task(function: Callable[..., Any]) -> Callable[..., Any]:
    """Lift a function over no task axis at all: a single task is not stacked."""
    return function


def can_be_stacked(episodes: Sequence[Episode]) -> bool:
    """Say whether there are several tasks, alike in shape."""
    kinds = {(episode.inductive, *(tensor.shape for tensor in episode.tensors())) for episode in episodes}
    return len(episodes) > 1 and len(kinds) == 1


def stacked_task_gradients(
    learner: GradientLearner, episodes: Sequence[Episode], noises: Sequence[NoiseSource | None]
) -> list[TaskGradient]:
    """Return each task's gradient, all tasks run side by side.

    Args:
        learner: a learner whose network and perturbation `torch.vmap` can run.
        episodes: tasks of equal shapes.
        noises: a source for each task; all None where nothing is random.
    """
    tensors = [torch.stack(tensors) for tensors in zip(*(e.tensors() for e in episodes), strict=True)]
    stacked = Episode(*tensors, inductive=episodes[0].inductive)
    # Every task gets parameters of its own, equal in value, so that their gradients come out one by one.
    weights = {
        name: p.detach().expand(len(episodes), *p.shape).requires_grad_(p.requires_grad)  # (tasks, ...)
        for name, p in learner.initial_weights().items()
    }
    tasks = _Tasks(noises, stacked.query_x.device)
    try:
        outcome = learner.learn(weights, stacked, tasks if all(noises) else None, tasks.over)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise TrainingError(
            f"{type(learner.network).__name__} with {type(learner.perturbation).__name__} cannot run several tasks at "
            f"once, so run them one by one (--machine.tasks loop): {str(error).splitlines()[0]}"
        ) from error
    wanted = {name: weights[name] for name, p in learner.named_parameters() if p.requires_grad}
    gradients = torch.autograd.grad(outcome.loss.sum(), list(wanted.values()), materialize_grads=True)
    losses, logits = outcome.loss.detach(), outcome.logits.detach()
    return [
        TaskGradient(
            {name: gradient[task] for name, gradient in zip(wanted, gradients, strict=True)},
            losses[task],
            accuracy(logits[task], episode.query_y),
            {name: values[task] for name, values in outcome.buffers.items()},
        )
        for task, episode in enumerate(episodes)
    ]


class _Tasks:
    """Runs functions of one task on all of them, and is the source from which each of them draws its own noise."""

    def __init__(self, noises: Sequence[NoiseSource | None], device: torch.device) -> None:
        self.noises, self.numbers = noises, torch.arange(len(noises), device=device)
        self.current = self.numbers
        """Inside of `over` the number of the task being run: to the function a single one, to `vmap` all of them."""

    def over(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Lift a function of one task's tensors."""

        def of_one(task: Tensor, arguments: tuple[Any, ...]) -> Any:
            self.current = task
            return function(*arguments)

        # "same": what is drawn inside is drawn as it stands there; each task then picks its own part of it.
        lifted = torch.vmap(of_one, randomness="same")
        return lambda *arguments: lifted(self.numbers, arguments)

    def stream(self, step: int, sample: int) -> _StackedStream:
        """Return the draws of one pass; asked for in the pass, and so inside of `over`."""
        return _StackedNoise(self, [noise for noise in self.noises if noise is not None]).stream(step, sample)

    def fork(self) -> _StackedNoise:
        """Return the tasks' sources for what the learner draws itself."""
        return _StackedNoise(self, [noise.fork() for noise in self.noises if noise is not None])


class _StackedNoise:
    """The sources of several tasks as one."""

    def __init__(self, tasks: _Tasks, noises: Sequence[NoiseSource]) -> None:
        self._tasks, self._noises = tasks, noises

    def stream(self, step: int, sample: int) -> _StackedStream:
        return _StackedStream([noise.stream(step, sample) for noise in self._noises], self._tasks.current)

    def fork(self) -> _StackedNoise:
        return _StackedNoise(self._tasks, [noise.fork() for noise in self._noises])


class _StackedStream:
    """The draws of one pass of several tasks."""

    def __init__(self, streams: Sequence[NoiseStream], task: Tensor) -> None:
        self._streams, self._task = streams, task

    def normal(self, shape: Sequence[int], like: Tensor) -> Tensor:
        draws = torch.stack([stream.normal(shape, like) for stream in self._streams])  # (tasks, *shape)
        return draws[self._task]

    def numbers(self) -> np.random.Generator:
        raise RuntimeError(
            "numbers that are not normal are drawn; its class should say: traits = Traits(tasks_share_a_batch=False)"
        )
