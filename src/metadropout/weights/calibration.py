"""Temperatures: what logits are divided by, so that probabilities tell how often answers are right (Guo et al., 2017).

A temperature changes no answer. It is fitted on tasks of validation classes, or of training classes where there are no
validation classes, and what it does is measured on test classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from metadropout.classify.estimator import prepared
from metadropout.classify.module import AdaptedClassifier
from metadropout.data import Episode, EpisodeSampler, Splits
from metadropout.evaluation import calibration_of
from metadropout.learners import Learner
from metadropout.noise import CounterNoise, mix_seed
from metadropout.training.workers import on_one_thread
from metadropout.weights.card import PROTOCOLS, Protocol, Side, Temperature
from metadropout.weights.sets import WeightSet

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
) -> dict[Protocol, Answers]:
    """Adapt a learner to tasks and return what it answers in each protocol, before any temperature.

    Args:
        learner: for tasks of the sampler's way.
        sampler: draws the tasks.
        episodes: how many.
        mc_samples: noise samples per inner step.
        seed: of the noise.
        on_episode: called after each.
    """
    logs: dict[Protocol, list[Tensor]] = {protocol: [] for protocol in PROTOCOLS}
    labels = []
    for number in range(episodes):
        episode = sampler(0, number)

        def adapted(inductive: bool, episode: Episode = episode, number: int = number) -> AdaptedClassifier:
            x, y, noise = episode.support_x, episode.support_y, CounterNoise(mix_seed(seed, number))
            return AdaptedClassifier(learner, x, y, inductive=inductive, mc_samples=mc_samples, generator=noise)

        with on_one_thread(), torch.no_grad():
            module = adapted(inductive=True)
            logs["inductive"].append(module(episode.query_x))
            once = module.keeps_weights
            logs["transductive"].append(
                module.transductive(episode.query_x) if once else adapted(inductive=False)(episode.query_x)
            )
        labels.append(episode.query_y)
        on_episode()
    return {protocol: Answers(torch.cat(parts), torch.cat(labels)) for protocol, parts in logs.items()}


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


def best_start(
    weights: WeightSet,
    splits: Splits,
    *,
    shot: int,
    query: int,
    episodes: int,
    mc_samples: int | None,
    on_episode: Callable[[], None] = lambda: None,
) -> Literal["mean", "rows"]:
    """Return from where classes should start where there are not as many as in training.

    Both are tried on tasks with about half and with twice as many classes, none of them test classes.

    Args:
        weights: the trained ones.
        splits: their data set.
        shot: support images per class.
        query: query images per class.
        episodes: tasks of each number of classes.
        mc_samples: noise samples per inner step.
        on_episode: called after each task.
    """
    own = weights.card.way
    side = "train" if splits.validation is None or len(splits.validation) < 2 * own else "validation"
    images = getattr(splits, side)
    right = {"mean": 0.0, "rows": 0.0}
    for way in (max(2, own // 2 + 1), min(2 * own, len(images))):
        sampler = EpisodeSampler(images, way=way, shot=shot, query=query, seed=mix_seed(2, way))
        for start in right:
            learner = prepared(weights.learner(), way, start=start)  # type: ignore[arg-type]
            found = answers(learner, sampler, episodes, mc_samples=mc_samples, on_episode=on_episode)["inductive"]
            right[start] += float((found.log_probabilities.argmax(dim=1) == found.labels).float().mean())
    return "rows" if right["rows"] > right["mean"] else "mean"


def fit_temperatures(
    learner: Learner,
    splits: Splits,
    *,
    way: int,
    shot: int,
    query: int,
    episodes: int,
    mc_samples: int | None,
    seed: int = 0,
    on_episode: Callable[[], None] = lambda: None,
) -> tuple[Temperature, ...]:
    """Fit a temperature for each protocol on classes that are no test classes, and measure its effect on test classes.

    Args:
        learner: for tasks of that way.
        splits: the data set.
        way: classes in a task.
        shot: support images per class.
        query: query images per class.
        episodes: tasks for fitting, and as many for measuring.
        mc_samples: noise samples per inner step.
        seed: of tasks and noise.
        on_episode: called after each task.
    """
    side: Side = "train" if splits.validation is None or len(splits.validation) < way else "validation"
    found: list[dict[Protocol, Answers]] = []
    for images in (splits.train if side == "train" else splits.validation, splits.test):
        assert images is not None
        seeds = mix_seed(seed, len(found))
        sampler = EpisodeSampler(images, way=way, shot=shot, query=query, seed=seeds)
        found.append(answers(learner, sampler, episodes, mc_samples=mc_samples, seed=seeds, on_episode=on_episode))
    fitted, tested = found
    temperatures = []
    for protocol in PROTOCOLS:
        value = best_temperature(fitted[protocol])
        before, after = tested[protocol], tested[protocol].tempered(value)
        temperatures.append(
            Temperature(
                protocol=protocol,
                value=value,
                fitted_on=side,
                episodes=episodes,
                ece_before=before.ece,
                ece_after=after.ece,
                nll_before=before.nll,
                nll_after=after.nll,
            )
        )
    return tuple(temperatures)
