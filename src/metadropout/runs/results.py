"""What tests of a run have measured: one file for each thing that is measured, none ever replaced by a lesser one."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, FiniteFloat, TypeAdapter

from metadropout.errors import MetadropoutError
from metadropout.evaluation import BINS, Calibration, Evaluation
from metadropout.files import write_atomically
from metadropout.learners.base import TEST_SAMPLES
from metadropout.runs.folder import Run
from metadropout.runs.reading import read_checked

Fraction = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=0, lt=2**63)]
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

    def usual(self, run: Run) -> Measure:
        """Return what this would be on the tasks that a run was made for."""
        own, identity = run.config, run.identity()
        return Measure(
            **{name: getattr(self, name) for name in ("split", "state", "seed", "asked_samples", "episode_list")},
            way=own.episode.way,
            shot=own.episode.shot,
            query=own.episode.query,
            protocol=own.episode.protocol,
            data=own.data["name"],
            data_digest=self.data_digest if identity is None else identity.digest,
            test_steps=own.learner.get("test_steps"),
        )

    def file_name(self, usual: Measure) -> str:
        """Return the name of the file for this measure, in which only what is not usual for the run is named."""
        own = self
        parts = ["evaluation", own.split]
        if own.state != "last":
            parts += [f"iteration{own.state}" if own.state.isdecimal() else own.state]
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
    asked_episodes: Count | None = None
    """How many episodes the test was to have; it has fewer where it was stopped."""
    weights: str | None = None
    """A digest of the weights that were tested."""
    nlls: list[Annotated[FiniteFloat, Field(ge=0)]] | None = None
    calibration: dict[str, Bins] | None = None

    def __post_init__(self) -> None:
        if self.nlls is not None and len(self.nlls) != len(self.accuracies):
            raise ValueError("there are not as many accuracies as likelihoods")
        if self.calibration is not None and self.calibration.keys() != {f.name for f in fields(Calibration)}:
            raise ValueError("the calibration must have counts, confidences and corrects")

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

    def is_of_own_tasks(self, run: Run) -> bool:
        """Say whether a run was tested on the kind of tasks that it was made for."""
        return self.way is None or self.measure == self.usual(run)  # versions that recorded less had no others

    def completed(self, run: Run) -> TestResult:
        """Return a result of a run's own tasks with what earlier versions did not record of them."""
        usual = self.usual(run)
        unknown = [field.name for field in fields(Measure) if getattr(self, field.name) is None]
        return replace(self, **{name: getattr(usual, name) for name in unknown})

    @property
    def measure(self) -> Measure:
        """What was measured."""
        return Measure(**{field.name: getattr(self, field.name) for field in fields(Measure)})

    @property
    def tasks(self) -> tuple[object, ...]:
        """Which sequence of tasks was met: accuracies on its first ones can be compared task by task."""
        own = self
        what = own.way, own.shot, own.query, own.protocol, own.data, own.data_digest
        return own.split, own.seed, own.episode_list, *what

    def is_during_training(self) -> bool:
        """Say whether a state was tested that training went on from."""
        return self.state.isdecimal()

    def stopped(self) -> bool:
        """Say whether fewer episodes were measured than were asked for."""
        return self.asked_episodes is not None and len(self.accuracies) < self.asked_episodes

    def command_options(self, run: Run) -> list[object]:
        """Return the options of `metadropout evaluate` that measure the same of a run, to the number asked for."""
        usual, own = self.usual(run), self
        options: list[object] = ["--episodes", max(len(own.accuracies), own.asked_episodes or 0)]
        options += ["--mc-samples", own.asked_samples or own.mc_samples, "--seed", own.seed]
        options += ["--split", own.split] if own.split != "test" else []
        options += ["--state", own.state] if own.state != "last" else []
        options += ["--episode-list", own.episode_list] if own.episode_list else []
        if own.way is None:
            return options
        options += ["--data.name", own.data] if own.data != usual.data else []
        if own.data == usual.data and own.data_digest != usual.data_digest:
            options += ["--data.directory", "FOLDER"]
        for name in ("way", "shot", "query", "protocol"):
            if getattr(own, name) != getattr(usual, name):
                options += [f"--episode.{name}", getattr(own, name)]
        options += ["--learner.test_steps", own.test_steps] if own.test_steps != usual.test_steps else []
        return options


def read_result(path: Path) -> TestResult:
    """Read a file that `metadropout evaluate` has written.

    Raises:
        RunFileError: if it is damaged or something else.
    """
    return read_checked(path, TypeAdapter(TestResult), "delete it and evaluate again")


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
