"""Runs side by side: grouped by what they were tested on, pooled over seeds, beside what others report.

Runs of different ways, shots, data sets or protocols meet other tasks, so their accuracies cannot be compared. They are
not refused, as one table of a paper spans several settings, but each setting gets a table of its own.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, TypeVar

import numpy as np
from pydantic import Field, FiniteFloat, TypeAdapter, ValidationError

from metadropout.analysis.report.folders import RunSummary
from metadropout.config import Config, as_text, method_name, task_options
from metadropout.errors import ConfigError
from metadropout.evaluation import Evaluation
from metadropout.recipes import load_recipe, sources
from metadropout.registry import title_of
from metadropout.runs.results import TestResult

T = TypeVar("T")


@dataclass(frozen=True)
class Reference:
    """A figure that others report, and the setting in which they reached it."""

    accuracy: float
    """In %."""
    interval: float | None
    source: str
    iterations: int | None
    """Outer steps of training; None where the figure is the user's own, without a recipe that says."""
    differences: tuple[str, ...] = ()
    """Options in which the run differs from that setting."""


@dataclass(frozen=True)
class Pool:
    """Runs that differ in their seed alone and were tested in the same way, with the test of each."""

    members: tuple[tuple[RunSummary, TestResult], ...]
    reference: Reference | None = None

    @property
    def test(self) -> TestResult:
        """The first run's test, which is like the others in all but its result."""
        return self.members[0][1]

    @property
    def seeds(self) -> list[int]:
        """Of the runs."""
        return [summary.run.config.seed for summary, _ in self.members]

    @property
    def iterations(self) -> int:
        """Outer steps of training that went into the result: for a best state, those among which it was chosen."""
        summary, test = self.members[0]
        return test.iteration if test.state == "last" else summary.iteration

    @property
    def superseded(self) -> bool:
        """Whether the same has been measured of a later state of each of the runs."""
        return all(
            any(other.measure == test.measure and other.iteration > test.iteration for other in summary.tests)
            for summary, test in self.members
        )

    @property
    def result(self) -> Evaluation:
        """Mean and interval over the tasks, each averaged over the seeds."""
        return Evaluation.over_seeds(test.result for _, test in self.members)

    @property
    def spread(self) -> float | None:
        """Standard deviation of the seeds' means, where there are several."""
        means = [test.result.mean for _, test in self.members]
        return float(np.std(means, ddof=1)) if len(means) > 1 else None

    @property
    def difference(self) -> float | None:
        """How far the mean lies above what others report, in points."""
        return 100 * self.result.mean - self.reference.accuracy if self.reference else None

    @property
    def difference_interval(self) -> float | None:
        """The difference's interval: the two were measured independently."""
        theirs = self.reference.interval if self.reference else None
        return None if theirs is None else math.hypot(100 * self.result.interval, theirs)

    def against(self, other: Pool) -> Evaluation:
        """Compare with another pool, which has met the same sequence of tasks, on those that both have met."""
        return self.result.minus(other.result)


@dataclass(frozen=True)
class Method:
    """Runs of one setting whose options are the same, up to their seed."""

    name: str
    number: int
    """Its colour and marker in a setting's charts."""
    runs: tuple[RunSummary, ...]
    pools: tuple[Pool, ...]
    """Tests on the tasks of the setting."""
    other_pools: tuple[Pool, ...]
    """Tests on other tasks."""

    def label(self, summary: RunSummary) -> str:
        """Return what one of its runs is called in a chart: by its seed, and by its name where that is not enough."""
        seeds = [other.run.config.seed for other in self.runs]
        seed = summary.run.config.seed
        return f"{self.name}, seed {seed}" + (f" ({summary.name})" if seeds.count(seed) > 1 else "")

    @property
    def untested(self) -> list[RunSummary]:
        """Runs without any test on the tasks of the setting."""
        return [summary for summary in self.runs if not summary.tests]


@dataclass(frozen=True)
class Row:
    """A row of the table: a run's test, or several seeds together."""

    method: Method
    pool: Pool
    name: str
    """Of the run; empty for several seeds together."""


@dataclass(frozen=True)
class OtherTasks:
    """Tests of a setting's runs on one kind of tasks that they were not made for."""

    title: str
    rows: list[Row]


@dataclass(frozen=True)
class Setting:
    """All runs that were tested on the same kind of tasks."""

    title: str
    details: str
    methods: tuple[Method, ...]

    @property
    def runs(self) -> list[RunSummary]:
        """All runs, method by method."""
        return [summary for method in self.methods for summary in method.runs]

    @property
    def headlines(self) -> list[tuple[Method, Pool]]:
        """The results on test classes, all seeds of a method together, without those of earlier states."""
        pools = [(method, pool) for method in self.methods for pool in method.pools]
        return [(method, pool) for method, pool in pools if pool.test.split == "test" and not pool.superseded]

    @property
    def rows(self) -> list[Row]:
        """The rows of the table: several seeds together first, then each of them."""
        return [row for method in self.methods for row in _rows(method, method.pools)]

    @property
    def other_tasks(self) -> list[OtherTasks]:
        """Tests on other tasks, those on the same ones together."""
        pairs = [(method, pool) for method in self.methods for pool in method.other_pools]
        groups = _grouped(pairs, lambda pair: _kind_of_tasks(pair[1].test))
        return [
            OtherTasks(_tasks_title(group[0][1]), [row for method, pool in group for row in _rows(method, [pool])])
            for group in groups
        ]

    @property
    def span(self) -> tuple[float, float]:
        """Lowest and highest accuracy of all intervals, reported ones included, in %."""
        return span_of(self.rows)

    def best_for(self, method: Method, pool: Pool) -> tuple[Method, Pool] | None:
        """Return the method that is furthest ahead of another after as much training, None if none is."""
        rivals = [(rival, its) for rival, its in self._rivals(method, pool) if its.iterations == pool.iterations]
        best = max(rivals, key=lambda rival: rival[1].against(pool).mean, default=None)
        return best if best and best[1].against(pool).mean > 0 else None

    @property
    def unequal(self) -> list[tuple[Method, Pool]]:
        """Results that are not compared with another method's, because one of them was trained for longer."""
        return [
            (method, pool)
            for method, pool in self.headlines
            if any(its.iterations != pool.iterations for _, its in self._rivals(method, pool))
        ]

    def _rivals(self, method: Method, pool: Pool) -> list[tuple[Method, Pool]]:
        """Return the other methods' results on the same tasks."""
        return [
            (rival, its)
            for rival, its in self.headlines
            if rival is not method and (its.test.tasks, its.test.state) == (pool.test.tasks, pool.test.state)
        ]


def span_of(rows: Sequence[Row]) -> tuple[float, float]:
    """Return the lowest and the highest accuracy of all intervals in a table, reported ones included, in %."""
    results = [row.pool.result for row in rows]
    ends = [100 * (result.mean + sign * result.interval) for result in results for sign in (-1, 1)]
    references = [row.pool.reference for row in rows if row.pool.reference]
    ends += [r.accuracy + sign * (r.interval or 0) for r in references for sign in (-1, 1)]
    return min(ends, default=0.0), max(ends, default=100.0)


def _rows(method: Method, pools: Iterable[Pool]) -> list[Row]:
    rows = []
    for pool in pools:
        if len(pool.members) > 1:
            rows.append(Row(method, pool, ""))
        for summary, test in pool.members:
            rows.append(Row(method, Pool(((summary, test),), pool.reference), summary.name))
    return rows


def compare(summaries: Sequence[RunSummary]) -> list[Setting]:
    """Group runs by what they were tested on, and within that by method.

    Raises:
        ConfigError: if a run's reported figures are no numbers.
    """
    groups = _grouped(summaries, _own_tasks)
    titles = [_setting_title(group[0].run.config) for group in groups]
    options = [_own_tasks(group[0]) for group in groups]
    titles = _told_apart(titles, options)
    return [
        Setting(title, _setting_details(group[0].run.config), _methods(group))
        for title, group in zip(titles, groups, strict=True)
    ]


def _own_tasks(summary: RunSummary) -> dict[str, Any]:
    """Return what the tasks depend on that a run was made for: its options, and which images they are."""
    identity = summary.run.identity()
    return task_options(summary.run.config) | {"images": "unknown" if identity is None else identity.digest[:8]}


def method_options(config: Config) -> dict[str, Any]:
    """Return all options that say what a run computes, seed and number of iterations aside, by dotted name."""
    return {name: value for name, value in config.computed_options().items() if name != "seed"}


def find_reference(config: Config) -> Reference | None:
    """Return what others report for a run's recipe, or for the recipe that has the same options.

    Runs know their figure, but not the setting in which it was reached: options may have been changed on the command
    line. So the recipe is looked for, by its description and else by its options.
    """
    mine = method_options(config)
    recipes = _reported_recipes().items()
    found = next((name for name, recipe in recipes if recipe.description == config.description), None)
    found = found or next((name for name, recipe in recipes if method_options(recipe) == mine), None)
    figures = config.reported or (_reported_recipes()[found].reported if found else {})
    if not figures:
        return None
    checked = _check_figures(figures)
    if found is None or _reported_recipes()[found].reported != figures:
        return Reference(checked.accuracy, checked.interval, "the run's own recipe", None)
    recipe = _reported_recipes()[found]
    differences = tuple(
        f"{name} {as_text(mine.get(name))}, not {as_text(value)}"
        for name, value in method_options(recipe).items()
        if mine.get(name) != value
    )
    return Reference(checked.accuracy, checked.interval, sources()[found], recipe.training.iterations, differences)


@dataclass(frozen=True)
class _Figures:
    accuracy: Annotated[float, Field(ge=0, le=100)]
    interval: FiniteFloat | None = None


def _check_figures(figures: Mapping[str, Any]) -> _Figures:
    try:
        return TypeAdapter(_Figures).validate_python(figures)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        raise ConfigError(f"reported.{name} is {first['input']!r}: {first['msg'].lower()}; give it in %") from None


@cache
def _reported_recipes() -> dict[str, Config]:
    return {name: load_recipe(name) for name in sources()}


def _methods(summaries: Sequence[RunSummary]) -> tuple[Method, ...]:
    groups = _grouped(summaries, lambda summary: method_options(summary.run.config))
    options = [method_options(group[0].run.config) for group in groups]
    names = _told_apart([method_name(group[0].run.config) for group in groups], options)
    return tuple(
        Method(name, number, tuple(group), _own_pools(group), _other_pools(group))
        for number, (name, group) in enumerate(zip(names, groups, strict=True))
    )


def _own_pools(summaries: Sequence[RunSummary]) -> tuple[Pool, ...]:
    """Put tests on the tasks of the setting together that differ in the run's seed alone."""
    tests = [(summary, test) for summary in summaries for test in summary.tests]
    groups = _grouped(tests, lambda pair: _conditions(pair[1]))
    return tuple(Pool(tuple(group), _reference_for(*group[0])) for group in groups)


def _other_pools(summaries: Sequence[RunSummary]) -> tuple[Pool, ...]:
    """Put tests on other tasks together that differ in the run's seed alone; nobody reports figures for them."""
    tests = [(summary, test) for summary in summaries for test in summary.other_tests]
    return tuple(Pool(tuple(group)) for group in _grouped(tests, lambda pair: _conditions(pair[1])))


def _conditions(test: TestResult) -> list[object]:
    return [*test.tasks, test.test_steps, len(test.accuracies), test.state, test.iteration, test.mc_samples]


def _kind_of_tasks(test: TestResult) -> list[object]:
    own = test
    return [own.data, own.data_digest, own.way, own.shot, own.query, own.protocol, own.test_steps]


def _tasks_title(pool: Pool) -> str:
    """Say in words which tasks a run was tested on that it was not made for."""
    summary, test = pool.members[0]
    usual = test.usual(summary.run)
    data = test.data and title_of("data", test.data)
    if test.data == usual.data and test.data_digest != usual.data_digest:
        data = f"{data} with other images"
    title = f"{data}, {test.way}-way {test.shot}-shot, {test.query} query images per class, {test.protocol}"
    return f"{title}, {test.test_steps} inner steps" if test.test_steps != usual.test_steps else title


def _reference_for(summary: RunSummary, test: TestResult) -> Reference | None:
    try:
        return find_reference(summary.run.config) if test.split == "test" else None
    except ConfigError as error:
        raise ConfigError(f"{summary.run.folder / 'config.yaml'}: {error}") from None


def _grouped(items: Iterable[T], key: Callable[[T], Any]) -> list[list[T]]:
    """Group items by a key that JSON can write, in the order of their first members."""
    groups: dict[str, list[T]] = {}
    for item in items:
        groups.setdefault(json.dumps(key(item), sort_keys=True), []).append(item)
    return list(groups.values())


def _told_apart(names: Sequence[str], options: Sequence[Mapping[str, Any]]) -> list[str]:
    """Add to names that occur several times the options in which their bearers differ."""
    told = []
    for name, mine in zip(names, options, strict=True):
        twins = [other for twin, other in zip(names, options, strict=True) if twin == name]
        differing = [key for key in mine if any(twin.get(key) != mine[key] for twin in twins)]
        said = ", ".join(f"{key} {as_text(mine[key])}" for key in differing)
        told.append(f"{name} ({said})" if said else name)
    return told


def _setting_title(config: Config) -> str:
    data = config.data["name"]
    return f"{title_of('data', data)}, {config.episode.way}-way {config.episode.shot}-shot"


def _setting_details(config: Config) -> str:
    normalised = (
        "inductive: each query image is normalised by the statistics of the support images"
        if config.episode.protocol == "inductive"
        else "transductive: the query images of a task are normalised together"
    )
    return f"{config.episode.query} query images per class; {normalised}"
