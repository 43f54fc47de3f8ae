"""Measuring work in processes of their own, by turns; and checking first that all give the same."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from metadropout.bench.child import Arrays, Child, Program
from metadropout.errors import MetadropoutError

OnStep = Callable[[str], None]
"""Called with what comes next, for showing progress."""


@dataclass(frozen=True)
class Timing:
    """What one program took."""

    name: str
    seconds: list[float]
    """One per round."""
    peak_memory: int
    """Bytes above what the process used after its imports."""

    @property
    def median(self) -> float:
        """Median of the rounds, in seconds."""
        return statistics.median(self.seconds)


class Ratio(NamedTuple):
    """How two times compare: taken within each round, so that it holds on a busy machine as well."""

    median: float
    lowest: float
    highest: float


def ratio(a: Sequence[float], b: Sequence[float]) -> Ratio:
    """Divide the times of one by those of another, round by round."""
    ratios = [x / y for x, y in zip(a, b, strict=True)]
    return Ratio(statistics.median(ratios), min(ratios), max(ratios))


def measure(programs: Sequence[Program], problem: object, rounds: int, on_step: OnStep) -> list[Timing]:
    """Time each program once in every round, after one time that does not count.

    Steps of progress: len(programs) * (rounds + 1).
    """
    seconds: list[list[float]] = [[] for _ in programs]
    with ExitStack() as stack:
        children = [stack.enter_context(Child(program)) for program in programs]
        for child in children:
            child.prepare(problem)
        for number in range(rounds + 1):
            for child, times in zip(children, seconds, strict=True):
                on_step(f"{child.program.name}, " + (f"round {number} of {rounds}" if number else "warming up"))
                times.append(child.seconds())
        return [
            Timing(child.program.name, times[1:], child.peak_memory())
            for child, times in zip(children, seconds, strict=True)
        ]


@dataclass(frozen=True)
class Check:
    """A problem on which all programs must agree."""

    what: str
    """What is compared, for messages."""
    problem: object
    tolerance: float


def check_agreement(programs: Sequence[Program], checks: Sequence[Check], on_step: OnStep) -> list[float]:
    """Return by how much the programs' results differ from the first one's, at most, for each check.

    The difference is that of all values together: the norm of what differs by the norm of the first result.
    Steps of progress: len(programs).

    Raises:
        MetadropoutError: if some program does not compute the same thing; comparing speeds would be meaningless.
    """
    results: list[list[Arrays]] = []
    for program in programs:  # one after the other, so that only one holds its memory
        on_step(f"{program.name}, checking its results")
        with Child(program) as child:
            results.append([child.result(check.problem) for check in checks])
    largest = []
    for check, expected, *others in zip(checks, *results, strict=True):
        differences = [difference(other, expected) for other in others]
        for program, found in zip(programs[1:], differences, strict=True):
            if not found <= check.tolerance:
                raise MetadropoutError(
                    f"{program.name} does not compute the same as {programs[0].name}: {check.what} differs by "
                    f"{found:.1e}, more than {check.tolerance:.0e}; there is nothing to compare"
                )
        largest.append(max(differences))
    return largest


def difference(result: Arrays, reference: Arrays) -> float:
    """Return the relative difference of all values together; infinite where other values are there."""
    if result.keys() != reference.keys():
        return float("inf")
    ours, theirs = (np.concatenate([arrays[name].ravel() for name in reference]) for arrays in (result, reference))
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))
