"""The recipes of table 1's metric-based rows say what the papers and their code say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import metadropout as md
from metadropout.cli import main
from metadropout.config import Config, build_learner
from metadropout.data import ImageShape
from metadropout.recipes import load_recipe, recipe, tables

TABLE = tables()["table1_metric"]
RECIPES = [(setting, row) for setting in TABLE.settings for row in TABLE.rows]
PAPER = ["omniglot-20way-1shot", "omniglot-20way-5shot", "miniimagenet-5way-1shot", "miniimagenet-5way-5shot"]
COMMON = ["protonet", "protonet-inductive", "protonet-higher-way", "matching", "matching-inductive", "matching-fce"]
ORIGINAL = ["protonet-original", "protonet-higher-way-original", "matching-original"]

# As quoted in table 1 of the paper.
QUOTED = {
    "protonet-original": [(95.4, None), (98.7, None), (46.14, 0.77), (65.77, 0.70)],
    "protonet-higher-way-original": [(96.0, None), (98.9, None), (49.42, 0.78), (68.20, 0.66)],
    "matching-original": [(93.8, None), (98.7, None), (43.56, 0.84), (55.31, 0.73)],
}
# Classes, shots and queries of a task in training.
TRAINED = {
    "protonet-original": [(20, 1, 15), (20, 5, 15), (5, 1, 15), (5, 5, 15)],
    "protonet-higher-way-original": [(60, 1, 5), (60, 5, 5), (30, 1, 15), (20, 5, 15)],
    "matching-original": [(20, 1, 15), (20, 5, 15), (5, 5, 15), (5, 5, 15)],
}


def trained(config: Config) -> tuple[int, int, int]:
    e = config.episode
    return e.train_way or e.way, e.train_shot or e.shot, e.train_query or e.query


def test_there_are_two_recipes_per_row_and_setting() -> None:
    assert sorted(TABLE.rows) == sorted([*COMMON, *ORIGINAL])
    assert set(PAPER) < TABLE.settings.keys() == tables()["table1"].settings.keys() | tables()["small"].settings.keys()


@pytest.mark.parametrize("setting", TABLE.settings)
@pytest.mark.parametrize("row", COMMON)
def test_common_rows_have_the_network_and_the_outer_loop_of_maml(setting: str, row: str) -> None:
    mine, maml = load_recipe(f"{setting}-{row}"), load_recipe(f"{setting}-maml")
    assert (mine.data, mine.network, mine.training) == (maml.data, maml.network, maml.training)
    assert (mine.episode.way, mine.episode.shot, mine.episode.query) == (maml.episode.way, maml.episode.shot, 15)
    assert mine.episode.protocol == ("inductive" if row.endswith("inductive") else "transductive")
    assert (trained(mine) == trained(maml)) == (row != "protonet-higher-way")
    assert not mine.reported  # nobody reports this row in this protocol


@pytest.mark.parametrize("row", ORIGINAL)
@pytest.mark.parametrize("number", range(4), ids=PAPER)
def test_original_rows_have_the_setting_of_the_quoted_figure(row: str, number: int) -> None:
    config = load_recipe(f"{PAPER[number]}-{row}")
    accuracy, interval = QUOTED[row][number]
    assert config.reported == {"accuracy": accuracy, **({"interval": interval} if interval else {})}
    assert trained(config) == TRAINED[row][number]
    assert (config.network["channels"], config.network["norm"]) == (64, "running")
    assert (config.episode.protocol, config.episode.query) == ("inductive", 15)
    t = config.training
    assert (t.meta_batch, t.optimizer, t.clip_by) == (1, "adam", "none")
    ravi = row == "matching-original" and number >= 2
    rate: tuple[Any, ...] = (t.meta_lr, t.schedule, t.schedule_every, t.schedule_factor)
    assert rate == ((1e-4, "constant", 2000, 0.5) if ravi else (1e-3, "step", 2000, 0.5))
    if row == "matching-original":
        assert (config.learner["fce"], config.learner["class_sum"]) == (ravi, "cosines" if ravi else "attention")
        assert (config.learner["reads"], config.network["norm_eps"]) == (3, 1e-3 if ravi else None)
    elif number < 2:
        assert config.data["validation_characters"] == 172


@pytest.mark.parametrize(("setting", "row"), RECIPES)
def test_every_recipe_builds_a_small_learner_of_its_kind(setting: str, row: str) -> None:
    config = load_recipe(f"{setting}-{row}", {"network.channels": 2})
    learner = build_learner(config, ImageShape(1, 28, 28))
    assert type(learner) is (md.ProtoNet if row.startswith("protonet") else md.MatchingNet)
    assert type(learner.perturbation) is md.NoPerturbation
    assert bool(learner.changed_buffers()) == (row in ORIGINAL)


@pytest.mark.parametrize("row", TABLE.rows)
def test_every_row_trains_a_step_at_a_tiny_size_and_is_evaluated(row: str, tmp_path: Path) -> None:
    tiny = ["--training.iterations", "1", "--training.meta_batch", "1", "--training.validation_episodes", "1"]
    tiny += ["--network.channels", "2", "--episode.query", "1", "--machine.threads", "1"]
    assert main(["train", f"glyphs-5way-1shot-{row}", "--out", str(tmp_path / "run"), *tiny]) == 0
    assert main(["evaluate", str(tmp_path / "run"), "--episodes", "1"]) == 0


def test_a_row_can_leave_out_a_section_of_its_setting() -> None:
    assert recipe("omniglot-20way-5shot-maml")["learner"] == {"inner_lr": 0.4}
    assert recipe("omniglot-20way-5shot-protonet")["learner"] == {"name": "protonet"}
