"""A sweep trains a recipe with several values and picks the best by validation classes, on a grid or by a search."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from metadropout.analysis.sweeps import Range, Search, Sweep, as_csv, as_markdown, best_point
from metadropout.cli import main
from metadropout.errors import ConfigError
from metadropout.jobs import Job, Place

RECIPE = "glyphs-5way-1shot-maml"


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """Run jobs one after the other, without processes of their own; return which were run."""
    ran: list[Job] = []

    def run(jobs: Sequence[Job], place: Place) -> list[str]:
        todo = [job for job in jobs if job.result() is None]
        ran.extend(todo)
        return [f"{job.folder.name} failed" for job in todo if any(main(command) for command in job.commands())]

    monkeypatch.setattr("metadropout.cli.sweep.run_jobs", run)
    return ran


def measured(accuracy: Callable[[Job], float]) -> Callable[[Sequence[Job], Place], list[str]]:
    """Return what writes results in place of training; a job whose accuracy is negative fails."""

    def run(jobs: Sequence[Job], place: Place) -> list[str]:
        problems = []
        for job in jobs:
            if accuracy(job) < 0:
                problems.append(f"{job.folder.name} failed")
            else:
                write(job, [accuracy(job)] * job.episodes)
        return problems

    return run


def write(job: Job, accuracies: list[float]) -> None:
    job.folder.mkdir(parents=True, exist_ok=True)
    content = {"accuracies": accuracies, "iteration": job.config.training.iterations, "mc_samples": 1}
    content |= {"asked_samples": 30, "split": job.split, "seed": 0, "episode_list": None}
    job.evaluation.write_text(json.dumps(content))


def test_a_grid_is_trained_tested_on_validation_classes_and_not_run_again(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], in_this_process: list[Job]
) -> None:
    out = tmp_path / "out"
    command = ["sweep", str(recipe), "--learner.inner_lr", "0.05", "0.10", "0.1", "--seeds", "0", "1"]
    command += ["--episodes", "3", "--out", str(out), "--training.iterations", "2"]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert len(in_this_process) == 4  # 0.10 and 0.1 are the same
    rows = list(csv.DictReader((out / "sweep.csv").read_text().splitlines()))
    assert [(row["learner.inner_lr"], row["seed"]) for row in rows] == [
        ("0.05", "0"),
        ("0.05", "1"),
        ("0.1", "0"),
        ("0.1", "1"),
    ]
    for row in rows:
        result = json.loads((Path(row["run"]) / "evaluation-validation.json").read_text())
        assert result["split"] == "validation"
        assert float(row["accuracy"]) == pytest.approx(result["mean"], abs=1e-6)
        assert (row["iterations"], row["episodes"]) == ("2", "3")
    assert not list(out.rglob("evaluation-test*.json"))  # test classes are not looked at
    means = {rate: sum(float(r["accuracy"]) for r in rows if r["learner.inner_lr"] == rate) for rate in ("0.05", "0.1")}
    best = max(means, key=lambda rate: means[rate])
    assert f"best by validation classes: --learner.inner_lr {best}" in printed
    assert (out / "sweep.md").read_text() in printed
    assert main(command) == 0
    assert len(in_this_process) == 4
    capsys.readouterr()
    assert main([*command, "--show", "--seeds", "2"]) == 0
    assert "| 0.05 | not yet |" in capsys.readouterr().out


def test_only_points_whose_seeds_are_all_done_can_be_the_best(tmp_path: Path) -> None:
    sweep = Sweep(RECIPE, tmp_path, {"network.channels": "2"}, [0, 1], 2)
    low, high = points = sweep.grid({"learner.inner_lr": ["0.1", "0.2"]})
    assert best_point(points) is None
    write(high.jobs[0], [0.9, 0.9])
    assert best_point(points) is None
    for job in low.jobs:
        write(job, [0.5, 0.7])
    assert best_point(points) is low
    assert as_markdown(points).splitlines()[2:] == [
        "| 0.1 | 60.00 ± 13.86 (2 seeds, std 0.00) | best |",
        "| 0.2 | 90.00 ± 0.00 (1 of 2 seeds) |  |",
    ]
    write(high.jobs[1], [0.9, 0.9])
    assert best_point(points) is high
    assert as_csv(points).splitlines()[1].startswith("0.1,0,1000,2,0.600000,0.138593,,,")


def test_values_of_any_kind_give_names_that_differ(tmp_path: Path) -> None:
    sweep = Sweep("glyphs-5way-1shot-maml", tmp_path, {"network.name": "resnet12"}, [0], 1)
    points = sweep.grid({"network.channels": [[4, 4, 4, 4], [4, 4, 4, 8]], "training.clip_by": ["none", "norm"]})
    names = [point.jobs[0].folder.name for point in points]
    assert len(set(names)) == 4
    assert all("/" not in name and " " not in name for name in names)


def test_a_search_learns_from_results_goes_on_and_ends_with_its_trials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("optuna")

    def accuracy(job: Job) -> float:
        rate = float(job.config.learner["inner_lr"])
        return -1 if job.config.learner["steps"] == 2 and rate > 0.5 else max(0.0, 1 - abs(rate - 0.3))

    monkeypatch.setattr("metadropout.cli.sweep.run_jobs", measured(accuracy))
    command = ["sweep", RECIPE, "--learner.inner_lr", "0.01..1", "--learner.steps", "1", "2"]
    command += ["--jobs", "2", "--out", str(tmp_path), "--episodes", "2"]
    main([*command, "--search", "6"])
    first = json.loads((tmp_path / "search.json").read_text())["trials"]
    assert len(first) == 6
    assert all(0.01 <= trial["learner.inner_lr"] <= 1 for trial in first)
    main([*command, "--search", "24"])
    trials = json.loads((tmp_path / "search.json").read_text())["trials"]
    assert len(trials) == 24
    assert trials[:6] == first
    rates = [trial["learner.inner_lr"] for trial in trials]
    assert min(abs(rate - 0.3) for rate in rates) < 0.05
    nearer = [sum(abs(rate - 0.3) < 0.15 for rate in part) for part in (rates[:12], rates[12:])]
    assert nearer[1] > nearer[0]  # it looks where it was good
    capsys.readouterr()
    assert main([*command, "--search", "24", "--show"]) == 0
    assert "best by validation classes: --learner.inner_lr " in capsys.readouterr().out
    assert main(["sweep", RECIPE, "--learner.inner_lr", "0.01..2", *command[7:], "--search", "24"]) == 1
    assert "is of a search among other values" in capsys.readouterr().err


def test_ranges_are_searched_by_their_logarithm_where_they_are_wide(tmp_path: Path) -> None:
    assert Range(0.01, 1, whole=False).logarithmic
    assert not Range(0.2, 1, whole=False).logarithmic
    assert not Range(0, 1, whole=False).logarithmic
    assert Range(0.01, 1, whole=False).rounded(0.123456) == 0.1235
    assert Range(1, 5, whole=True).rounded(3) == 3
    pytest.importorskip("optuna")
    sweep = Sweep(RECIPE, tmp_path, {}, [0], 1)
    for values in (["0.1"], ["5", "0.01..1"], ["2..1"]):
        with pytest.raises(ConfigError, match="range"):
            Search(sweep, {"learner.inner_lr": values})


def test_wrong_calls_are_refused_before_any_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refused = {
        ("--learner.inner_lr", "0.1"): "give some option several values",
        ("--learner.inner_lr", "0.1", "much"): "learner.inner_lr is 'much'",
        ("--learner.inner_lr", "0.1..1", "2"): "is a range: give --search TRIALS",
        ("--learner.inner_lr", "0.1", "1", "--slurm.partition", "gpu"): "--slurm.partition is for clusters",
        ("--learner.inner_lr", "0.1", "1", "--slurm.time", "1", "2", "--on", "slurm"): "--slurm.time takes one value",
        ("--learner.inner_lr",): "--learner.inner_lr needs a value",
    }
    for options, message in refused.items():
        assert main(["sweep", RECIPE, "--out", str(tmp_path / "out"), *options]) == 1, options
        assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
