"""A table is trained, evaluated, resumed and printed by one command."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from toys import finish, start, wait_for

from metadropout.analysis.tables import TableJob, as_markdown, entries, plan, summary
from metadropout.cli import main
from metadropout.data.locks import exclusive
from metadropout.evaluation import Evaluation
from metadropout.recipes import load_recipe, tables
from metadropout.runs.folder import open_run, write_config
from metadropout.training.checkpoints import iteration_of
from metadropout.training.metrics import read_metrics

TINY = [
    "--settings", "glyphs-5way-1shot", "--rows", "maml", "deterministic", "--scale", "0.002", "--episodes", "3",
    "--training.meta_batch", "1", "--training.validation_episodes", "1", "--network.channels", "2",
    "--episode.query", "1", "--data.train_classes", "6", "--data.validation_classes", "6", "--data.test_classes", "6",
]  # fmt: skip


def test_a_table_is_run_once_printed_and_not_run_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["reproduce", "table3", "--out", str(tmp_path), "--jobs", "2", *TINY]
    assert main(command) == 0
    printed = capsys.readouterr().out
    result = json.loads((tmp_path / "glyphs-5way-1shot-maml-seed0" / "evaluation-test.json").read_text())
    assert result["iteration"] == 2  # 0.002 of 1000
    measured = f"{result['nll']:.4f} | {100 * result['ece']:.2f}"
    assert f"| MAML | {100 * result['mean']:.2f} ± {100 * result['interval_95']:.2f} |  | {measured} | – |" in printed
    other = json.loads((tmp_path / "glyphs-5way-1shot-deterministic-seed0" / "evaluation-test.json").read_text())
    ahead = f"{100 * (other['mean'] - result['mean']):+.2f} ± "
    assert f"| MAML + deterministic Meta-dropout | {100 * other['mean']:.2f} ± " in printed
    assert ahead in printed
    assert (tmp_path / "table3.md").read_text() in printed
    assert (tmp_path / "table3.png").read_bytes().startswith(b"\x89PNG")

    def written() -> dict[Path, int]:
        files = [path for path in tmp_path.rglob("*") if path.is_file() and path.parent != tmp_path]
        return {path: path.stat().st_mtime_ns for path in files}

    before = written()
    assert {path.suffix for path in before} >= {".safetensors", ".json", ".log"}
    assert main(command) == 0
    assert written() == before
    capsys.readouterr()
    assert main([*command, "--rows", "maml", "--seeds", "1"]) == 0  # what is there already is shown, too
    printed = capsys.readouterr().out
    second = json.loads((tmp_path / "glyphs-5way-1shot-maml-seed1" / "evaluation-test.json").read_text())
    assert f"| MAML | {50 * (result['mean'] + second['mean']):.2f} ± " in printed
    assert " (2 seeds, std " in printed
    assert "| MAML + deterministic Meta-dropout |" in printed
    longer = [text if text != "0.002" else "0.003" for text in command]
    assert main([*longer, "--rows", "maml", "--machine.threads", "2"]) == 0  # the run that is there goes on
    assert open_run(tmp_path / "glyphs-5way-1shot-maml-seed0").config.machine.threads == 2
    result = json.loads((tmp_path / "glyphs-5way-1shot-maml-seed0" / "evaluation-test.json").read_text())
    assert result["iteration"] == 3


def test_the_runs_of_the_robustness_study_are_trained_and_attacked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = ["--rows", "maml", "adversarial-l2-large"]
    assert main(["reproduce", "robustness", "--out", str(tmp_path), *TINY, *rows]) == 0
    runs = sorted(map(str, tmp_path.glob("glyphs-5way-1shot-*")))  # as a user would name them: nothing else is there
    assert main(["attack", *runs, "--episodes", "1", "--steps", "2", "--out", str(tmp_path / "attacks")]) == 0
    assert "| glyphs-5way-1shot-adversarial-l2-large-seed0 |" in capsys.readouterr().out
    table = tables()["robustness"]
    jobs = plan(
        table,
        scale=1.0,
        settings=["omniglot-5way-1shot", "cifar-fs-5way-1shot"],
        rows=list(table.rows),
        seeds=[0, 1],
        episodes=1000,
        out=tmp_path,
        overrides={},
    )
    assert len({job.folder for job in jobs}) == 2 * 2 * 11


def test_a_fraction_is_one_of_the_iterations_that_are_asked_for(tmp_path: Path) -> None:
    jobs = plan(
        tables()["table2"],
        scale=0.1,
        settings=["cifar-fs-5way-1shot"],
        rows=["mixup-0.2", "mixup-1"],
        seeds=[0, 1],
        episodes=1,
        out=tmp_path,
        overrides={"training.iterations": 1000},
    )
    assert len({job.log for job in jobs}) == 4
    for job in jobs:
        assert job.config.training.iterations == 100
        train, _ = job.commands()
        options = dict(zip(train[2::2], train[3::2], strict=True))
        assert options["--training.iterations"] == "100"  # the last one is what counts


def test_a_folder_with_another_run_and_wrong_names_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["reproduce", "table3", "--out", str(tmp_path), *TINY]
    assert main([*arguments, "--rows", "maml"]) == 0
    capsys.readouterr()
    refused = {
        ("--network.channels", "3"): "glyphs-5way-1shot-maml-seed0: was trained with network.channels 2, not 3; choose",
        ("--scale", "0.001"): "glyphs-5way-1shot-maml-seed0: has been trained for 2 iterations already, more than 1",
        ("--scale", "0"): "--scale is 0; it must be above 0, up to 1000",
        ("--scale", "inf"): "--scale is inf; it must be above 0, up to 1000",
        ("--jobs", "0"): "--jobs is 0; it must be from 1 to 1000",
        ("--figure", "table.svg"): "--figure is table.svg; its name must end in .png",
        ("--training.validation_episodes", "2"): "was trained with training.validation_episodes 1, not 2; choose",
        ("--rows", "mixup-1"): "there is no row 'mixup-1' in this table",
        ("--perturbation.name", "vib"): "--perturbation.name cannot change here",
    }
    for changed, message in refused.items():
        assert main([*arguments, *changed]) == 1
        out, err = capsys.readouterr()
        assert message in err
        assert not out  # no figures of another run


def test_a_run_that_fails_is_named_with_the_cause_and_the_others_are_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "glyphs-5way-1shot-maml-seed0").mkdir()
    (tmp_path / "glyphs-5way-1shot-maml-seed0" / "notes.txt").touch()
    assert main(["reproduce", "table3", "--out", str(tmp_path), *TINY]) == 1
    out, err = capsys.readouterr()
    assert "| MAML | not yet |  | – | – | – |" in out
    figures = r"\d+\.\d\d ± \d+\.\d\d \|  \| \d+\.\d{4} \| \d+\.\d\d \| – \|"
    assert re.search(rf"\| MAML \+ deterministic Meta-dropout \| {figures}", out)
    assert "glyphs-5way-1shot-maml-seed0: stopped with status 1 (metadropout: " in err
    assert "is not an empty folder" in err
    assert "is not an empty folder" in (tmp_path / "logs" / "glyphs-5way-1shot-maml-seed0.log").read_text()


def test_a_stop_reaches_the_runs_which_save_and_go_on_later(tmp_path: Path) -> None:
    command = ["reproduce", "table3", "--out", str(tmp_path), *TINY, "--rows", "maml", "--scale", "100"]
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a shell starts its background jobs
    process = start(*command)
    signal.signal(signal.SIGINT, before)
    run = tmp_path / "glyphs-5way-1shot-maml-seed0"
    wait_for(lambda: bool(read_metrics(run / "metrics.jsonl")), process)
    process.send_signal(signal.SIGTERM)
    _, err = finish(process)
    assert process.returncode == 130, err
    assert "stopped by SIGTERM after iteration" in (tmp_path / "logs" / "glyphs-5way-1shot-maml-seed0.log").read_text()
    with exclusive(run / ".lock", wait=False) as locked:  # nobody goes on training it
        assert locked
    done = iteration_of(open_run(run).latest())
    assert main([*command, "--scale", str((done + 1) / 1000)]) == 0
    assert iteration_of(open_run(run).latest()) == done + 1


def made(folder: Path, episodes: int = 3, **options: Any) -> list[TableJob]:
    """Plan two rows of table 3 without running them."""
    return plan(
        tables()["table3"],
        scale=0.001,
        settings=["omniglot-20way-1shot"],
        rows=["maml", "metadropout"],
        seeds=options.pop("seeds", [0]),
        episodes=episodes,
        out=folder,
        overrides=options,
    )


def write_evaluation(job: TableJob, accuracies: list[float], **changed: Any) -> None:
    job.folder.mkdir(parents=True, exist_ok=True)
    samples = 1 if job.row == "maml" else 30
    result = {"accuracies": accuracies, "iteration": 40, "mc_samples": samples, "split": "test", "state": "last"}
    job.evaluation.write_text(json.dumps({**result, "seed": 0, "episode_list": None, **changed}))


def test_a_result_counts_only_if_it_was_measured_as_asked(tmp_path: Path) -> None:
    _, job = made(tmp_path)
    assert job.result() is None
    write_evaluation(job, [0.25, 0.5, 0.75, 1.0])
    assert job.result() == Evaluation([0.25, 0.5, 0.75])  # the first ones of the same sequence
    for changed in (
        {"seed": 1},
        {"mc_samples": 5},
        {"asked_samples": 1},
        {"iteration": 39},
        {"episode_list": "a.json"},
        {"accuracies": [1]},
    ):
        write_evaluation(job, **{"accuracies": [0.25, 0.5, 0.75], **changed})
        assert job.result() is None, changed
    job.evaluation.write_text("{}")
    assert job.result() is None


def test_what_is_named_twice_is_run_once(tmp_path: Path) -> None:
    assert len(made(tmp_path, seeds=[0, 1, 0])) == 4


def test_a_table_shows_differences_on_the_same_tasks_and_the_papers_figures(tmp_path: Path) -> None:
    jobs = made(tmp_path, seeds=[0, 1])
    for job, accuracies in zip(jobs, ([0.2, 0.8, 0.5], [0.3, 0.9, 0.7], [0.4, 0.8, 0.5]), strict=False):
        write_evaluation(job, accuracies)
    *_, maml, metadropout = as_markdown(tables()["table3"], entries(tables()["table3"], jobs)).splitlines()
    assert maml == "| MAML | 53.33 ± 23.25 (2 seeds, std 4.71) |  | 95.23 ± 0.17 |"
    # Task by task, MAML has 0.3, 0.8 and 0.5, so the differences are 0, 0.1 and 0.2.
    assert metadropout == "| MAML + Meta-dropout | 63.33 ± 28.23 (1 of 2 seeds) | +10.00 ± 9.24 | 96.63 ± 0.13 |"
    (found,) = entries(tables()["table3"], jobs).values()
    assert found["metadropout"].reported_ahead == pytest.approx(96.63 - 95.23)
    (found,) = entries(tables()["table3"], [job for job in jobs if job.row == "metadropout"]).values()
    assert found["metadropout"].reported_ahead == pytest.approx(96.63 - 95.23)  # also where the base is not asked for
    assert found["metadropout"].ahead is None


def test_likelihood_and_calibration_have_columns_where_they_were_measured(tmp_path: Path) -> None:
    maml, metadropout = jobs = made(tmp_path)
    write_evaluation(maml, [0.2, 0.8, 0.5])
    empty = [0.0] * 14
    bins = {"counts": [10.0, *empty], "confidences": [8.0, *empty], "corrects": [5.0, *empty]}
    write_evaluation(metadropout, [0.3, 0.9, 0.7], nlls=[1.0, 2.0, 3.0], calibration=bins)
    table = tables()["table3"]
    head, _, first, second = as_markdown(table, entries(table, jobs)).splitlines()
    assert head == "| row | Omniglot, 20-way 1-shot | − MAML | NLL | ECE, % | reported |"
    assert first == "| MAML | 50.00 ± 27.72 |  | – | – | 95.23 ± 0.17 |"
    assert second == "| MAML + Meta-dropout | 63.33 ± 28.23 | +13.33 ± 5.33 | 2.0000 | 30.00 | 96.63 ± 0.13 |"


def test_rows_that_are_tested_on_other_tasks_are_not_compared(tmp_path: Path) -> None:
    table = tables()["table1"]
    rows = ["maml", "mtnet", "mtnet-original"]
    options = {"scale": 1.0, "settings": ["omniglot-20way-1shot"], "seeds": [0], "episodes": 3, "overrides": {}}
    jobs = plan(table, rows=rows, out=tmp_path, **options)  # type: ignore[arg-type]
    for job in jobs:
        write_evaluation(job, [0.2, 0.8, 0.5], iteration=40_000, mc_samples=1)
    (found,) = entries(table, jobs).values()
    assert found["mtnet"].ahead is not None
    assert found["mtnet-original"].ahead is None  # one query image per class, not 15
    assert found["mtnet-original"].results


def test_a_table_of_several_protocols_says_which_a_row_has_and_whose_figure_it_shows(tmp_path: Path) -> None:
    table = tables()["table1"]
    rows = ["maml", "protonet-inductive", "mtnet", "unicorn", "mtnet-original"]
    settings = ["omniglot-20way-1shot", "omniglot-20way-5shot"]
    options = {"scale": 1.0, "settings": settings, "seeds": [0], "episodes": 3, "overrides": {}}
    jobs = plan(table, rows=rows, out=tmp_path, **options)  # type: ignore[arg-type]
    text = as_markdown(table, entries(table, jobs))
    cells = [line.strip("| ").split(" | ") for line in text.splitlines()]
    assert [line[:2] for line in cells[:1] + cells[2:7]] == [
        ["row", "protocol"],
        ["MAML", "common: 15 queries, transductive"],
        ["Prototypical Networks, inductive", "common: 15 queries, inductive"],
        ["MT-Net", "common: 15 queries, transductive"],
        ["UNICORN-MAML", "common: 15 queries, transductive"],
        ["MT-Net, original setting", "original: 1 query, transductive or 5 queries, transductive"],
    ]
    reported = [(line[4], line[7]) for line in cells[2:7]]
    assert reported == [
        ("95.23 ± 0.17", "98.38 ± 0.07"),
        ("95.40 (original)", "98.70 (original)"),
        ("96.20 ± 0.40 (original)", "–"),
        ("–", "–"),
        ("96.20 ± 0.40", "–"),
    ]
    assert text.splitlines()[-1].startswith("(original): reported of the same system")
    (one, _) = entries(table, jobs).values()
    assert one["mtnet"].reported_ahead is None  # the quoted figure is of another protocol


def test_a_setting_that_the_paper_lacks_is_held_against_the_one_that_it_is_like(tmp_path: Path) -> None:
    jobs = plan(
        tables()["table2"],
        scale=1.0,
        settings=["cifar-fs-5way-5shot", "glyphs-5way-1shot"],
        rows=["additive"],
        seeds=[0],
        episodes=1,
        out=tmp_path,
        overrides={},
    )
    head, _, additive = as_markdown(tables()["table2"], entries(tables()["table2"], jobs)).splitlines()
    assert "| CIFAR-FS, 5-way 5-shot | − MAML | reported on miniImageNet, 5-way 5-shot | glyphs" in head
    assert additive == "| MAML + additive Meta-dropout | not yet |  | 66.78 ± 0.53 | not yet |  | – |"


def test_a_table_can_be_shown_without_running_what_it_lacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["reproduce", "table3", *TINY, "--show", "--out", str(tmp_path)]
    assert main(arguments) == 0
    assert "| MAML | not yet |" in capsys.readouterr().out
    assert main([*arguments, "--figure", str(tmp_path / "nothing.png")]) == 0
    assert "no picture: nothing to compare yet" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
    assert main(["reproduce", "figure4", *arguments[2:]]) == 1
    assert "--show and --figure are for tables" in capsys.readouterr().err


def test_options_that_may_change_are_given_anew_on_resuming(tmp_path: Path) -> None:
    options = {"machine.threads": 4, "data.directory": "images", "learner.gradient_checkpointing": True, "seed": 0}
    job = made(tmp_path, **options)[0]
    job.folder.mkdir(parents=True)
    write_config(job.folder, load_recipe(job.recipe))
    assert job.conflict() is None  # none of them makes it another run
    train, _ = job.commands()
    given = dict(zip(train[1::2], train[2::2], strict=True))
    assert given["--machine.threads"] == "4"
    assert given["--data.directory"] == "images"
    assert given["--learner.gradient_checkpointing"] == "true"
    assert "--seed" not in given


def test_seeds_that_met_the_same_tasks_do_not_make_more_tasks_of_them() -> None:
    results = [Evaluation([0.5, 0.7]), Evaluation([0.8, 1.0])]
    assert summary(results, 2) == "75.00 ± 13.86 (2 seeds, std 21.21)"
    assert summary(results[:1], 1) == "60.00 ± 13.86"
    assert summary([], 1) == "not yet"
