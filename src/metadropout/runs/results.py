"""What tests of a run have measured: one file for each thing that is measured, none ever replaced by a lesser one."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, FiniteFloat, TypeAdapter, ValidationError

from metadropout.config import Config
from metadropout.errors import MetadropoutError
from metadropout.evaluation import BINS, Calibration, Evaluation
from metadropout.files import write_atomically
from metadropout.learners.base import TEST_SAMPLES

Fraction = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=0)]
Bins = Annotated[list[Annotated[FiniteFloat, Field(ge=0)]], Field(min_length=BINS, max_length=BINS)]


@dataclass(frozen=True, kw_only=True)
class Measure:
    """What a test measures: two results of the same measure differ in how many episodes they have, and in nothing else.

    Fields that are None say that the result was written by a version that did not record them.
    """

    split: str = "test"
    state: str = "last"
    seed: Count = 0
    """Of episodes and noise."""
    asked_samples: Annotated[int, Field(ge=1)] | None = None
    """Noise samples that were asked for; methods without randomness use one."""
    episode_list: str | None = None
    way: Annotated[int, Field(ge=1)] | None = None
    shot: Annotated[int, Field(ge=1)] | None = None
    query: Annotated[int, Field(ge=1)] | None = None
    protocol: str | None = None
    data: str | None = None
    """Name of the data set."""
    data_digest: str | None = None
    """Of the images of its classes."""
    test_steps: Count | None = None

    def file_name(self, usual: Measure) -> str:
        """Return the name of the file for this measure, in which only what is not usual for the run is named."""
        own = self
        parts = ["evaluation", own.split]
        parts += [own.state] if own.state != "last" else []
        if (own.data, own.data_digest) != (usual.data, usual.data_digest):
            parts += [own.data or "data", (own.data_digest or "")[:8]]
        if (own.way, own.shot) != (usual.way, usual.shot):
            parts += [f"{own.way}way", f"{own.shot}shot"]
        parts += [f"{own.query}query"] if own.query != usual.query else []
        parts += [str(own.protocol)] if own.protocol != usual.protocol else []
        parts += [f"{own.test_steps}steps"] if own.test_steps != usual.test_steps else []
        parts += [f"{own.asked_samples}samples"] if own.asked_samples != TEST_SAMPLES else []
        parts += [f"seed{own.seed}"] if own.seed else []
        parts += [f"list-{Path(own.episode_list).stem}"] if own.episode_list else []
        return "-".join(parts) + ".json"


@dataclass(frozen=True, kw_only=True)
class TestResult(Measure):
    """What `metadropout evaluate` has written."""

    __test__ = False  # for pytest, which takes classes of such a name for tests

    accuracies: Annotated[list[Fraction], Field(min_length=1)]
    iteration: Count
    mc_samples: Count
    """Noise samples that were used."""
    weights: str | None = None
    """A digest of the weights that were tested."""
    nlls: list[Annotated[FiniteFloat, Field(ge=0)]] | None = None
    calibration: dict[str, Bins] | None = None

    @property
    def result(self) -> Evaluation:
        """Mean, interval and the rest."""
        return Evaluation(
            self.accuracies, self.nlls, None if self.calibration is None else Calibration(**self.calibration)
        )

    def first(self, episodes: int) -> Evaluation | None:
        """Return the result on the first episodes alone, None where there are not as many."""
        if len(self.accuracies) < episodes:
            return None
        return Evaluation(self.accuracies[:episodes], None if self.nlls is None else self.nlls[:episodes])

    def is_of_own_tasks(self, config: Config) -> bool:
        """Say whether a run was tested on the kind of tasks that it was made for."""
        own = config.episode
        wanted: dict[str, object] = {"way": own.way, "shot": own.shot, "query": own.query, "protocol": own.protocol}
        wanted |= {"data": config.data["name"], "test_steps": config.learner.get("test_steps")}
        return all(getattr(self, name) in (None, value) for name, value in wanted.items())

    @property
    def measure(self) -> Measure:
        """What was measured."""
        return Measure(**{field.name: getattr(self, field.name) for field in fields(Measure)})

    @property
    def tasks(self) -> tuple[object, ...]:
        """Which sequence of tasks was met: accuracies on its first ones can be compared task by task."""
        return self.split, self.seed, self.episode_list, self.way, self.shot, self.query, self.data, self.protocol


def read_result(path: Path) -> TestResult:
    """Read a file that `metadropout evaluate` has written.

    Raises:
        MetadropoutError: if it is damaged or something else.
    """
    try:
        result = TypeAdapter(TestResult).validate_json(path.read_bytes())
    except OSError as error:
        raise MetadropoutError(f"{path}: cannot be read: {error.strerror}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = "".join(f"{part}" if number == 0 else f".{part}" for number, part in enumerate(first["loc"]))
        said = first["msg"][:1].lower() + first["msg"][1:]
        raise MetadropoutError(
            f"{path}: {where + ': ' if where else ''}{said}; delete the file and evaluate again"
        ) from None
    if result.nlls is not None and len(result.nlls) != len(result.accuracies):
        raise MetadropoutError(f"{path}: has not as many accuracies as likelihoods; delete it and evaluate again")
    return result


def write_result(path: Path, result: TestResult) -> None:
    """Write a result; one of other weights that has the name is kept under the name of its iteration.

    Raises:
        MetadropoutError: if it cannot be written.
    """
    evaluation = result.result
    content: dict[str, Any] = {
        "mean": evaluation.mean,
        "interval_95": evaluation.interval,
        "nll": evaluation.nll,
        "ece": None if evaluation.calibration is None else evaluation.calibration.error,
        "episodes": len(result.accuracies),
        **vars(result),
    }
    try:
        if path.exists() and not _same_weights(before := read_result(path), result):
            path.rename(path.with_stem(f"{path.stem}-iteration-{before.iteration}"))
        write_atomically(path, json.dumps(content) + "\n")
    except OSError as error:
        raise MetadropoutError(f"{path}: cannot be written: {error.strerror}; the accuracy was {evaluation}") from None


def measured_before(path: Path, wanted: TestResult) -> TestResult | None:
    """Return what has been measured of the same weights in the same way; None where there is nothing of it.

    Args:
        path: the file of the measure.
        wanted: a result like the one wanted, whatever its accuracies.
    """
    before = read_result(path) if path.exists() else None
    return before if before is not None and _same_weights(before, wanted) else None


def _same_weights(before: TestResult, now: TestResult) -> bool:
    """Say whether two results are of the same weights and measure; what an old file does not say may be anything."""
    names = [*(field.name for field in fields(Measure)), "weights", "iteration", "mc_samples"]
    return all(getattr(before, name) in (None, getattr(now, name)) for name in names)
