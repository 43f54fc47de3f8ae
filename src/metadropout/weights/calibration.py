"""Temperatures: what logits are divided by, so that probabilities tell how often answers are right (Guo et al., 2017).

A temperature changes no answer. It is fitted on tasks of validation classes, or of training classes where there are no
validation classes, and what it does is measured on test classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from metadropout.classify.module import AdaptedClassifier
from metadropout.data import EpisodeSampler, Splits
from metadropout.evaluation import calibration_of
from metadropout.learners import Learner
from metadropout.noise import CounterNoise, mix_seed
from metadropout.training.workers import on_one_thread
from metadropout.weights.card import Protocol, Temperature

SMALLEST, LARGEST = 0.05, 20.0
"""The temperatures among which the best one is looked for."""


class Answers(NamedTuple):
    """The answers to the query images of many tasks of one kind."""

    log_probabilities: Tensor
    """Shape (n, way)."""
    labels: Tensor
    """Shape (n,)."""

    def tempered(self, temperature: float) -> Answers:
        """Return what they would be with this temperature."""
        return Answers(F.log_softmax(self.log_probabilities / temperature, dim=1), self.labels)

    @property
    def nll(self) -> float:
        """Mean negative log-likelihood of the labels."""
        return float(F.nll_loss(self.log_probabilities, self.labels))

    @property
    def ece(self) -> float:
        """Expected calibration error."""
        return calibration_of(self.log_probabilities, self.labels).error


def answers(
    learner: Learner,
    sampler: EpisodeSampler,
    episodes: int,
    *,
    mc_samples: int | None,
    seed: int = 0,
    on_episode: Callable[[], None] = lambda: None,
) -> Answers:
    """Adapt a learner to tasks and return what it answers, before any temperature.

    Args:
        learner: for tasks of the sampler's way.
        sampler: draws the tasks, and says in which protocol they are answered.
        episodes: how many.
        mc_samples: noise samples per inner step.
        seed: of the noise.
        on_episode: called after each.
    """
    logs, labels = [], []
    for number in range(episodes):
        episode = sampler(0, number)
        generator = CounterNoise(mix_seed(seed, number))
        with on_one_thread(), torch.no_grad():
            module = AdaptedClassifier(
                learner,
                episode.support_x,
                episode.support_y,
                inductive=episode.inductive,
                mc_samples=mc_samples,
                generator=generator,
            )
            logs.append(module(episode.query_x))
        labels.append(episode.query_y)
        on_episode()
    return Answers(torch.cat(logs), torch.cat(labels))


def best_temperature(given: Answers) -> float:
    """Return the temperature under which the labels are the likeliest, by golden-section search.

    The likelihood is a concave function of 1 / temperature, so that it has one maximum.
    """
    low, high = math.log(SMALLEST), math.log(LARGEST)
    ratio = (math.sqrt(5) - 1) / 2
    while high - low > 1e-4:
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        if given.tempered(math.exp(left)).nll < given.tempered(math.exp(right)).nll:
            high = right
        else:
            low = left
    return math.exp((low + high) / 2)


def fit_temperature(
    learner: Learner,
    splits: Splits,
    protocol: Protocol,
    *,
    way: int,
    shot: int,
    query: int,
    episodes: int,
    mc_samples: int | None,
    seed: int = 0,
    on_episode: Callable[[], None] = lambda: None,
) -> Temperature:
    """Fit a temperature on classes that are no test classes, and measure on test classes what it does.

    Args:
        learner: for tasks of that way.
        splits: the data set.
        protocol: how query images are normalised.
        way: classes in a task.
        shot: support images per class.
        query: query images per class.
        episodes: tasks for fitting, and as many for measuring.
        mc_samples: noise samples per inner step.
        seed: of tasks and noise.
        on_episode: called after each task.
    """
    side = "train" if splits.validation is None or len(splits.validation) < way else "validation"
    found: list[Answers] = []
    for images in (splits.train if side == "train" else splits.validation, splits.test):
        assert images is not None
        inductive = protocol == "inductive"
        seeds = mix_seed(seed, len(found))
        sampler = EpisodeSampler(images, way=way, shot=shot, query=query, seed=seeds, inductive=inductive)
        found.append(answers(learner, sampler, episodes, mc_samples=mc_samples, seed=seeds, on_episode=on_episode))
    fitted, tested = found
    value = best_temperature(fitted)
    after = tested.tempered(value)
    return Temperature(
        protocol=protocol,
        value=value,
        fitted_on=side,  # type: ignore[arg-type]
        episodes=episodes,
        ece_before=tested.ece,
        ece_after=after.ece,
        nll_before=tested.nll,
        nll_after=after.nll,
    )
