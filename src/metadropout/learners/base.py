"""What a learner is: it learns from support images, and is itself meta-learned from query images."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import log_softmax

from metadropout.data import Episode
from metadropout.noise import NoiseSource, as_noise_source

Classifier = Callable[[Tensor], Tensor]
"""An adapted model: images of shape (n, channels, height, width) → logits of shape (n, way)."""

TEST_SAMPLES = 30
"""Noise samples per inner step in meta-testing, as in the paper."""


@dataclass(frozen=True)
class Outcome:
    """How one task went: the loss to be meta-learned from, and the logits of the query images."""

    loss: Tensor
    logits: Tensor
    buffers: dict[str, Tensor] = field(default_factory=dict)
    """What the task makes of the learner's buffers, by name: running averages, say; of several tasks, stacked."""


@dataclass(frozen=True)
class TaskGradient:
    """What one task asks of the meta-parameters, as the outer step averages it."""

    gradients: dict[str, Tensor]
    """By the learner's parameter names; the optimiser descends along their mean over tasks."""
    loss: Tensor
    accuracy: Tensor
    buffers: dict[str, Tensor] = field(default_factory=dict)
    """New values of buffers, by name; `Learner.next_buffer` makes one of those of all tasks."""


class Learner(nn.Module, ABC):
    """A few-shot learner; its parameters, by `named_parameters()`, are what meta-training trains.

    A new learner says how it adapts to support images (`adapt`) and how a whole task goes in meta-training (`forward`).
    One that is not trained by the gradient of a query loss also overrides `task_gradient`. The keyword-only arguments
    of its constructor are its options in recipes and on the command line.
    """

    title: ClassVar[str] = ""
    """What it is called in reports; by default its name in recipes."""
    citation: ClassVar[str] = ""
    """Who described it, as in "Finn et al., 2017"."""
    network_gives: ClassVar[Literal["logits", "a logit", "features"]] = "logits"
    """Whether its network ends with a head that gives a logit for each class, or only one, or without a head."""
    tasks_in_order: ClassVar[bool] = False
    """Whether a task depends on the tasks before it, so that a meta-batch is computed in order, by one thread."""

    @abstractmethod
    def forward(self, episode: Episode, *, generator: torch.Generator | NoiseSource | None = None) -> Outcome:
        """Learn from the episode's support images and judge the result on its query images, differentiably."""

    @abstractmethod
    def adapt(
        self,
        x: Tensor,
        y: Tensor,
        *,
        inductive: bool = False,
        mc_samples: int | None = None,
        generator: torch.Generator | NoiseSource | None = None,
    ) -> Classifier:
        """Learn from labelled images and return a classifier that holds no graph.

        Args:
            x: support images, shape (n, channels, height, width).
            y: their labels, shape (n,).
            inductive: answer for each query image by itself. Otherwise the images of a batch may be normalised
                together (transductive), as MAML and the paper do. A learner without the notion ignores it.
            mc_samples: noise samples to average over; None means the learner's choice for testing.
            generator: source of all randomness; required where there is any.
        """

    def for_way(self, way: int) -> Learner:
        """Return a learner for tasks with that many classes; by default itself, for learners of any way."""
        return self

    def loss(self, episode: Episode, *, generator: torch.Generator | NoiseSource | None = None) -> Tensor:
        """Return the query loss after learning from the support images, differentiable in all parameters."""
        return self.forward(episode, generator=generator).loss

    def task_gradient(
        self, episode: Episode, *, generator: torch.Generator | NoiseSource | None = None
    ) -> TaskGradient:
        """Return one task's share of the outer step; by default the gradient of its query loss."""
        outcome = self.forward(episode, generator=generator)
        names, parameters = zip(*[(n, p) for n, p in self.named_parameters() if p.requires_grad], strict=True)
        gradients = torch.autograd.grad(outcome.loss, parameters, materialize_grads=True)
        return TaskGradient(
            dict(zip(names, gradients, strict=True)),
            outcome.loss.detach(),
            accuracy(outcome.logits.detach(), episode.query_y),
            outcome.buffers,
        )

    def task_gradients(
        self, episodes: Sequence[Episode], generators: Sequence[torch.Generator | NoiseSource | None]
    ) -> list[TaskGradient]:
        """Return `task_gradient` of several tasks, each with a generator of its own; by default one after the other."""
        pairs = zip(episodes, generators, strict=True)
        return [self.task_gradient(episode, generator=generator) for episode, generator in pairs]

    def changed_buffers(self) -> Sequence[str]:
        """Return the names of the buffers that tasks change; every task then gives a value for each of them."""
        return ()

    def next_buffer(self, name: str, values: Tensor) -> Tensor:
        """Return a buffer's value after an outer step, from what the tasks made of it; by default their mean.

        Args:
            name: the buffer's name.
            values: one per task, in their order, shape (tasks, ...).
        """
        return values.mean(dim=0)

    def samples_used(self, asked: int | None = None) -> int:
        """Return how many noise samples it takes if that many are asked for: one where all would be alike.

        Args:
            asked: None means the learner's choice for testing.
        """
        check_samples(1 if asked is None else asked)
        return 1

    def explain_failure(self, episode: Episode, *, generator: torch.Generator | NoiseSource | None = None) -> str:
        """Say why a task gave a loss or gradient that is not a finite number."""
        return "the loss or its gradient is not a finite number"


def accuracy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the fraction of images whose largest logit is their label's."""
    return (logits.argmax(dim=1) == labels).float().mean()


def averaged(classifiers: Sequence[Classifier]) -> Classifier:
    """Return the classifier whose probabilities are the mean of several's; its logits are their logarithms."""
    if len(classifiers) == 1:
        return classifiers[0]
    return lambda x: mean_log_probabilities([classify(x) for classify in classifiers])


def mean_log_probabilities(logits: Sequence[Tensor]) -> Tensor:
    """Return the logarithm of the mean of the probabilities that several logits give to each class."""
    logs = torch.stack([log_softmax(each, dim=-1) for each in logits])  # (samples, n, way)
    return logs.logsumexp(dim=0) - math.log(len(logits))


def check_samples(asked: int) -> int:
    """Return a number of noise samples, which must be at least 1."""
    if asked < 1:
        raise ValueError(f"mc_samples is {asked}; it must be at least 1")
    return asked


def with_class_numbers(episode: Episode) -> Episode:
    """Return an episode whose labels are as losses want them, or refuse it."""
    support_y = class_numbers(episode.support_y, episode.support_x)
    query_y = class_numbers(episode.query_y, episode.query_x)
    if support_y is episode.support_y and query_y is episode.query_y:
        return episode
    return replace(episode, support_y=support_y, query_y=query_y)


def class_numbers(y: Tensor, x: Tensor) -> Tensor:
    """Return the labels of images as int64, which losses want, from integers of any kind; refuse other labels."""
    if y.shape != x.shape[:1]:
        hint = ", which y.argmax(dim=1) gives where they are one-hot" if y.dim() == 2 else ""
        raise ValueError(
            f"labels have shape {tuple(y.shape)}, but {len(x)} images need a class number each, shape ({len(x)},){hint}"
        )
    if y.dtype == torch.int64:
        return y
    if y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
        raise ValueError(f"labels are of type {y.dtype}, but class numbers are integers: y.long()")
    return y.long()


def task_noise(generator: torch.Generator | NoiseSource | None, drawer: object) -> NoiseSource | None:
    """Return the source of a task's randomness, which must be given.

    Args:
        generator: as given by the caller.
        drawer: what draws from it.
    """
    if generator is None:
        raise ValueError(f"{type(drawer).__name__} draws noise: pass a generator")
    return as_noise_source(generator)
