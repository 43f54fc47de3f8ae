"""Meta-testing: accuracy over many episodes, with its confidence interval."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from metadropout.data import Episode, EpisodeSampler, Prefetcher, SavedEpisodes
from metadropout.learners import Learner, accuracy
from metadropout.noise import SeededNoise
from metadropout.parallel import Workers
from metadropout.processes import ALONE, World


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
            classify = learner.adapt(episode.support_x, episode.support_y, mc_samples=mc_samples, generator=noise)
            return accuracy(classify(episode.query_x), episode.query_y)

    with Workers(learner, episodes, threads=threads, world=world) as workers:
        pairs = ((0, number) for number in workers.share)
        with Prefetcher(sampler.raw, pairs, pin_memory=device.type == "cuda") as coming:
            items = zip(workers.share, coming, strict=True)
            return Evaluation(workers.run(test, items, width=1, on_result=on_episode).flatten().tolist())
