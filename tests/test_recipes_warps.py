"""The recipes of table 1's gradient-based rows and their relatives say what the papers and their code say."""

from __future__ import annotations

from pathlib import Path

import pytest

from metadropout.cli import main
from metadropout.config import build_learner
from metadropout.data import ImageShape
from metadropout.learners import LEARNERS
from metadropout.perturbations import PERTURBATIONS
from metadropout.recipes import load_recipe, recipe, tables

TABLE = tables()["table1_warps"]
ROWS = [row for row in TABLE.rows if row != "maml"]
ORIGINAL = [row for row in ROWS if row.endswith("-original")]
COMMON = [row for row in ROWS if row not in ORIGINAL]
SMALL = {"network.channels": 2, "network.context": 3}


def parts_of(row: str) -> tuple[str, str]:
    """What a row's name says: its learner and its perturbation."""
    learner = next(name for name in sorted(LEARNERS, key=len, reverse=True) if row.startswith(name))
    return learner, "metadropout" if row.endswith("-metadropout") else "none"


@pytest.mark.parametrize("setting", TABLE.settings)
@pytest.mark.parametrize("row", ROWS)
def test_every_recipe_builds_what_its_name_says(setting: str, row: str) -> None:
    small = {name: value for name, value in SMALL.items() if "cavia" in row or name != "network.context"}
    config = load_recipe(f"{setting}-{row}", small)
    learner = build_learner(config, ImageShape(1, 28, 28))
    kind, perturbation = parts_of(row)
    assert type(learner) is LEARNERS[kind]
    assert type(learner.perturbation) is PERTURBATIONS[perturbation]


@pytest.mark.parametrize("setting", TABLE.settings)
@pytest.mark.parametrize("row", COMMON)
def test_common_rows_have_the_protocol_and_the_outer_loop_of_maml(setting: str, row: str) -> None:
    mine, maml = load_recipe(f"{setting}-{row}"), load_recipe(f"{setting}-maml")
    assert (mine.data, mine.episode, mine.training) == (maml.data, maml.episode, maml.training)
    assert mine.network["channels"] == maml.network["channels"]
    assert not mine.reported  # nobody reports this row in this protocol
    if row.startswith("cavia"):
        assert (mine.network["context"], mine.network["norm"]) == (100, "batch")
        assert (mine.learner["inner_lr"], mine.learner["steps"]) == (1.0, 2)
    else:
        assert mine.network == maml.network
        assert (mine.learner["inner_lr"], mine.learner["steps"]) == (maml.learner["inner_lr"], 5)


# As published: inner rate on the mean loss, steps, meta-batch, iterations, query images in training and testing, clip.
MTNET = {
    "omniglot-20way-1shot": (2.0, 1, 16, 40_000, 1, 1, None),
    "omniglot-20way-5shot": (2.0, 1, 16, 40_000, 5, 5, None),
    "omniglot-5way-1shot": (2.0, 1, 32, 2000, 1, 1, None),
    "miniimagenet-5way-1shot": (0.05, 5, 4, 60_000, 15, 1, 10 * 1 / (5 * 15)),
    "miniimagenet-5way-5shot": (0.05, 5, 4, 60_000, 15, 5, 10 * 5 / (5 * 15)),
}


@pytest.mark.parametrize("setting", MTNET)
def test_mtnets_original_setting_is_that_of_its_code(setting: str) -> None:
    c = load_recipe(f"{setting}-mtnet-original")
    clip = None if c.training.clip_by == "none" else pytest.approx(c.training.clip, abs=1e-4)
    numbers = (c.learner["inner_lr"], c.learner["steps"], c.training.meta_batch, c.training.iterations)
    assert (*numbers, c.episode.train_query, c.episode.query, clip) == MTNET[setting]
    assert c.training.meta_lr == 1e-3
    assert c.reported == {
        "omniglot-20way-1shot": {"accuracy": 96.2, "interval": 0.4},
        "miniimagenet-5way-1shot": {"accuracy": 51.70, "interval": 1.84},
    }.get(setting, {})


@pytest.mark.parametrize(
    ("width", "figures"),
    [
        (32, ((47.24, 0.65), (59.05, 0.54))),
        (128, ((49.84, 0.68), (64.63, 0.54))),
        (512, ((51.82, 0.65), (65.85, 0.55))),
    ],
)
def test_cavias_original_setting_is_that_of_its_code(width: int, figures: tuple[tuple[float, float], ...]) -> None:
    for shot, (accuracy, interval), meta_batch in zip((1, 5), figures, (4, 2), strict=True):
        c = load_recipe(f"miniimagenet-5way-{shot}shot-cavia-{width}-original")
        assert (c.network["channels"], c.network["context"], c.network["norm"]) == (width, 100, "batch")
        assert (c.learner["inner_lr"], c.learner["steps"], c.episode.query) == (1.0, 2, 15)
        t = c.training
        assert (t.meta_lr, t.schedule, t.schedule_every, t.schedule_factor) == (1e-3, "step", 5000, 0.9)
        assert (t.meta_batch, t.iterations, t.clip, t.clip_by) == (meta_batch, 60_000, 10, "value")
        assert c.reported == {"accuracy": accuracy, "interval": interval}


@pytest.mark.parametrize("row", ROWS)
def test_every_row_trains_a_step_at_a_tiny_size_and_is_evaluated(row: str, tmp_path: Path) -> None:
    tiny = ["--training.iterations", "1", "--training.meta_batch", "1", "--training.validation_episodes", "1"]
    tiny += ["--network.channels", "2", "--learner.steps", "2", "--machine.threads", "1"]
    tiny += ["--data.train_classes", "6", "--data.validation_classes", "6", "--data.test_classes", "6"]
    assert main(["train", f"glyphs-5way-1shot-{row}", "--out", str(tmp_path / "run"), *tiny]) == 0
    assert main(["evaluate", str(tmp_path / "run"), "--episodes", "1", "--mc-samples", "2"]) == 0


def test_a_recipe_is_shown_with_its_quoted_figure() -> None:
    assert recipe("miniimagenet-5way-1shot-mtnet-original")["reported"] == {"accuracy": 51.7, "interval": 1.84}
