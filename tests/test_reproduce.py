"""A table is trained, evaluated, resumed and printed by one command."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from toys import finish, start, wait_for

from metadropout.cli import main
from metadropout.data.locks import exclusive
from metadropout.evaluation import Evaluation
from metadropout.metrics import read_metrics
from metadropout.recipes import tables
from metadropout.reproduce import plan, summary

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
    assert f"| MAML | {100 * result['mean']:.2f} ± {100 * result['interval_95']:.2f} | – |" in printed
    assert "| MAML + deterministic Meta-dropout |" in printed
    assert (tmp_path / "table3.md").read_text() in printed
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")}
    assert main(command) == 0
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")} == before
    longer = [text if text != "0.002" else "0.003" for text in command]
    assert main(longer) == 0  # the runs that are there go on
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
    assert main([*arguments, "--rows", "maml", "--network.channels", "3"]) == 1
    assert "holds a run with another network section" in capsys.readouterr().err
    assert main([*arguments, "--rows", "mixup-1"]) == 1
    assert "there is no row 'mixup-1' in this table" in capsys.readouterr().err
    assert main([*arguments, "--scale", "0"]) == 1
    assert "--scale is 0.0; it must be above 0" in capsys.readouterr().err


def test_a_run_that_fails_is_named_with_its_log_and_the_others_are_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["reproduce", "table3", "--out", str(tmp_path), *TINY, "--learner.inner_lr", "1e38", "--rows", "maml"]
    assert main(arguments) == 1
    out, err = capsys.readouterr()
    assert "| MAML | not yet | – |" in out
    assert "glyphs-5way-1shot-maml-seed0: stopped with status 1; its log is" in err
    assert "lower learner.inner_lr" in (tmp_path / "logs" / "glyphs-5way-1shot-maml-seed0.log").read_text()


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


def test_several_seeds_are_pooled_and_their_spread_is_told() -> None:
    results = [Evaluation([0.5, 0.7]), Evaluation([0.8, 1.0])]
    assert summary(results) == "75.00 ± 17.67 (2 seeds, std 21.21)"
    assert summary(results[:1]) == "60.00 ± 13.86"
    assert summary([]) == "not yet"
