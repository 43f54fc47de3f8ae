"""Meta-testing: accuracy over many episodes, with its confidence interval."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, Self

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from metadropout.data import Episode, EpisodeSampler, Prefetcher, SavedEpisodes
from metadropout.learners import Learner, accuracy
from metadropout.noise import SeededNoise
from metadropout.training.distributed import ALONE, World
from metadropout.training.workers import Workers


@dataclass(frozen=True)
class Evaluation:
    """Accuracies of a learner on a list of episodes."""

    accuracies: list[float]
    """One per episode, between 0 and 1."""

    @property
    def mean(self) -> float:
        """Mean accuracy over episodes."""
        return float(np.mean(self.accuracies))

    @property
    def interval(self) -> float:
        """Half the width of the 95 % confidence interval of the mean: 1.96 · std / √episodes."""
        return float(1.96 * np.std(self.accuracies) / math.sqrt(len(self.accuracies)))

    def __str__(self) -> str:
        return f"{100 * self.mean:.2f} ± {100 * self.interval:.2f} %"

    @classmethod
    def over_seeds(cls, results: Iterable[Self]) -> Self:
        """Average several runs task by task: all meet the same tasks, so more runs do not make more tasks of them."""
        return cls(np.mean([result.accuracies for result in results], axis=0).tolist())

    def minus(self, other: Evaluation) -> Evaluation:
        """Return the differences task by task, on those first tasks of the sequence that both have met."""
        pairs = zip(self.accuracies, other.accuracies, strict=False)
        return Evaluation([mine - its for mine, its in pairs])


@dataclass(frozen=True)
class TestRecord:
    """What `metadropout evaluate` has written."""

    __test__ = False  # for pytest, which takes classes of such a name for tests

    accuracies: Annotated[list[Annotated[float, Field(ge=0, le=1)]], Field(min_length=1)]
    iteration: Annotated[int, Field(ge=0)]
    mc_samples: Annotated[int, Field(ge=0)]
    split: str = "test"
    state: str = "last"
    seed: Annotated[int, Field(ge=0)] = 0
    episode_list: str | None = None

    @property
    def result(self) -> Evaluation:
        """Mean and interval."""
        return Evaluation(self.accuracies)

    @property
    def tasks(self) -> tuple[object, ...]:
        """Which sequence of tasks was met: accuracies on its first ones can be compared task by task."""
        return self.split, self.seed, self.episode_list


def evaluate(
    learner: Learner,
    sampler: EpisodeSampler | SavedEpisodes,
    *,
    episodes: int,
    mc_samples: int | None,
    seed: int,
    threads: int = 1,
    world: World = ALONE,
    on_episode: Callable[[], None] = lambda: None,
) -> Evaluation:
    """Adapt to each of many episodes and measure the accuracy on its query images.

    Episode e and its noise depend only on the sampler's seed, `seed` and e, so all methods meet the same tasks.

    Args:
        learner: what is tested; it is left unchanged.
        sampler: where the episodes come from: drawn, or a saved list.
        episodes: how many.
        mc_samples: noise samples per inner step.
        seed: seed of the noise.
        threads: episodes side by side in this process.
        world: the processes among which the episodes are shared out; all return the same.
        on_episode: called after each episode of this process, for showing progress.
    """
    device = next(learner.parameters()).device

    def test(learner: Learner, item: tuple[int, Episode]) -> Tensor:
        number, raw = item
        episode, noise = raw.to(device), SeededNoise(seed, number)
        with torch.no_grad():
            classify = learner.adapt(
                episode.support_x,
                episode.support_y,
                inductive=episode.inductive,
                mc_samples=mc_samples,
                generator=noise,
            )
            return accuracy(classify(episode.query_x), episode.query_y)

    with Workers(learner, episodes, threads=threads, world=world) as workers:
        pairs = ((0, number) for number in workers.share)
        with Prefetcher(sampler.raw, pairs, pin_memory=device.type == "cuda") as coming:
            items = zip(workers.share, coming, strict=True)
            return Evaluation(workers.run(test, items, width=1, on_result=on_episode).flatten().tolist())
