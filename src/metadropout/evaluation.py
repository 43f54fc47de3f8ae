"""Meta-testing: accuracy, likelihood and calibration over many episodes, with the confidence interval."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from metadropout.data import Episode, EpisodeSampler, Prefetcher, SavedEpisodes
from metadropout.errors import TrainingError
from metadropout.learners import Learner, accuracy
from metadropout.noise import SOURCES, NoiseName
from metadropout.training.distributed import ALONE, World
from metadropout.training.workers import Workers

BINS = 15
"""Bins of confidence over which the calibration error is measured."""


@dataclass(frozen=True)
class Calibration:
    """How often answers of some confidence are right, pooled over all query images, by bins of confidence."""

    counts: list[float]
    confidences: list[float]
    """Sum of the confidences in each bin: of the largest probability of each answer."""
    corrects: list[float]
    """How many of them are right."""

    @property
    def error(self) -> float:
        """Expected calibration error: |accuracy − confidence| of each bin, weighted by how many are in it."""
        gaps = [abs(right - sure) for right, sure in zip(self.corrects, self.confidences, strict=True)]
        return sum(gaps) / max(1.0, sum(self.counts))

    def plus(self, other: Calibration) -> Calibration:
        """Pool with the answers to other images."""
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Calibration(*[np.add(mine, theirs).tolist() for mine, theirs in pairs])


@dataclass(frozen=True)
class Evaluation:
    """How well a learner does on a list of episodes."""

    accuracies: list[float]
    """One per episode, between 0 and 1."""
    nlls: list[float] | None = None
    """Mean negative log-likelihood of the query labels, one per episode; None where it was not measured."""
    calibration: Calibration | None = None
    """Over all episodes; None where it was not measured."""

    @property
    def mean(self) -> float:
        """Mean accuracy over episodes."""
        return float(np.mean(self.accuracies))

    @property
    def interval(self) -> float:
        """Half the width of the 95 % confidence interval of the mean: 1.96 · std / √episodes."""
        return float(1.96 * np.std(self.accuracies) / math.sqrt(len(self.accuracies)))

    @property
    def nll(self) -> float | None:
        """Mean negative log-likelihood over episodes."""
        return None if self.nlls is None else float(np.mean(self.nlls))

    def __str__(self) -> str:
        if len(self.accuracies) == 1:
            return f"{100 * self.mean:.2f} % (a single episode: no interval)"
        return f"{100 * self.mean:.2f} ± {100 * self.interval:.2f} %"

    @classmethod
    def over_seeds(cls, results: Iterable[Self]) -> Self:
        """Average several runs task by task: all meet the same tasks, so more runs do not make more tasks of them."""
        results = list(results)
        nlls = [result.nlls for result in results if result.nlls is not None]
        pooled = [result.calibration for result in results if result.calibration is not None]
        return cls(
            np.mean([result.accuracies for result in results], axis=0).tolist(),
            np.mean(nlls, axis=0).tolist() if len(nlls) == len(results) else None,
            _pooled(pooled) if len(pooled) == len(results) else None,
        )

    def checked(self, first: int = 0) -> Self:
        """Return this, if every answer was a number: an accuracy of answers that are none would mean nothing.

        Args:
            first: number of the first episode.

        Raises:
            TrainingError: naming the first episode whose answers are not finite.
        """
        odd = [number for number, nll in enumerate(self.nlls or [], start=first) if not math.isfinite(nll)]
        if odd:
            raise TrainingError(
                f"the adapted model's answers are not finite numbers in {len(odd)} of {len(self.accuracies)} episodes, "
                f"first in episode {odd[0]}: its weights have grown without bounds, in training or in the inner steps; "
                "test an earlier state (--state best), or train with a lower learner.inner_lr or training.meta_lr"
            )
        return self

    def minus(self, other: Evaluation) -> Evaluation:
        """Return the differences task by task, on those first tasks of the sequence that both have met."""
        pairs = zip(self.accuracies, other.accuracies, strict=False)
        return Evaluation([mine - its for mine, its in pairs])

    def plus(self, other: Evaluation) -> Evaluation:
        """Return the two as one, the other's episodes after these."""
        nlls = None if self.nlls is None or other.nlls is None else self.nlls + other.nlls
        both = [c for c in (self.calibration, other.calibration) if c is not None]
        return Evaluation(self.accuracies + other.accuracies, nlls, _pooled(both) if len(both) == 2 else None)


def _pooled(parts: list[Calibration]) -> Calibration:
    total, *others = parts
    for other in others:
        total = total.plus(other)
    return total


def evaluate(
    learner: Learner,
    sampler: EpisodeSampler | SavedEpisodes,
    *,
    episodes: int,
    mc_samples: int | None,
    seed: int,
    noise: NoiseName = "counter",
    first: int = 0,
    threads: int = 1,
    world: World = ALONE,
    on_episode: Callable[[], None] = lambda: None,
) -> Evaluation:
    """Adapt to each of many episodes and measure how well the query images are classified.

    Episode e and its noise depend only on the sampler's seed, `seed` and e, so all methods meet the same tasks.

    Args:
        learner: what is tested; it is left unchanged.
        sampler: where the episodes come from: drawn, or a saved list; also with more or fewer classes than in training.
        episodes: how many.
        mc_samples: noise samples per inner step.
        seed: seed of the noise.
        noise: how it is computed; a run's own is in its configuration.
        first: number of the first episode, where those before it have been measured.
        threads: episodes side by side in this process.
        world: the processes among which the episodes are shared out; all return the same.
        on_episode: called after each episode of this process, for showing progress.
    """
    device = next(learner.parameters()).device
    learner = learner.for_way(sampler.way)

    def test(learner: Learner, item: tuple[int, Episode]) -> Tensor:
        number, raw = item
        episode = raw.to(device)
        with torch.no_grad():
            classify = learner.adapt(
                episode.support_x,
                episode.support_y,
                inductive=episode.inductive,
                mc_samples=mc_samples,
                generator=SOURCES[noise](seed, number),
            )
            return _measure(classify(episode.query_x), episode.query_y)

    with Workers(learner, episodes, threads=threads, world=world) as workers:
        numbers = [first + number for number in workers.share]
        with Prefetcher(sampler.raw, ((0, number) for number in numbers), pin_memory=device.type == "cuda") as coming:
            items = zip(numbers, coming, strict=True)
            results = workers.run(test, items, width=2 + 3 * BINS, on_result=on_episode).cpu()
    bins = results[:, 2:].double().sum(dim=0).view(3, BINS).tolist()
    return Evaluation(results[:, 0].tolist(), results[:, 1].tolist(), Calibration(*bins))


def calibration_of(log_probabilities: Tensor, labels: Tensor) -> Calibration:
    """Return how often answers of some confidence are right, over all given images."""
    return Calibration(*_bins(log_probabilities.double(), labels).tolist())


def _measure(logits: Tensor, labels: Tensor) -> Tensor:
    """Return an episode's accuracy, mean negative log-likelihood, and bins of confidence, as one vector."""
    logits = logits.detach()
    log_probabilities = F.log_softmax(logits, dim=1)
    nll = F.nll_loss(log_probabilities, labels)
    bins = _bins(log_probabilities, labels)
    return torch.cat([accuracy(logits, labels).view(1).to(bins), nll.view(1).to(bins), bins.flatten()])


def _bins(log_probabilities: Tensor, labels: Tensor) -> Tensor:
    """Return counts, sums of confidences and numbers of right answers by bins of confidence, shape (3, BINS)."""
    confidence, answer = log_probabilities.exp().max(dim=1)
    places = (confidence * BINS).ceil().long().clamp(1, BINS) - 1  # confidences in (0, 1/15] are in the first bin
    bins = confidence.new_zeros(3, BINS)
    values = torch.stack([torch.ones_like(confidence), confidence, (answer == labels).to(confidence)])
    return bins.index_add_(1, places, values)
