"""What a task costs every row of table 1, in training and in testing, beside MAML in the same run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from metadropout.bench.child import Program
from metadropout.bench.measuring import OnStep, Ratio, Timing, measure, ratio
from metadropout.bench.problem import Setting, Work
from metadropout.bench.report import Report, megabytes, shown_ratio
from metadropout.config import build_learner
from metadropout.data import ArrayImages, Splits
from metadropout.errors import ConfigError
from metadropout.noise import CounterNoise
from metadropout.recipes import load_recipe, tables
from metadropout.training.loop import TESTING, TRAINING, episode_sampler

BASE = "maml"
"""The row that the others are measured against."""

RECIPES = {
    "omniglot-20way": "omniglot-20way-1shot",
    "omniglot-5way": "omniglot-5way-1shot",
    "miniimagenet": "miniimagenet-5way-1shot",
}
"""Settings of recipes, by the settings of the bench."""

OPTIONS = {"way": "episode.way", "shot": "episode.shot", "query": "episode.query", "channels": "network.channels"}
"""What the sizes of the bench are called in a recipe."""


@dataclass(frozen=True)
class Tasks:
    """The tasks that all rows are given; random images of a size, which cost what others cost."""

    setting: str
    """Of the recipes."""
    image_size: int
    in_channels: int
    testing: bool
    overrides: dict[str, int]
    """Options that differ from the recipes."""


@dataclass(frozen=True)
class RowCost:
    """What a task costs one row, and what it cost MAML by turns with it."""

    row: str
    title: str
    training: Timing
    testing: Timing
    base_training: Timing
    base_testing: Timing

    def times_maml(self, *, testing: bool) -> Ratio:
        """Return how many times as long as MAML a task takes."""
        mine, its = (self.testing, self.base_testing) if testing else (self.training, self.base_training)
        return ratio(mine.seconds, its.seconds)

    def to_dict(self) -> dict[str, Any]:
        """Return everything measured, and what follows from it."""
        return {
            **asdict(self),
            "training_times_maml": self.times_maml(testing=False)._asdict(),
            "testing_times_maml": self.times_maml(testing=True)._asdict(),
        }


def rows_to_measure(asked: Sequence[str]) -> list[str]:
    """Return the rows that were asked for, all of the common protocol by default."""
    known = tables()["table1"].groups["common"]
    for row in asked:
        if row not in known:
            raise ConfigError(f"there is no row '{row}' to measure; the rows are {', '.join(known)}")
    return list(asked) or known


def prepare(problem: Tasks, row: str) -> Work:
    """Return one task of a row's training, up to its gradient, or one of its testing, with the samples it uses."""
    config = load_recipe(f"{problem.setting}-{row}", problem.overrides)
    way, shot, query = (
        max(getattr(config.episode, size), getattr(config.episode, f"train_{size}") or 0)
        for size in ("way", "shot", "query")
    )
    shape = (way * (shot + query), problem.in_channels, problem.image_size, problem.image_size)
    pixels = np.random.default_rng(0).random(shape, dtype=np.float32)
    images = ArrayImages(pixels, np.arange(len(pixels)) % way)
    key = TESTING if problem.testing else TRAINING
    sampler = episode_sampler(config, Splits(images, None, images), "test" if problem.testing else "train", key)
    learner, task = build_learner(config, images.image_shape), sampler(0, 0)
    learner.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    tested = learner.for_way(sampler.way)

    def train() -> dict[str, torch.Tensor]:
        return learner.task_gradient(task, generator=CounterNoise(0)).gradients

    def test() -> dict[str, torch.Tensor]:
        with torch.no_grad():
            noise = CounterNoise(0)
            classify = tested.adapt(task.support_x, task.support_y, inductive=task.inductive, generator=noise)
            return {"logits": classify(task.query_x)}

    return test if problem.testing else train


def measure_row(
    setting_name: str, setting: Setting, overrides: dict[str, int], row: str, *, rounds: int, on_step: OnStep
) -> RowCost:
    """Measure a row by turns with MAML, on one thread; `steps_of(rounds)` steps.

    Args:
        setting_name: of the bench.
        setting: its sizes; images of this size are made.
        overrides: options that differ from the recipe.
        row: which one.
        rounds: how often each is timed.
        on_step: called `steps_of(rounds)` times.
    """
    programs = [Program(r, __name__, (r,), keep_freed_memory=True, threads=1) for r in (BASE, row)]
    timings = []
    for testing in (False, True):
        tasks = Tasks(RECIPES[setting_name], setting.image_size, setting.in_channels, testing, overrides)
        timings.append(measure(programs, tasks, rounds, on_step))
    (base_training, training), (base_testing, testing_time) = timings
    return RowCost(row, tables()["table1"].rows[row], training, testing_time, base_training, base_testing)


def steps_of(rounds: int) -> int:
    """Return how many steps of progress a row has."""
    return 4 * (rounds + 1)


def learners_report(setting_name: str, costs: Sequence[RowCost]) -> Report:
    """Put every row of table 1 in a row."""
    rows = [
        [
            cost.title,
            f"{cost.training.median:.3f}",
            shown_ratio(cost.times_maml(testing=False)),
            megabytes(cost.training.peak_memory),
            f"{cost.testing.median:.3f}",
            shown_ratio(cost.times_maml(testing=True)),
            megabytes(cost.testing.peak_memory),
        ]
        for cost in costs
    ]
    headings = ["", "training, s / task", "times MAML", "MB", "testing, s / task", "times MAML", "MB"]
    note = (
        f"One thread, median of {len(costs[0].training.seconds)} rounds; ratios to MAML, measured by turns with each "
        "row, lowest to highest in brackets. Training: a task up to its gradient. Testing: a task with as many noise "
        "samples as the row is tested with."
    )
    return Report(f"The rows of table 1: {tables()['table1'].settings[RECIPES[setting_name]]}", headings, rows, note)
