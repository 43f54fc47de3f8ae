"""Runs side by side: settings apart, seeds together, and what others report in which setting."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from toys import RESULT, change_config, change_json

from metadropout.analysis.report import compare, read_runs
from metadropout.analysis.report.comparison import find_reference
from metadropout.analysis.report.results import attack_groups, learning_charts
from metadropout.errors import ConfigError
from metadropout.recipes import load_recipe, recipe_names, sources


def test_seeds_of_a_method_are_pooled_and_other_methods_stand_beside_them(runs: list[Path]) -> None:
    (setting,) = compare(read_runs(runs))
    assert setting.title == "glyphs, 3-way 1-shot"
    assert [method.name for method in setting.methods] == ["MAML", "MAML + Meta-dropout"]
    rows = [(row.method.name, row.name, row.pool.seeds) for row in setting.rows]
    assert rows == [
        ("MAML", "", [0, 1]),
        ("MAML", "maml", [0]),
        ("MAML", "maml-1", [1]),
        ("MAML + Meta-dropout", "metadropout", [0]),
    ]
    pooled, *single = (row.pool for row in setting.rows[:3])
    means = [pool.result.mean for pool in single]
    assert pooled.result.mean == pytest.approx(np.mean(means))
    assert pooled.spread == pytest.approx(np.std(means, ddof=1))
    assert len(pooled.result.accuracies) == 4


def test_methods_are_compared_task_by_task_with_the_best_one(runs: list[Path]) -> None:
    values = {"maml": [0.5, 0.7, 0.9, 0.5], "maml-1": [0.7, 0.7, 0.9, 0.5], "metadropout": [0.5, 0.5, 0.8, 0.4]}
    for run in runs:
        change_json(
            run / RESULT,
            lambda result, run=run: result.update(accuracies=values[run.name], nlls=None),
        )
    (setting,) = compare(read_runs(runs))
    (maml, ours), (noisy, behind) = setting.headlines
    assert setting.best_for(maml, ours) is None
    assert setting.best_for(noisy, behind) == (maml, ours)
    assert ours.against(behind).accuracies == pytest.approx([0.1, 0.2, 0.1, 0.1])


def test_methods_that_were_tested_on_more_tasks_are_compared_on_those_that_both_have_met(runs: list[Path]) -> None:
    values = {"maml": [0.5, 0.7, 0.9, 0.9], "maml-1": [0.5, 0.7, 0.9, 0.9], "metadropout": [0.6, 0.8]}
    for run in runs:
        change_json(
            run / RESULT,
            lambda result, run=run: result.update(accuracies=values[run.name], nlls=None),
        )
    (setting,) = compare(read_runs(runs))
    (maml, behind), (noisy, ahead) = setting.headlines
    assert setting.best_for(maml, behind) == (noisy, ahead)  # although its mean is lower
    assert setting.best_for(noisy, ahead) is None
    assert ahead.against(behind).accuracies == pytest.approx([0.1, 0.1])


@pytest.mark.parametrize(
    ("change", "value"), [("iteration", 1), ("seed", 5), ("mc_samples", 9), ("accuracies", [0.5, 0.5])]
)
def test_tests_that_differ_in_more_than_the_seed_are_not_pooled(runs: list[Path], change: str, value: object) -> None:
    change_json(runs[1] / RESULT, lambda result: result.update({"nlls": None, change: value}))
    (setting,) = compare(read_runs(runs[:2]))
    assert [row.name for row in setting.rows] == ["maml", "maml-1"]


@pytest.mark.parametrize(
    ("section", "option", "value", "titles"),
    [
        ("episode", "way", 4, ["glyphs, 3-way 1-shot", "glyphs, 4-way 1-shot"]),
        ("episode", "query", 3, ["glyphs, 3-way 1-shot (episode.query 2)", "glyphs, 3-way 1-shot (episode.query 3)"]),
        (
            "episode",
            "protocol",
            "inductive",
            [
                "glyphs, 3-way 1-shot (episode.protocol transductive)",
                "glyphs, 3-way 1-shot (episode.protocol inductive)",
            ],
        ),
    ],
)
def test_runs_on_other_tasks_are_settings_of_their_own(
    runs: list[Path], section: str, option: str, value: object, titles: list[str]
) -> None:
    change_config(runs[1], section, **{option: value})
    change_json(runs[1] / RESULT, lambda result: result.update({option: value}))
    settings = compare(read_runs(runs[:2]))
    assert [setting.title for setting in settings] == titles
    assert [len(setting.rows) for setting in settings] == [1, 1]


def test_methods_of_one_name_are_told_apart_by_their_options(runs: list[Path]) -> None:
    change_config(runs[1], "learner", inner_lr=0.5)
    (setting,) = compare(read_runs(runs[:2]))
    assert [method.name for method in setting.methods] == ["MAML (learner.inner_lr 0.1)", "MAML (learner.inner_lr 0.5)"]


def test_other_states_and_classes_are_rows_of_their_own_without_a_reported_figure(runs: list[Path]) -> None:
    text = (runs[0] / RESULT).read_text()
    (runs[0] / "evaluation-test-best-2samples.json").write_text(text.replace('"state": "last"', '"state": "best"'))
    (runs[0] / "evaluation-validation-2samples.json").write_text(
        text.replace('"split": "test"', '"split": "validation"')
    )
    config = (runs[0] / "config.yaml").read_text()
    (runs[0] / "config.yaml").write_text(config.replace("reported: {}", "reported: {accuracy: 50}"))
    (setting,) = compare(read_runs(runs[:1]))
    assert [(row.pool.test.split, row.pool.test.state) for row in setting.rows] == [
        ("test", "last"),
        ("test", "best"),
        ("validation", "last"),
    ]
    assert [row.pool.reference is None for row in setting.rows] == [False, False, True]
    assert len(setting.headlines) == 2


def test_every_recipe_with_figures_finds_them_and_who_reports_them() -> None:
    assert set(sources()) == {name for name in recipe_names() if load_recipe(name).reported}
    for name, source in sources().items():
        config = load_recipe(name)
        reference = find_reference(config)
        assert reference is not None
        assert (reference.accuracy, reference.source) == (config.reported["accuracy"], source)
        assert (reference.iterations, reference.differences) == (config.training.iterations, ())


def test_a_reported_figure_tells_in_which_options_its_setting_differs() -> None:
    config = load_recipe("omniglot-20way-1shot-metadropout", {"network.channels": 16, "training.iterations": 400})
    reference = find_reference(config)
    assert reference is not None
    assert (reference.accuracy, reference.interval, reference.source) == (96.63, 0.13, "table 1 of the paper")
    assert (reference.iterations, reference.differences) == (40_000, ("network.channels 16, not 64",))


def test_a_figure_is_found_by_the_options_of_a_run_that_does_not_know_it() -> None:
    config = replace(load_recipe("public-omniglot-5way-1shot-maml"), description="mine", reported={})
    reference = find_reference(config)
    assert reference is not None
    assert (reference.accuracy, reference.source) == (96.35, "the authors' public code")
    assert find_reference(load_recipe("glyphs-5way-1shot-maml")) is None


def test_figures_of_ones_own_recipe_are_shown_as_such_and_checked(runs: list[Path]) -> None:
    config = replace(load_recipe("glyphs-5way-1shot-maml"), reported={"accuracy": 50.0})
    reference = find_reference(config)
    assert reference is not None
    assert (reference.accuracy, reference.interval, reference.source) == (50.0, None, "the run's own recipe")
    text = (runs[0] / "config.yaml").read_text()
    (runs[0] / "config.yaml").write_text(text.replace("reported: {}", "reported: {accuracy: high}"))
    with pytest.raises(ConfigError, match=r"maml/config.yaml: reported.accuracy is 'high': .*; give it in %"):
        compare(read_runs(runs[:1]))


def test_the_difference_has_the_interval_of_two_independent_measurements(runs: list[Path]) -> None:
    text = (runs[0] / "config.yaml").read_text()
    (runs[0] / "config.yaml").write_text(text.replace("reported: {}", "reported: {accuracy: 50, interval: 3}"))
    change_json(runs[0] / RESULT, lambda result: result.update(accuracies=[0.4, 0.8], nlls=None))
    (setting,) = compare(read_runs(runs[:1]))
    pool = setting.rows[0].pool
    assert pool.difference == pytest.approx(10.0)
    assert pool.difference_interval == pytest.approx(np.hypot(3, 196 * 0.2 / np.sqrt(2)))


def test_curves_show_what_was_logged(runs: list[Path]) -> None:
    (setting,) = compare(read_runs(runs))
    charts = {chart.title: chart for chart in learning_charts(setting)}
    assert list(charts) == [
        "Query loss on training tasks",
        "Accuracy on training tasks",
        "Accuracy on validation classes",
    ]
    for chart in charts.values():
        assert [curve.label for curve in chart.curves] == [
            "MAML, seed 0",
            "MAML, seed 1",
            "MAML + Meta-dropout, seed 0",
        ]
        assert all([x for x, _ in curve.points] == [1, 2] for curve in chart.curves)
    for run in runs:
        (run / "metrics.jsonl").unlink()
    (setting,) = compare(read_runs(runs))
    assert learning_charts(setting) == []


def test_attacks_are_tabled_by_norm_and_only_those_alike_stand_together(runs: list[Path]) -> None:
    def copy_attack(steps: int) -> None:
        result = (runs[2] / "attack-metadropout.json").read_text()
        (runs[0] / "attack-maml.json").write_text(result)
        change_json(runs[0] / "attack-maml.json", lambda content: content["measured"].update(steps=steps))

    copy_attack(steps=2)
    (setting,) = compare(read_runs(runs))
    (group,) = attack_groups(setting)
    (table,) = group.norms
    assert group.conditions == "transductive, 2 steps, 1 random start at each radius, test tasks of seed 0"
    assert (table.norm, table.radii) == ("ℓ∞", [0.0, 0.01, 0.1])
    assert [(row.label, row.episodes) for row in table.rows] == [
        ("MAML, seed 0", 2),
        ("MAML + Meta-dropout, seed 0", 2),
    ]
    means = [result.mean for result in table.rows[0].accuracies.values()]
    assert means == sorted(means, reverse=True)
    copy_attack(steps=3)
    (setting,) = compare(read_runs(runs))
    assert [len(group.norms[0].rows) for group in attack_groups(setting)] == [1, 1]
