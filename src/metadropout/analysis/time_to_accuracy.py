"""How long runs have trained until they reached an accuracy on validation classes."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from metadropout.errors import ConfigError
from metadropout.runs.folder import Run
from metadropout.training.metrics import load_metrics


@dataclass(frozen=True)
class TimeToAccuracy:
    """When a run reached accuracies."""

    run: Path
    iterations: int
    """How far it has come."""
    seconds_per_iteration: float
    """Median over the log; validations take no part in it."""
    every: int
    """Iterations between validations."""
    reached: dict[float, int | None]
    """For each accuracy in % the iteration of the first validation that reached it; None where none did."""

    def to_dict(self) -> dict[str, Any]:
        """Return all of it for a file."""
        return {**asdict(self), "run": str(self.run)}


def time_to_accuracy(run: Run, levels: Sequence[float]) -> TimeToAccuracy:
    """Read from a run's metrics when it reached accuracies.

    Args:
        run: a run with validation classes, finished or not.
        levels: accuracies in %.
    """
    metrics, options = load_metrics(run.metrics), run.config.training
    speeds = [line.tasks_per_second for line in metrics.training if line.tasks_per_second]
    if not metrics.validation or not speeds:
        raise ConfigError(
            f"{run.folder}: has no validation in its metrics yet; it needs validation classes (for Omniglot "
            "--data.validation_characters 100) and --training.validate_every N"
        )
    first = {
        level: next((line.iteration for line in metrics.validation if 100 * line.accuracy >= level), None)
        for level in levels
    }
    per_iteration = options.meta_batch / statistics.median(speeds)
    return TimeToAccuracy(run.folder, metrics.training[-1].iteration, per_iteration, options.validate_every, first)


def headings(levels: Sequence[float]) -> list[str]:
    """Return the headings of a table of what was found."""
    return ["", "s / iteration", *(f"{level:g} % after" for level in levels)]


def as_rows(found: Sequence[TimeToAccuracy]) -> Iterator[list[str]]:
    """Yield the rows of that table."""
    for one in found:
        times = (
            f"not in {one.iterations} iterations"
            if reached is None
            else f"{reached} iterations, {reached * one.seconds_per_iteration:.0f} s"
            for reached in one.reached.values()
        )
        yield [one.run.name, f"{one.seconds_per_iteration:.3f}", *times]
