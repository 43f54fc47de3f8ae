"""Meta-testing: accuracy over many episodes, with its confidence interval."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from metadropout.data import EpisodeSampler, Prefetcher, SavedEpisodes
from metadropout.learners import Learner, accuracy
from metadropout.noise import SeededNoise


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
    device: torch.device,
    on_episode: Callable[[float], None] = lambda _: None,
) -> Evaluation:
    """Adapt to each of many episodes and measure the accuracy on its query images.

    Episode e and its noise depend only on the sampler's seed, `seed` and e, so all methods meet the same tasks.

    Args:
        learner: what is tested; it is left unchanged.
        sampler: where the episodes come from: drawn, or a saved list.
        episodes: how many.
        mc_samples: noise samples per inner step.
        seed: seed of the noise.
        device: where to compute.
        on_episode: called with each episode's accuracy, for showing progress.
    """
    accuracies = []
    pairs = ((0, number) for number in range(episodes))
    with Prefetcher(sampler.raw, pairs, pin_memory=device.type == "cuda") as coming:
        for number, raw in enumerate(coming):
            episode = raw.to(device)
            with torch.no_grad():
                classifier = learner.adapt(
                    episode.support_x, episode.support_y, mc_samples=mc_samples, generator=SeededNoise(seed, number)
                )
                accuracies.append(float(accuracy(classifier(episode.query_x), episode.query_y)))
            on_episode(accuracies[-1])
    return Evaluation(accuracies)
