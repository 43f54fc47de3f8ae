"""The recipes of table 1 say what the papers and their code say, in two protocols: the common one and the original."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import metadropout as md
from metadropout.cli import main
from metadropout.config import Config, build_learner
from metadropout.data import ImageShape
from metadropout.learners import LEARNERS
from metadropout.perturbations import PERTURBATIONS
from metadropout.recipes import load_recipe, recipe, sources, tables

TABLE = tables()["table1"]
COMMON, ORIGINAL = TABLE.groups["common"], TABLE.groups["original"]
PAPER = ["omniglot-20way-1shot", "omniglot-20way-5shot", "miniimagenet-5way-1shot", "miniimagenet-5way-5shot"]
METRIC = ("protonet", "matching")
BEYOND = {"unicorn", "unicorn-metasgd", "anil", "mamlpp"}
"""Learners that are not in the paper and have no figure in its settings."""


def parts_of(row: str) -> tuple[str, str]:
    """What a row's name says: its learner and its perturbation."""
    perturbation = "metadropout" if row.endswith("metadropout") else "none"
    known = [name for name in LEARNERS if row == name or row.startswith(f"{name}-")]
    return max(known, key=len, default="maml"), perturbation


def test_every_learner_has_a_row_in_the_common_protocol_and_one_in_its_own() -> None:
    assert [*TABLE.rows] == [*COMMON, *ORIGINAL]
    learners = {row: parts_of(row)[0] for row in TABLE.rows}
    assert {learners[row] for row in COMMON} == LEARNERS.keys()
    own = LEARNERS.keys() - {"maml", "metasgd"} - BEYOND  # the paper's own runs have the common protocol
    assert {learners[row] for row in ORIGINAL} == own
    assert {TABLE.like.get(row) for row in COMMON} >= {
        *(row for row in ORIGINAL if not row.startswith("cavia")),
        "cavia-512-original",
    }
    assert {f"{row}-inductive" for row in METRIC} < set(COMMON)
    assert {"metadropout", "metasgd-metadropout", "abml-metadropout"} < set(COMMON)
    assert COMMON[0] == "maml"  # with which the others are compared
    assert set(PAPER) < TABLE.settings.keys() > tables()["small"].settings.keys()


def test_the_page_of_the_table_names_every_row() -> None:
    text = Path(__file__).parent.parent.joinpath("docs", "table1.md").read_text()
    assert [row for row in TABLE.rows if f"`{row}`" not in text] == []


def test_groups_of_rows_can_be_chosen_by_name() -> None:
    assert TABLE.rows_of(["common", "maml", "lstm-original"]) == [*COMMON, "lstm-original"]
    assert tables()["table3"].rows_of(["maml", "common"]) == ["maml", "common"]  # where there is no such group


@pytest.mark.parametrize("row", TABLE.rows)
def test_every_recipe_builds_a_small_learner_of_its_kind(row: str) -> None:
    small = {"network.channels": 2} | ({"network.context": 3} if "cavia" in row else {})
    kind, perturbation = parts_of(row)
    for setting in TABLE.settings:
        learner = build_learner(load_recipe(f"{setting}-{row}", small), ImageShape(1, 28, 28))
        assert type(learner) is LEARNERS[kind]
        assert type(learner.perturbation) is PERTURBATIONS[perturbation]
        if isinstance(learner, md.MetricLearner):
            assert bool(learner.changed_buffers()) == (row in ORIGINAL)


@pytest.mark.parametrize("row", TABLE.rows)
def test_every_row_trains_a_step_at_a_tiny_size_and_is_evaluated(row: str, tmp_path: Path) -> None:
    tiny = ["--training.iterations", "1", "--training.meta_batch", "1", "--training.validation_episodes", "1"]
    tiny += ["--network.channels", "2", "--episode.query", "1", "--machine.threads", "1"]
    if not row.startswith("protonet-higher-way"):  # that trains with 30 classes
        tiny += ["--data.train_classes", "6", "--data.validation_classes", "6", "--data.test_classes", "6"]
    if not row.startswith(METRIC):
        tiny += ["--learner.steps", "2"]
    assert main(["train", f"glyphs-5way-1shot-{row}", "--out", str(tmp_path / "run"), *tiny]) == 0
    assert main(["evaluate", str(tmp_path / "run"), "--episodes", "1", "--mc-samples", "2"]) == 0


# The common protocol.


@pytest.mark.parametrize("row", COMMON)
def test_common_rows_have_the_network_and_the_tests_of_maml_and_its_outer_loop_but_for_their_own(row: str) -> None:
    for setting in TABLE.settings:
        mine, maml = load_recipe(f"{setting}-{row}"), load_recipe(f"{setting}-maml")
        assert mine.data == maml.data
        for name in ("way", "shot", "query"):
            assert getattr(mine.episode, name) == getattr(maml.episode, name)
        assert mine.episode.protocol == ("inductive" if row.endswith("-inductive") else "transductive")
        papers = row.startswith(("maml", "metasgd", "metadropout")) and row != "mamlpp" and setting in PAPER
        assert bool(mine.reported) == papers  # nobody else reports this protocol
        assert mine.training.iterations == maml.training.iterations
        special = {"cavia": {"context": 100, "norm": "batch"}}.get(parts_of(row)[0], {})
        assert mine.network == maml.network | special
        t = mine.training
        if row == "reptile":
            assert (t.optimizer, t.momentum, t.meta_lr, t.schedule, t.clip_by) == ("sgd", 0.0, 1.0, "linear", "none")
            assert mine.episode.train_shot in (10, 15)
        elif row == "lstm":
            assert (t.optimizer, t.meta_lr, t.clip, t.clip_by) == ("adam", 1e-3, 0.25, "norm")
            assert mine.learner["steps"] == (12 if mine.episode.shot == 1 else 5)
        else:
            assert t == maml.training
            assert (trained(mine) == trained(maml)) == (row != "protonet-higher-way")
        if row.startswith("cavia"):
            assert (mine.learner["inner_lr"], mine.learner["steps"]) == (1.0, 2)
        elif row not in ("reptile", "lstm") and not row.startswith(METRIC):
            assert (mine.learner["inner_lr"], mine.learner["steps"]) == (maml.learner["inner_lr"], 5)


@pytest.mark.parametrize("setting", TABLE.settings)
def test_abmls_divergence_weighs_less_where_inner_steps_are_larger(setting: str) -> None:
    for row in ("abml", "abml-metadropout"):
        learner = load_recipe(f"{setting}-{row}").learner
        assert 0.05 < learner["kl_weight"] * (learner["inner_lr"] / 0.01) ** 2 < 0.2


def test_a_row_can_leave_out_a_section_of_its_setting() -> None:
    assert recipe("omniglot-20way-5shot-maml")["learner"] == {"inner_lr": 0.4}
    assert recipe("omniglot-20way-5shot-protonet")["learner"] == {"name": "protonet"}


# The original settings.

# As quoted in table 1 of the paper, by setting; first-order MAML's in its own and Reptile's.
QUOTED: dict[str, list[tuple[float, ...] | None]] = {
    "lstm-original": [None, None, (43.44, 0.77), (60.60, 0.71)],
    "matching-original": [(93.8,), (98.7,), (43.56, 0.84), (55.31, 0.73)],
    "protonet-original": [(95.4,), (98.7,), (46.14, 0.77), (65.77, 0.70)],
    "protonet-higher-way-original": [(96.0,), (98.9,), (49.42, 0.78), (68.20, 0.66)],
    "reptile-original": [(89.43, 0.14), (97.12, 0.32), (49.97, 0.32), (65.99, 0.58)],
    "abml-original": [None, None, (45.00, 0.60), None],
    "platipus-original": [None, None, (50.13, 1.86), None],
    "mtnet-original": [(96.2, 0.4), None, (51.70, 1.84), None],
    "cavia-32-original": [None, None, (47.24, 0.65), (59.05, 0.54)],
    "cavia-128-original": [None, None, (49.84, 0.68), (64.63, 0.54)],
    "cavia-512-original": [None, None, (51.82, 0.65), (65.85, 0.55)],
    "fomaml-original": [(89.4, 0.5), (97.9, 0.1), (48.07, 1.75), (63.15, 0.91)],
    "tnet-original": [None, None, (50.86,), None],
}
# Steps, rate on the mean loss, iterations, tasks per outer step, outer rate, query images of a test, channels.
SETTINGS: dict[str, list[tuple[Any, ...] | None]] = {
    "lstm-original": [None, None, (12, 0.011, 75_000, 1, 1e-3, 15, 32), (8, 0.011, 50_000, 1, 1e-3, 15, 32)],
    "matching-original": [(None, None, 20_000, 1, 1e-3, 15, 64)] * 2 + [(None, None, 75_000, 1, 1e-4, 15, 64)] * 2,
    "protonet-original": [(None, None, 20_000, 1, 1e-3, 15, 64)] * 4,
    "protonet-higher-way-original": [(None, None, 20_000, 1, 1e-3, 15, 64)] * 4,
    "reptile-original": [(10, 5e-4, 200_000, 5, 1.0, 1, 64)] * 2 + [(8, 1e-3, 100_000, 5, 1.0, 1, 32)] * 2,
    "abml-original": [None, None, (5, 0.01, 60_000, 2, 1e-3, 15, 32), None],
    "platipus-original": [None, None, (5, 0.05, 60_000, 4, 1e-3, 1, 32), None],
    "mtnet-original": [
        (1, 2.0, 40_000, 16, 1e-3, 1, 64),
        (1, 2.0, 40_000, 16, 1e-3, 5, 64),
        (5, 0.05, 60_000, 4, 1e-3, 1, 32),
        (5, 0.05, 60_000, 4, 1e-3, 5, 32),
    ],
    **{
        f"cavia-{width}-original": [
            *(None, None),
            (2, 1.0, 60_000, 4, 1e-3, 15, width),
            (2, 1.0, 60_000, 2, 1e-3, 15, width),
        ]
        for width in (32, 128, 512)
    },
    "fomaml-original": [
        (5, 2.0, 40_000, 16, 1e-3, 1, 64),
        (5, 2.0, 40_000, 16, 1e-3, 5, 64),
        (5, 0.05, 60_000, 4, 1e-3, 1, 32),
        (5, 0.05, 60_000, 4, 1e-3, 5, 32),
    ],
}
SETTINGS["tnet-original"] = SETTINGS["mtnet-original"]
AS_MAML = ["platipus-original", "fomaml-original", "mtnet-original", "tnet-original"]
# Classes, shots and queries of a task in training, where they are not those of a test.
TRAINED = {
    "protonet-higher-way-original": [(60, 1, 5), (60, 5, 5), (30, 1, 15), (20, 5, 15)],
    "matching-original": [(20, 1, 15), (20, 5, 15), (5, 5, 15), (5, 5, 15)],
    "reptile-original": [(20, 10, 1), (20, 10, 1), (5, 15, 1), (5, 15, 1)],
    **{row: [(20, 1, 1), (20, 5, 5), (5, 1, 15), (5, 5, 15)] for row in AS_MAML},
}
INDUCTIVE = ("lstm", *METRIC)
# How gradients are clipped: MAML's code has sums of losses, so that its 10 is 10 * shot / (way * query) on their mean.
BY_SUM = [None, None, 10 * 1 / (5 * 15), 10 * 5 / (5 * 15)]
CLIPPED: dict[str, list[float | None]] = {
    **dict.fromkeys(AS_MAML, BY_SUM),
    **{f"cavia-{width}-original": [10.0] * 4 for width in (32, 128, 512)},
    "lstm-original": [0.25] * 4,
    "abml-original": [3.0] * 4,
}


def trained(config: Config) -> tuple[int, int, int]:
    e = config.episode
    return e.train_way or e.way, e.train_shot or e.shot, e.train_query or e.query


def test_the_original_settings_are_all_written_down_here() -> None:
    assert QUOTED.keys() == SETTINGS.keys() == set(ORIGINAL)


@pytest.mark.parametrize("row", ORIGINAL)
@pytest.mark.parametrize("number", range(4), ids=PAPER)
def test_original_rows_have_the_setting_of_the_quoted_figure(row: str, number: int) -> None:
    name = f"{PAPER[number]}-{row}"
    config, quoted = load_recipe(name), QUOTED[row][number]
    assert config.reported == dict(zip(("accuracy", "interval"), quoted or (), strict=False))
    if quoted is None:
        return
    assert sources()[name]
    e, t, learner = config.episode, config.training, config.learner
    outer = t.iterations, t.meta_batch, t.meta_lr, e.query, config.network["channels"]
    assert (learner.get("steps"), learner.get("inner_lr"), *outer) == SETTINGS[row][number]
    assert trained(config) == TRAINED.get(row, [(e.way, e.shot, e.query)] * 4)[number]
    assert e.protocol == ("inductive" if row.startswith(INDUCTIVE) else "transductive")
    clip = None if t.clip_by == "none" else pytest.approx(t.clip, abs=1e-4)
    assert CLIPPED.get(row, [None] * 4)[number] == clip


@pytest.mark.parametrize("number", range(4), ids=PAPER)
def test_original_rows_have_the_schedules_and_normalisations_of_their_code(number: int) -> None:
    def of(row: str) -> Config:
        return load_recipe(f"{PAPER[number]}-{row}-original")

    def schedule(row: str) -> tuple[Any, ...]:
        t = of(row).training
        return t.schedule, *((t.schedule_every, t.schedule_factor) if t.schedule == "step" else ())

    def norm(row: str) -> tuple[Any, ...]:
        return of(row).network["norm"], of(row).network["norm_eps"]

    ravi = number >= 2  # whose Matching Networks the paper quotes on miniImageNet
    assert schedule("protonet") == schedule("protonet-higher-way") == ("step", 2000, 0.5)
    assert schedule("matching") == (("constant",) if ravi else ("step", 2000, 0.5))
    assert schedule("cavia-512") == ("step", 5000, 0.9)
    assert schedule("reptile") == ("linear",)
    assert {schedule(row) for row in ("lstm", "abml", "platipus", "mtnet", "fomaml")} == {("constant",)}
    assert norm("protonet") == ("running", None)
    assert norm("matching") == ("running", 1e-3 if ravi else None)
    assert norm("lstm") == norm("reptile") == ("batch", 1e-3)
    assert norm("cavia-32")[0] == "batch"

    matching = of("matching").learner
    assert (matching["fce"], matching["class_sum"]) == (ravi, "cosines" if ravi else "attention")
    assert matching["reads"] == 3
    assert of("lstm").learner["divide_again"]
    assert of("lstm").episode.train_protocol == "transductive"
    assert of("lstm").training.clip_by == "norm"
    reptile = of("reptile").learner
    batches = reptile["batch"], reptile["test_batch"], reptile["test_steps"]
    assert batches == ((20, 10, 50) if number < 2 else (10, {2: 5, 3: 15}[number], 50))
    if number < 2:
        assert of("protonet").data["validation_characters"] == 172
