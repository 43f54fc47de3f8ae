"""A job: a run that is trained and then tested, and how far it has got."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from metadropout.config import MAY_CHANGE, Config, as_text
from metadropout.errors import ConfigError, MetadropoutError
from metadropout.evaluation import Evaluation
from metadropout.learners.base import TEST_SAMPLES
from metadropout.perturbations import PERTURBATIONS
from metadropout.registry import imported
from metadropout.runs.folder import open_run
from metadropout.runs.results import read_result
from metadropout.training.checkpoints import iteration_of, latest_checkpoint
from metadropout.training.metrics import newest_iteration


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run: a recipe with a seed, trained and tested."""

    recipe: str
    """Name of the recipe, or path of a YAML file."""
    seed: int
    folder: Path
    config: Config
    episodes: int
    """How many it is tested on."""
    split: Literal["test", "validation"] = "test"
    """On which classes it is tested."""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """In which options it differs from the recipe."""
    imports: tuple[str, ...] = field(default_factory=lambda: tuple(imported))
    """The user's modules that its parts come from."""

    @property
    def evaluation(self) -> Path:
        """Where the result is written."""
        return self.folder / f"evaluation-{self.split}.json"

    @property
    def log(self) -> Path:
        """Where its commands write; apart from the runs, so that a pattern of their names finds nothing else."""
        return self.folder.parent / "logs" / f"{self.folder.name}.log"

    def result(self) -> Evaluation | None:
        """Return the result, None if the run is not trained or tested as asked."""
        try:
            test = read_result(self.evaluation)
        except MetadropoutError:
            return None
        # Files of earlier versions do not say how many samples were asked for, only how many were used.
        used = TEST_SAMPLES if PERTURBATIONS[self.config.perturbation["name"]].traits.random else 1
        samples = test.asked_samples or (TEST_SAMPLES if test.mc_samples == used else None)
        as_asked = self.split, 0, None, self.config.training.iterations, TEST_SAMPLES
        if (test.split, test.seed, test.episode_list, test.iteration, samples) != as_asked:
            return None
        return test.result if len(test.accuracies) == self.episodes else test.first(self.episodes)

    def iterations_done(self) -> int:
        """Return how many outer steps have been taken, for showing progress."""
        return newest_iteration(self.folder / "metrics.jsonl")

    def conflict(self) -> str | None:
        """Say in what a run that is in the folder already differs from this one; None if this one can go on with it."""
        if not (self.folder / "config.yaml").exists():
            return None
        run = open_run(self.folder)
        found, wanted = run.config.options(), self.config.options()
        # What was asked for by name counts, too, where a run that has begun cannot take it over.
        by_name = [name for name in self.overrides if not name.startswith(MAY_CHANGE)]
        for name in (*self.config.computed_options(), *by_name):
            if found.get(name) != (value := wanted.get(name)):
                return f"{self.folder}: was trained with {name} {as_text(found.get(name))}, not {as_text(value)}"
        latest, asked = latest_checkpoint(run.checkpoints), self.config.training.iterations
        if latest is not None and (done := iteration_of(latest)) > asked:
            return f"{self.folder}: has been trained for {done} iterations already, more than {asked}"
        return None

    def commands(self, threads: int = 1) -> list[list[str]]:
        """Return the arguments of the commands that are still to be run: train or resume, then evaluate.

        Args:
            threads: of each command, unless the job's options say otherwise.
        """
        resumed = (self.folder / "config.yaml").exists()
        which = ["--resume", str(self.folder)]
        if not resumed:
            which = [self.recipe, "--out", str(self.folder), "--seed", str(self.seed)]
        given = [name for name in self.overrides if not resumed or name.startswith(MAY_CHANGE)]
        options = [text for name in given for text in (f"--{name}", as_text(self.overrides[name]))]
        iterations = ["--training.iterations", str(self.config.training.iterations)]
        imports = [text for module in self.imports for text in ("--import", module)]
        # The last of equals counts.
        train = ["train", *which, "--machine.threads", str(threads), *options, *iterations, *imports]
        split = ["--split", self.split] if self.split != "test" else []
        return [train, ["evaluate", str(self.folder), "--episodes", str(self.episodes), *split, *imports]]


def check_folders(jobs: Sequence[Job]) -> None:
    """Refuse folders that hold other runs than those asked for, before any work is done."""
    for job in jobs:
        if conflict := job.conflict():
            raise ConfigError(f"{conflict}; choose another --out, or delete it")
