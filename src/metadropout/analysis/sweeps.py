"""Sweeps: one recipe with several values of its options, compared on validation classes, on a grid or by a search."""

from __future__ import annotations

import csv
import hashlib
import io
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from metadropout.analysis.tables import summary
from metadropout.config import as_text
from metadropout.errors import ConfigError
from metadropout.evaluation import Evaluation
from metadropout.files import write_atomically
from metadropout.jobs import Job
from metadropout.recipes import load_recipe
from metadropout.runs.reading import read_checked

LONGEST_NAME = 120
"""Characters of a run's name; a longer one is cut and told apart by a digest."""


@dataclass(frozen=True)
class Point:
    """Values of the options that a sweep varies, and their runs, one per seed."""

    values: dict[str, Any]
    """By dotted name, as the configuration has them."""
    jobs: list[Job]

    def results(self) -> list[Evaluation]:
        """Return what is measured so far, one result per seed."""
        return [result for job in self.jobs if (result := job.result()) is not None]

    def is_done(self) -> bool:
        """Say whether all its runs are done."""
        return len(self.results()) == len(self.jobs)

    def mean(self) -> float:
        """Return the accuracy, averaged over tasks and seeds."""
        return Evaluation.over_seeds(self.results()).mean


@dataclass(frozen=True)
class Sweep:
    """What all runs of a sweep have in common."""

    recipe: str
    out: Path
    """Folder of the runs."""
    fixed: Mapping[str, Any]
    """Options that differ from the recipe in all runs."""
    seeds: Sequence[int]
    episodes: int
    """Of validation classes, the same ones for all runs."""

    def point(self, values: Mapping[str, Any]) -> Point:
        """Return the runs of some values."""
        overrides = {**self.fixed, **values}
        jobs, checked = [], dict(values)
        for seed in dict.fromkeys(self.seeds):
            config = load_recipe(self.recipe, {**overrides, "seed": seed})
            # As the option's own type has them: 0.10 and 0.1 are the same run.
            checked = {name: config.options()[name] for name in values}
            job = Job(
                recipe=self.recipe,
                seed=seed,
                folder=self.out / f"{_name(checked)}-seed{seed}",
                config=config,
                episodes=self.episodes,
                split="validation",
                overrides={**self.fixed, **checked},
            )
            jobs.append(job)
        return Point(checked, jobs)

    def grid(self, axes: Mapping[str, Sequence[Any]]) -> list[Point]:
        """Return a point for each combination of values, each once."""
        for name, values in axes.items():
            if ranges := [value for value in values if _range(value)]:
                raise ConfigError(f"--{name} {ranges[0]} is a range: give --search TRIALS, or the values one by one")
        points = [self.point(dict(zip(axes, each, strict=True))) for each in itertools.product(*axes.values())]
        return list({point.jobs[0].folder: point for point in points}.values())


def _name(values: Mapping[str, Any]) -> str:
    """Return a folder's name for some values: short, and another one for other values."""
    last = [name.rpartition(".")[2] for name in values]
    short = [own if last.count(own) == 1 else name for own, name in zip(last, values, strict=True)]
    text = "-".join(f"{name}-{as_text(value)}" for name, value in zip(short, values.values(), strict=True))
    plain = re.sub(r"[^A-Za-z0-9._+-]+", "_", text)
    if plain != text or len(plain) > LONGEST_NAME:
        digest = hashlib.sha256(json.dumps(dict(values), sort_keys=True).encode()).hexdigest()[:8]
        plain = f"{plain[:LONGEST_NAME]}-{digest}"
    return plain or "recipe"


def best_point(points: Sequence[Point]) -> Point | None:
    """Return the point with the highest accuracy on validation classes, of those whose runs are all done."""
    return max((point for point in points if point.is_done()), key=Point.mean, default=None)


def as_markdown(points: Sequence[Point]) -> str:
    """Write a table of the points, as far as they are measured, with the best one marked."""
    best, names = best_point(points), list(points[0].values)
    lines = [f"| {' | '.join([*names, 'validation accuracy, %', ''])} |", "|---" * (len(names) + 2) + "|"]
    for point in points:
        cell = summary(point.results(), len(point.jobs))
        if not point.results():
            done, asked = (
                sum(counts)
                for counts in zip(
                    *((job.iterations_done(), job.config.training.iterations) for job in point.jobs), strict=True
                )
            )
            cell = f"not yet ({done} of {asked} iterations)" if done else cell
        cells = [*(as_text(point.values[name]) for name in names), cell, "best" if point is best else ""]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def as_csv(points: Sequence[Point]) -> str:
    """Write one line per run: its options, and what was measured on validation classes; empty where it is not done."""
    table = io.StringIO()
    names = list(points[0].values)
    measured = ["accuracy", "interval_95", "nll", "ece"]
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow([*names, "seed", "iterations", "episodes", *measured, "run"])
    for point in points:
        for job in point.jobs:
            result, cells = job.result(), [""] * len(measured)
            if result is not None:
                error = None if result.calibration is None else result.calibration.error
                figures = (result.mean, result.interval, result.nll, error)
                cells = ["" if figure is None else f"{figure:.6f}" for figure in figures]
            iterations = job.config.training.iterations if result is not None else job.iterations_done()
            own = [as_text(point.values[name]) for name in names]
            writer.writerow([*own, job.seed, iterations, job.episodes, *cells, job.folder])
    return table.getvalue()


@dataclass(frozen=True)
class Range:
    """Numbers between two ends; where these differ ten times or more, their logarithm is searched evenly."""

    least: float
    most: float
    whole: bool

    @property
    def logarithmic(self) -> bool:
        """Whether the logarithm counts."""
        return self.least > 0 and self.most / self.least >= 10

    def rounded(self, value: float) -> float | int:
        """Return a number that can be read and typed: with four digits."""
        return int(value) if self.whole else min(self.most, max(self.least, float(f"{value:.4g}")))


def _range(text: object) -> Range | None:
    """Read a range such as 0.01..1; None where it is something else."""
    number = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
    match = re.fullmatch(rf"({number}?)\.\.({number})", text) if isinstance(text, str) else None
    if match is None or not match[1]:
        return None
    ends = match.groups()
    least, most = map(float, ends)
    if not least < most:
        raise ConfigError(f"the range {text} has no numbers in it: its first end must be the smaller one")
    return Range(least, most, all(re.fullmatch(r"[+-]?\d+", end) for end in ends))


@dataclass(frozen=True)
class _Trials:
    axes: dict[str, list[Any]]
    trials: list[dict[str, Any]]


class Search:
    """Chooses points by what the ones before it have reached, with Optuna's sampler (tree-structured Parzen estimator).

    The trials are kept in a file, so that a search goes on where it was.

    Args:
        sweep: whose points are chosen.
        axes: for each option one range (`0.01..1`) or the values to choose among.
    """

    def __init__(self, sweep: Sweep, axes: Mapping[str, Sequence[Any]]) -> None:
        self._optuna = _optuna()
        self._sweep, self._path = sweep, sweep.out / "search.json"
        self._axes: dict[str, Range | list[Any]] = {}
        for name, values in axes.items():
            found = _range(values[0])
            if found is None and (len(values) == 1 or any(map(_range, values))):
                raise ConfigError(f"--{name}: give a search one range, such as 0.01..1, or several values")
            self._axes[name] = found or list(values)
        asked = {name: list(values) for name, values in axes.items()}
        self._kept = _Trials(asked, [])
        if self._path.exists():
            fix = "delete it to begin another search: runs that it would do again are found in their folders"
            self._kept = read_checked(self._path, TypeAdapter(_Trials), fix)
        if self._kept.axes != asked:
            raise ConfigError(f"{self._path}: is of a search among other values; choose another --out, or delete it")

    def points(self) -> list[Point]:
        """Return the points that were chosen so far."""
        return [self._sweep.point(values) for values in self._kept.trials]

    def choose(self, count: int) -> None:
        """Choose that many further points, by the results of those before, which have been tried, and take note."""
        optuna = self._optuna
        done = len(self._kept.trials)
        study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=done))
        distributions = {name: self._distribution(axis) for name, axis in self._axes.items()}
        for values, point in zip(self._kept.trials, self.points(), strict=True):
            # What was tried and failed, because training diverged, say, is as bad as can be: not to be tried again.
            value, known = point.mean() if point.is_done() else 0.0, self._as_known(values)
            study.add_trial(optuna.trial.create_trial(params=known, distributions=distributions, value=value))
        chosen = [self._as_values(study.ask(distributions).params) for _ in range(count)]
        self._kept.trials.extend(chosen)
        self._sweep.out.mkdir(parents=True, exist_ok=True)
        write_atomically(self._path, json.dumps(vars(self._kept), indent=1) + "\n")

    def _distribution(self, axis: Range | list[Any]) -> Any:
        kinds = self._optuna.distributions
        if isinstance(axis, list):
            return kinds.CategoricalDistribution([as_text(value) for value in axis])
        if axis.whole:
            return kinds.IntDistribution(int(axis.least), int(axis.most), log=axis.logarithmic)
        return kinds.FloatDistribution(axis.least, axis.most, log=axis.logarithmic)

    def _as_values(self, chosen: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of options that Optuna means."""
        values = {}
        for name, axis in self._axes.items():
            if isinstance(axis, list):
                values[name] = next(value for value in axis if as_text(value) == chosen[name])
            else:
                values[name] = axis.rounded(chosen[name])
        return values

    def _as_known(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of options as Optuna knows them."""
        return {
            name: as_text(values[name]) if isinstance(axis, list) else values[name] for name, axis in self._axes.items()
        }


def _optuna() -> Any:
    try:
        import optuna  # noqa: PLC0415 (optional)
    except ImportError:
        raise ConfigError("--search needs Optuna, which is not installed: pip install 'metadropout[search]'") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
