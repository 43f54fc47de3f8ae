"""One meta-iteration by every implementation: the same gradients, then their time, memory and share of the limit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from metadropout.bench.convolutions import flops_of_iteration
from metadropout.bench.implementations import CONVOLUTIONS, Implementation
from metadropout.bench.measuring import Check, OnStep, Ratio, Timing, check_agreement, measure, ratio
from metadropout.bench.problem import Method, Problem, Setting

# In float32 some ReLU or maximum always flips between two programs that add up in another order. Five inner steps can
# make gradients of the same size out of such a flip, so the whole iteration is compared in float64, where none happens,
# and float32 after one inner step.
FLOAT64_TOLERANCE, FLOAT32_TOLERANCE = 1e-8, 0.1

# Of the gradient in another precision, without inner steps: rounding flips maxima and ReLUs, which matters much where
# there are few images. Gradients that have nothing to do with each other would differ by 1.4.
ROUNDED_TOLERANCE = 1.0


@dataclass(frozen=True)
class Comparison:
    """What a meta-iteration took, by implementation."""

    setting: Setting
    method: Method
    flops: int
    """Of the convolutions of a meta-iteration."""
    float64_difference: float
    """Largest relative difference between the meta-gradients of two implementations."""
    float32_difference: float
    """The same in float32 after one inner step."""
    convolutions: Timing
    """The convolutions alone: the limit."""
    results: list[Timing]
    """This project first."""
    rounded_difference: float | None = None
    """That of another precision from float32 without inner steps, where it was measured."""

    def slowdown(self, result: Timing) -> Ratio:
        """Return how many times as long as this project another takes."""
        return ratio(result.seconds, self.results[0].seconds)

    def speedup(self, name: str) -> Ratio:
        """Return how many times as fast as this project another is."""
        (result,) = [result for result in self.results if result.name == name]
        return ratio(self.results[0].seconds, result.seconds)

    def fraction_of_limit(self, result: Timing) -> float:
        """Return how fast it is beside its bare convolutions; above 1 with a faster way to compute them."""
        return ratio(self.convolutions.seconds, result.seconds).median

    def to_dict(self) -> dict[str, Any]:
        """Return everything measured, and what follows from it."""
        summary = {
            result.name: {
                "median_seconds": result.median,
                "times_as_long_as_metadropout": self.slowdown(result)._asdict(),
                "gflops_per_second": self.flops / result.median / 1e9,
                "fraction_of_convolution_limit": self.fraction_of_limit(result),
            }
            for result in self.results
        }
        return {**asdict(self), "summary": summary}


def compare(
    setting: Setting,
    method: Method,
    implementations: Sequence[Implementation],
    *,
    rounds: int,
    threads: int,
    on_step: OnStep,
) -> Comparison:
    """Check that all implementations compute the same meta-gradient, and measure them by turns.

    Args:
        setting: the size of the work.
        method: plain MAML or with Meta-dropout.
        implementations: this project's first, then those that it is compared with; those that are in another
            precision are only to come near it.
        rounds: how often each is timed.
        threads: PyTorch's threads in every process; 0 for its own choice.
        on_step: called `steps_of(...)` times.
    """
    one_step = replace(setting, steps=min(1, setting.steps))
    checks = [
        Check("the meta-gradient in float64", Problem(setting, method, torch.float64), FLOAT64_TOLERANCE),
        Check("the meta-gradient in float32", Problem(one_step, method), FLOAT32_TOLERANCE),
    ]
    exact = [
        implementation.program(threads) for implementation in implementations if implementation.precision == "full"
    ]
    float64, float32 = check_agreement(exact, checks, on_step)
    rounded = None
    if others := _rounded(implementations):
        no_step = Problem(replace(setting, steps=0), method)
        check = Check("the gradient without inner steps", no_step, ROUNDED_TOLERANCE)
        (rounded,) = check_agreement([exact[0], *(i.program(threads) for i in others)], [check], on_step)
    programs = [implementation.program(threads) for implementation in implementations]
    limit = CONVOLUTIONS.program(threads)
    convolutions, *results = measure([limit, *programs], Problem(setting, method), rounds, on_step)
    flops = flops_of_iteration(setting, method)
    return Comparison(setting, method, flops, float64, float32, convolutions, results, rounded)


def steps_of(implementations: Sequence[Implementation], rounds: int) -> int:
    """Return how many steps of progress a comparison has."""
    count, checked_twice = len(implementations), 1 if _rounded(implementations) else 0
    return count + checked_twice + (count + 1) * (rounds + 1)


def _rounded(implementations: Sequence[Implementation]) -> list[Implementation]:
    return [implementation for implementation in implementations if implementation.precision != "full"]
