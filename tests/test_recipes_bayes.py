"""The recipes of first-order MAML and of table 1's other rows with inner steps say what papers and code say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import metadropout as md
from metadropout.cli import main
from metadropout.config import Config, build_learner
from metadropout.data import ImageShape
from metadropout.learners import LEARNERS
from metadropout.recipes import load_recipe, sources, tables

TABLES = [tables()["table1_bayes"], tables()["first_order"]]
ROWS = [row for table in TABLES for row in table.rows if row != "maml"]
RECIPES = [(setting, row) for setting in TABLES[0].settings for row in ROWS]
PAPER = ["omniglot-20way-1shot", "omniglot-20way-5shot", "miniimagenet-5way-1shot", "miniimagenet-5way-5shot"]
ORIGINAL = [row for row in ROWS if row.endswith("-original")]

# As quoted in table 1 of the paper; first-order MAML's in its own and Reptile's.
QUOTED: dict[str, list[tuple[float, float] | None]] = {
    "lstm-original": [None, None, (43.44, 0.77), (60.60, 0.71)],
    "reptile-original": [(89.43, 0.14), (97.12, 0.32), (49.97, 0.32), (65.99, 0.58)],
    "abml-original": [None, None, (45.00, 0.60), None],
    "platipus-original": [None, None, (50.13, 1.86), None],
    "fomaml-original": [(89.4, 0.5), (97.9, 0.1), (48.07, 1.75), (63.15, 0.91)],
}
# Steps, rate, iterations, tasks per outer step, outer rate, and query images of a test.
SETTINGS: dict[str, list[tuple[Any, ...] | None]] = {
    "lstm-original": [None, None, (12, 0.011, 75_000, 1, 1e-3, 15), (8, 0.011, 50_000, 1, 1e-3, 15)],
    "reptile-original": [(10, 5e-4, 200_000, 5, 1.0, 1)] * 2 + [(8, 1e-3, 100_000, 5, 1.0, 1)] * 2,
    "abml-original": [None, None, (5, 0.01, 60_000, 2, 1e-3, 15), None],
    "platipus-original": [None, None, (5, 0.05, 60_000, 4, 1e-3, 1), None],
    "fomaml-original": [
        (5, 2.0, 40_000, 16, 1e-3, 1),
        (5, 2.0, 40_000, 16, 1e-3, 5),
        (5, 0.05, 60_000, 4, 1e-3, 1),
        (5, 0.05, 60_000, 4, 1e-3, 5),
    ],
}


def numbers(config: Config) -> tuple[Any, ...]:
    learner, training = config.learner, config.training
    outer = training.iterations, training.meta_batch, training.meta_lr
    return learner["steps"], learner["inner_lr"], *outer, config.episode.query


def test_each_row_has_the_common_protocol_and_its_own() -> None:
    assert set(ORIGINAL) == set(QUOTED)
    assert {row.removesuffix("-original") for row in ORIGINAL} <= set(ROWS)
    assert {learner for row in ROWS for learner in [row.partition("-")[0]]} == {
        *("fomaml", "lstm", "reptile", "abml", "platipus")
    }
    for table in TABLES:
        assert next(iter(table.rows)) == "maml"
        assert set(PAPER) < table.settings.keys()


@pytest.mark.parametrize(("setting", "row"), [recipe for recipe in RECIPES if recipe[1] not in ORIGINAL])
def test_common_rows_have_the_network_and_the_tests_of_maml_and_its_outer_loop_but_for_their_own(
    setting: str, row: str
) -> None:
    mine, maml = load_recipe(f"{setting}-{row}"), load_recipe(f"{setting}-maml")
    assert (mine.data, mine.network) == (maml.data, maml.network)
    for name in ("way", "shot", "query", "protocol"):
        assert getattr(mine.episode, name) == getattr(maml.episode, name)
    assert not mine.reported  # nobody reports this row in this protocol
    assert mine.training.iterations == maml.training.iterations
    if row == "reptile":
        t = mine.training
        assert (t.optimizer, t.momentum, t.meta_lr, t.schedule, t.clip_by) == ("sgd", 0.0, 1.0, "linear", "none")
        assert mine.episode.train_shot in (10, 15)
    elif row == "lstm":
        t = mine.training
        assert (t.optimizer, t.meta_lr, t.clip, t.clip_by) == ("adam", 1e-3, 0.25, "norm")
        assert mine.learner["steps"] == (12 if mine.episode.shot == 1 else 5)
    else:
        assert mine.training == maml.training
        assert (mine.learner["inner_lr"], mine.learner["steps"]) == (maml.learner["inner_lr"], 5)


@pytest.mark.parametrize("row", ORIGINAL)
@pytest.mark.parametrize("number", range(4), ids=PAPER)
def test_original_rows_have_the_setting_of_the_quoted_figure(row: str, number: int) -> None:
    name = f"{PAPER[number]}-{row}"
    config, quoted = load_recipe(name), QUOTED[row][number]
    if quoted is None:
        assert not config.reported
        return
    assert config.reported == dict(zip(("accuracy", "interval"), quoted, strict=True))
    assert sources()[name]
    assert numbers(config) == SETTINGS[row][number]
    assert config.network["channels"] == (64 if number < 2 else 32)
    inductive = config.episode.protocol, config.episode.train_protocol
    assert inductive == (("inductive", "transductive") if row == "lstm-original" else ("transductive", None))
    if row in ("lstm-original", "reptile-original"):
        assert (config.network["norm"], config.network["norm_eps"]) == ("batch", 1e-3)
    if row == "reptile-original":
        batches = config.learner["batch"], config.learner["test_batch"], config.learner["test_steps"]
        assert batches == ((20, 10, 50) if number < 2 else (10, {2: 5, 3: 15}[number], 50))
        assert config.episode.train_shot == (10 if number < 2 else 15)


@pytest.mark.parametrize(("setting", "row"), RECIPES)
def test_every_recipe_builds_a_small_learner_of_its_kind(setting: str, row: str) -> None:
    config = load_recipe(f"{setting}-{row}", {"network.channels": 2})
    learner = build_learner(config, ImageShape(1, 28, 28))
    assert type(learner) is LEARNERS[row.partition("-")[0]]
    assert isinstance(learner.perturbation, md.MetaDropout) == row.endswith("metadropout")


@pytest.mark.parametrize("setting", TABLES[0].settings)
def test_abmls_divergence_weighs_less_where_inner_steps_are_larger(setting: str) -> None:
    for row in ("abml", "abml-metadropout"):
        learner = load_recipe(f"{setting}-{row}").learner
        assert 0.05 < learner["kl_weight"] * (learner["inner_lr"] / 0.01) ** 2 < 0.2


@pytest.mark.parametrize("row", ROWS)
def test_every_row_trains_a_step_at_a_tiny_size_and_is_evaluated(row: str, tmp_path: Path) -> None:
    tiny = ["--training.iterations", "1", "--training.meta_batch", "1", "--training.validation_episodes", "1"]
    tiny += ["--network.channels", "2", "--episode.query", "1", "--machine.threads", "1"]
    assert main(["train", f"glyphs-5way-1shot-{row}", "--out", str(tmp_path / "run"), *tiny]) == 0
    assert main(["evaluate", str(tmp_path / "run"), "--episodes", "1"]) == 0
