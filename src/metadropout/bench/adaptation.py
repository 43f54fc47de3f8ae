"""Meta-testing: the noise samples of an inner step as one batch in chunks, beside loops over them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from metadropout.bench import plain_adaptation
from metadropout.bench.child import Program
from metadropout.bench.measuring import Check, OnStep, Ratio, Timing, check_agreement, measure, ratio
from metadropout.bench.problem import Problem, Setting, Work

SHOTS = (1, 5)
SAMPLES = (1, 30, 100)
FLOAT64_TOLERANCE = 1e-8


@dataclass(frozen=True)
class AdaptationCost:
    """What adapting to one task and classifying its query images took."""

    setting: Setting
    samples: int
    float64_difference: float
    """Relative difference of the logits."""
    batch: Timing
    loop: Timing
    """One sample after the other with the same kernels."""
    plain: Timing
    """One sample after the other in plain PyTorch."""

    def speedup(self, loop: Timing) -> Ratio:
        """Return how many times as long a loop takes."""
        return ratio(loop.seconds, self.batch.seconds)

    def to_dict(self) -> dict[str, Any]:
        """Return everything measured, and what follows from it."""
        return {
            **asdict(self),
            "loop_takes_times_as_long": self.speedup(self.loop)._asdict(),
            "plain_takes_times_as_long": self.speedup(self.plain)._asdict(),
        }


def prepare(problem: Problem, samples: int, one_by_one: bool) -> Work:
    """Return one task of an evaluation, as `metadropout evaluate` runs it or with one sample per pass."""
    learner = problem.learner()
    if one_by_one:
        learner.images_per_pass = 1
    episode = problem.episodes()[0]

    def adapt_and_classify() -> dict[str, torch.Tensor]:
        with torch.no_grad():
            noise = problem.noise(0)
            classify = learner.adapt(episode.support_x, episode.support_y, mc_samples=samples, generator=noise)
            return {"logits": classify(episode.query_x)}

    return adapt_and_classify


def measure_adaptation(setting: Setting, samples: int, *, rounds: int, on_step: OnStep) -> AdaptationCost:
    """Check that all three ways give the same logits, and measure them by turns; `steps_of(rounds)` steps.

    On one thread, as `metadropout evaluate` runs as many tasks side by side as there are threads.
    """
    setting = replace(setting, meta_batch=1)
    size = f"{setting.shot}-shot, {samples} samples"
    programs = [
        Program(f"one batch, {size}", __name__, (samples, False), keep_freed_memory=True, threads=1),
        Program(f"loop, {size}", __name__, (samples, True), keep_freed_memory=True, threads=1),
        Program(f"plain loop, {size}", plain_adaptation.__name__, (samples,), threads=1),
    ]
    exact = Problem(setting, "metadropout", torch.float64)
    (found,) = check_agreement(programs, [Check("the logits", exact, FLOAT64_TOLERANCE)], on_step)
    return AdaptationCost(setting, samples, found, *measure(programs, Problem(setting, "metadropout"), rounds, on_step))


def steps_of(rounds: int) -> int:
    """Return how many steps of progress a measurement has."""
    return 3 + 3 * (rounds + 1)
