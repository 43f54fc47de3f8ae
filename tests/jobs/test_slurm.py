"""Runs as jobs of a real Slurm that the tests start: cancelled, preempted, without a node for a while, out of time."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from slurm_cluster import CannotStartError, SlurmCluster
from toys import assert_same_weights, finish, start, wait_for

from metadropout.cli import main
from metadropout.errors import ConfigError
from metadropout.jobs.slurm import Slurm, _minutes
from metadropout.training.metrics import newest_iteration

pytest.importorskip("submitit")

pytestmark = pytest.mark.timeout(600)

RUNS = [(rate, seed) for rate in ("0.05", "0.1", "0.2") for seed in ("0", "1")]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmCluster]:
    try:
        started = SlurmCluster(cpus=3)
        started.__enter__()
    except CannotStartError as error:
        pytest.skip(str(error))
    for name, value in started.environment.items():
        monkeypatch.setenv(name, value)
    yield started
    started.__exit__()


@pytest.fixture
def longer(recipe: Path) -> Path:
    """A recipe of cheap iterations that leaves time to be interrupted."""
    content = yaml.safe_load(recipe.read_text())
    content |= {"perturbation": {"name": "none"}, "learner": {"steps": 1}, "network": {"channels": 2}}
    content["training"] = {"iterations": 80, "meta_batch": 1, "log_every": 1, "validation_episodes": 1}
    recipe.write_text(yaml.safe_dump(content))
    return recipe


def sweep_of(recipe: Path, out: Path) -> list[str]:
    rates = ["--learner.inner_lr", *dict(RUNS)]
    return ["sweep", str(recipe), *rates, "--seeds", "0", "1", "--episodes", "2", "--out", str(out)]


@pytest.mark.skipif(
    "METADROPOUT_SLURM_TESTS" not in os.environ,
    reason="a job that is preempted just as the node's daemon is killed stays in the queue now and then: set "
    "METADROPOUT_SLURM_TESTS=1",
)
def test_a_sweep_of_six_runs_survives_a_cluster_and_ends_as_on_one_machine(
    cluster: SlurmCluster, longer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "sweep"
    on_slurm = [*sweep_of(longer, out), "--on", "slurm", "--jobs", "2", "--slurm.time", "30"]
    process = start(*on_slurm)

    def running(but: Path | None = None) -> Path | None:
        """Return a run that has some of its iterations behind it and many before it."""
        found = [run for run in out.glob("inner_lr-*") if 2 <= newest_iteration(run / "metrics.jsonl") < 50]
        return next((run for run in found if run != but), None)

    def soon(condition: Callable[[], object]) -> None:
        wait_for(condition, process)

    soon(running)
    cancelled = running()
    assert cancelled is not None
    ids = json.loads((out / "slurm" / "jobs.json").read_text())
    assert len(ids) == 6
    cluster.call("scancel", ids[cancelled.name])

    soon(lambda: running(but=cancelled))
    # A job of higher priority that needs the whole node: what runs is saved and goes back into the queue.
    cluster.call("sbatch", "--partition=high", "--cpus-per-task=3", "--output=/dev/null", "--wrap", "true")
    soon(lambda: "DUE TO PREEMPTION" in logs_of(out, "err"))
    cluster.stop("slurmd", signal.SIGKILL)
    cluster.start("slurmd")

    _, err = finish(process)
    assert process.returncode == 1, err
    assert f"{cancelled.name}: job {ids[cancelled.name]} of Slurm: CANCELLED" in err
    assert "state saved" in err  # in the end of its log
    assert main([*on_slurm, "--show"]) == 0
    printed = capsys.readouterr().out
    assert "Slurm's jobs: 1 cancelled" in printed
    assert " iterations)" in printed or "(1 of 2 seeds)" in printed

    assert main(on_slurm) == 0  # what is done is skipped, what was begun goes on
    printed = capsys.readouterr().out
    assert "| best |" in printed
    assert "not yet" not in printed
    begun_twice = 0
    for rate, seed in RUNS:
        alone, name = tmp_path / "alone" / f"{rate}-{seed}", f"inner_lr-{rate}-seed{seed}"
        options = ["--learner.inner_lr", rate, "--seed", seed, "--machine.threads", "1"]
        assert main(["train", str(longer), "--out", str(alone), *options]) == 0
        assert_same_weights(alone, out / name)
        begun_twice += len(json.loads((out / name / "environment.json").read_text())["starts"]) > 1
    assert begun_twice >= 2  # the cancelled one and a preempted one


def logs_of(out: Path, kind: str) -> str:
    return "".join(path.read_text() for path in (out / "slurm").glob(f"*_log.{kind}"))


def test_a_run_that_fails_is_shown_with_the_end_of_its_log_and_one_out_of_time_is_queued_again(
    cluster: SlurmCluster, longer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "sweep"
    good, bad = out / "inner_lr-0.1-seed0", out / "inner_lr-0.2-seed0"
    bad.mkdir(parents=True)
    (bad / "notes.txt").touch()
    rates = ["--learner.inner_lr", "0.1", "0.2"]
    command = ["sweep", str(longer), *rates, "--episodes", "2", "--out", str(out), "--on", "slurm"]
    process = start(*command)
    wait_for(lambda: newest_iteration(good / "metrics.jsonl") >= 2, process)
    ids = json.loads((out / "slurm" / "jobs.json").read_text())
    cluster.call("scancel", "--signal=USR2", ids[good.name])  # what Slurm sends before a time limit
    _, err = finish(process)
    assert process.returncode == 1
    assert f"{bad.name}: job {ids[bad.name]} of Slurm: FAILED" in err
    assert "is not an empty folder" in err
    log = (out / "logs" / f"{good.name}.log").read_text()
    assert "stopped by SIGTERM after iteration" in log
    assert "resuming after iteration" in log
    assert log.count(f"-- job {ids[good.name]} of Slurm") == 2
    assert (good / "evaluation-validation.json").exists()
    assert main([*command, "--show"]) == 0
    assert "Slurm's jobs: 1 failed" in capsys.readouterr().out


def test_what_slurm_does_not_take_is_said(
    cluster: SlurmCluster, recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*sweep_of(recipe, tmp_path / "out"), "--on", "slurm", "--slurm.partition", "nowhere"]) == 1
    assert "Slurm does not take the jobs: sbatch: error: invalid partition" in capsys.readouterr().err


def test_options_of_sbatch_that_are_not_the_users_are_refused(tmp_path: Path) -> None:
    for name in ("array", "ntasks", "nodes", "wrap", "Partition", "a b"):
        with pytest.raises(ConfigError, match=rf"--slurm\.{name} cannot be set"):
            Slurm(tmp_path, {name: "1"})
    with pytest.raises(ConfigError, match="not a value that sbatch can take"):
        Slurm(tmp_path, {"comment": "one\ntwo"})


@pytest.mark.parametrize(
    ("text", "minutes"),
    [("90", 90), ("2:30", 3), ("8:00:00", 480), ("0:00:01", 1), ("1-0", 1440), ("2-12:30", 3630), ("1-1:1:1", 1502)],
)
def test_times_are_read_as_sbatch_reads_them(text: str, minutes: int) -> None:
    assert _minutes(text) == minutes


@pytest.mark.parametrize("text", ["", "soon", "0", "1:2:3:4", "-5", "1-"])
def test_times_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--slurm\.time"):
        _minutes(text)
