"""Training from the command line: resuming exactly, stopping cleanly, failing with one clear message."""

from __future__ import annotations

import json
import re
import signal
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from toys import DIVERGING, PERTURBATION_OPTIONS, assert_same_weights, small_files, start, wait_for, weights

import metadropout as md
from metadropout.analysis.report.folders import read_runs
from metadropout.cli import main
from metadropout.config import TrainingOptions, load_config
from metadropout.data import Episode
from metadropout.learners import TaskGradient
from metadropout.perturbations import PERTURBATIONS
from metadropout.runs.folder import open_run
from metadropout.training.checkpoints import checkpoints_in, iteration_of, latest_checkpoint, read_checkpoint
from metadropout.training.distributed import ALONE
from metadropout.training.loop import (
    TESTING,
    TRAINING,
    VALIDATION,
    _Loop,
    episode_sampler,
    open_parts,
    open_splits,
    train,
)
from metadropout.training.metrics import read_metrics
from metadropout.training.outer import OuterOptimizer
from metadropout.training.recording import Recorder
from metadropout.training.workers import Workers


def test_a_run_that_is_killed_and_resumed_ends_bit_identical(recipe: Path, tmp_path: Path) -> None:
    options = ["--training.iterations", "60", "--training.validate_every", "1000"]
    assert main(["train", str(recipe), "--out", str(tmp_path / "whole"), *options]) == 0
    killed = tmp_path / "killed"
    process = start("train", recipe, "--out", killed, *options)
    wait_for(lambda: len(read_metrics(killed / "metrics.jsonl")) >= 5, process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    stopped_at = latest_checkpoint(killed / "checkpoints")
    assert stopped_at is not None
    assert 3 <= int(stopped_at.stem.rpartition("-")[2]) < 60
    assert main(["train", "--resume", str(killed)]) == 0
    assert_same_weights(tmp_path / "whole", killed)
    steps = [line["iteration"] for line in read_metrics(killed / "metrics.jsonl") if line["kind"] == "training"]
    assert steps == sorted(set(steps))
    assert steps[-1] == 60


@pytest.mark.parametrize("name", PERTURBATIONS)
def test_runs_of_every_perturbation_resume_exactly_on_any_number_of_threads(
    name: str, recipe: Path, tmp_path: Path
) -> None:
    options = [f"--perturbation.{k}={json.dumps(v)}" for k, v in PERTURBATION_OPTIONS.get(name, {}).items()]
    options += ["--perturbation.name", name, "--training.validate_every", "1000", "--network.channels", "2"]
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    assert main(["train", str(recipe), "--out", str(whole), *options, "--training.iterations", "4"]) == 0
    assert main(["train", str(recipe), "--out", str(resumed), *options, "--training.iterations", "2"]) == 0
    longer = ["--training.iterations", "4", "--machine.threads", "2"]
    assert main(["train", "--resume", str(resumed), *longer]) == 0
    assert_same_weights(whole, resumed)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_and_stops(recipe: Path, tmp_path: Path, number: signal.Signals, status: int) -> None:
    run = tmp_path / "run"
    process = start("train", recipe, "--out", run, "--training.iterations", "100000")
    wait_for(lambda: len(read_metrics(run / "metrics.jsonl")) >= 2, process)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == status, err
    assert f"stopped by {number.name} after iteration" in out
    assert f"metadropout train --resume {run}" in out
    iteration = int(out.split("after iteration ")[1].split(",")[0])
    assert f"{iteration:08d}" in str(latest_checkpoint(run / "checkpoints"))


def test_a_finished_run_holds_everything_and_can_be_evaluated_and_extended(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert main(["train", str(recipe), "--out", str(run)]) == 0
    names = {path.name for path in run.iterdir()}
    assert {"config.yaml", "environment.json", "metrics.jsonl", "README.md", "events", "curves.png"} <= names
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == [
        "best.safetensors",
        "iteration-00000009.safetensors",
        "iteration-00000012.safetensors",
    ]
    assert json.loads((run / "environment.json").read_text())["starts"][0]["versions"]["torch"]
    validations = [line["iteration"] for line in read_metrics(run / "metrics.jsonl") if line["kind"] == "validation"]
    assert validations == [4, 8, 12]

    capsys.readouterr()
    assert main(["evaluate", str(run), "--episodes", "7", "--mc-samples", "2"]) == 0
    result = json.loads((run / "evaluation-test-2samples.json").read_text())
    assert len(result["accuracies"]) == 7
    mean = sum(result["accuracies"]) / 7
    assert f"{100 * mean:.2f} ± {100 * result['interval_95']:.2f} % on 7 episodes" in capsys.readouterr().out
    std = (sum((a - mean) ** 2 for a in result["accuracies"]) / 7) ** 0.5
    assert result["interval_95"] == pytest.approx(1.96 * std / 7**0.5)
    assert main(["evaluate", str(run), "--episodes", "7", "--mc-samples", "2", "--state", "best"]) == 0

    episodes = tmp_path / "episodes.json"
    for seed in ("0", "1"):  # the second uses the list that the first wrote
        arguments = ["--episodes", "7", "--mc-samples", "2", "--seed", seed, "--episode-list", str(episodes)]
        assert main(["evaluate", str(run), *arguments]) == 0
    assert main(["evaluate", str(run), "--episodes", "8", "--episode-list", str(episodes)]) == 1
    assert "the list has 7" in capsys.readouterr().err

    assert main(["train", "--resume", str(run), "--training.iterations", "3"]) == 1
    assert "training.iterations is 3, but 12 are done already" in capsys.readouterr().err
    assert main(["train", "--resume", str(run), "--training.iterations", "14"]) == 0
    assert len(json.loads((run / "environment.json").read_text())["starts"]) == 2
    longer = tmp_path / "longer"
    assert main(["train", str(recipe), "--out", str(longer), "--training.iterations", "14"]) == 0
    assert_same_weights(run, longer)


def test_states_that_were_kept_during_training_are_tested_drawn_and_reported_apart(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert main(["train", str(recipe), "--out", str(run), "--training.checkpoint_keep", "5"]) == 0
    kept = [iteration_of(path) for path in checkpoints_in(run / "checkpoints")]
    assert kept == [5, 10, 12]
    capsys.readouterr()
    assert main(["evaluate", str(run), "--episodes", "3", "--mc-samples", "2", "--state", "all"]) == 0
    printed = capsys.readouterr().out
    for iteration in kept:
        assert f"run, iteration {iteration}: " in printed
    assert (run / "accuracy-over-iterations-test.png").exists()
    early = json.loads((run / "evaluation-test-iteration5-2samples.json").read_text())
    assert (early["iteration"], early["state"]) == (5, "5")

    # A run that ended there has the same weights, so the same accuracies.
    short = tmp_path / "short"
    assert main(["train", str(recipe), "--out", str(short), "--training.iterations", "5"]) == 0
    assert main(["evaluate", str(short), "--episodes", "3", "--mc-samples", "2"]) == 0
    assert json.loads((short / "evaluation-test-2samples.json").read_text())["accuracies"] == early["accuracies"]

    (summary,) = read_runs([run])
    assert [test.iteration for test in summary.test_curve()] == kept
    assert [test.state for test in summary.tests] == ["last"]
    assert main(["evaluate", str(run), "--state", "7"]) == 1
    assert "this run has the states after these iterations: 5, 10, 12" in capsys.readouterr().err


def test_tasks_of_one_meta_batch_differ_in_classes_and_a_task_is_the_same_again(recipe: Path, tmp_path: Path) -> None:
    main(["train", str(recipe), "--out", str(tmp_path / "run"), "--training.iterations", "1"])
    config = open_run(tmp_path / "run").config
    sampler = episode_sampler(config, open_splits(config), "train", TRAINING)
    batches = [[tuple(sampler.indices(i, t).classes) for t in range(4)] for i in range(10)]
    assert all(len(set(batch)) > 1 for batch in batches)  # chance may make two of them equal, not all four
    assert len({classes for batch in batches for classes in batch}) > 35
    assert torch.equal(sampler(3, 1).query_x, sampler(3, 1).query_x)


def test_the_clip_applies_to_the_mean_over_tasks(recipe: Path, tmp_path: Path) -> None:
    """Gradients 10 and −6 average to 2, within [−3, 3]; clipped one by one they would average to 0."""
    main(["train", str(recipe), "--out", str(tmp_path / "run"), "--training.iterations", "1"])
    run = open_run(tmp_path / "run")

    class Fake(md.Learner):
        def __init__(self) -> None:
            super().__init__()
            self.p = torch.nn.Parameter(torch.zeros(3))
            self.calls = [torch.tensor([10.0, 10.0, -1.0]), torch.tensor([-6.0, 10.0, -1.0])]

        def task_gradient(self, episode: Episode, *, generator: object) -> TaskGradient:
            return TaskGradient({"p": self.calls.pop(0)}, torch.zeros(()), torch.zeros(()))

        forward = adapt = None  # type: ignore[assignment]

    learner = Fake()
    sampler = episode_sampler(run.config, open_splits(run.config), "train", TRAINING)
    outer = OuterOptimizer(learner.named_parameters(), TrainingOptions(optimizer="sgd", meta_lr=1.0))
    episodes = (sampler(0, task) for task in range(2))
    with Workers(learner, 2) as workers:
        _Loop(run, learner, outer, episodes, None, workers, Recorder(), threads=1, world=ALONE).outer_step(0)
    assert learner.p.tolist() == [-2.0, -3.0, 1.0]


def test_the_perturbation_can_have_a_rate_of_its_own() -> None:
    theta, phi = torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1))
    options = TrainingOptions(optimizer="sgd", meta_lr=0.5, perturbation_rate=3.0)
    outer = OuterOptimizer([("network.weight", theta), ("perturbation.weight", phi)], options)
    outer.step([torch.ones(1), torch.ones(1)], 0)
    assert (theta.item(), phi.item()) == (-0.5, -1.5)


def test_a_diverging_run_stops_with_the_cause_and_keeps_the_last_good_state(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert main(["train", str(recipe), "--out", str(run), *DIVERGING]) == 1
    message = capsys.readouterr().err
    assert "iteration 1, task 1:" in message
    assert "lower learner.inner_lr" in message
    assert "The last good state is kept in" in message
    kept = latest_checkpoint(run / "checkpoints")
    assert kept is not None
    assert all(t.isfinite().all() for t in read_checkpoint(kept)[0].values())


BAD_CALLS = {
    "no channels": (["--network.channels", "0"], "network.channels is 0; it must be from 1 to 4096"),
    "an odd device": (["--machine.device", "meta"], "machine.device is 'meta'; use auto, cpu, cuda"),
    "an option of no section": (["--description.x", "3"], "--description.x cannot be set"),
    "a rate that is no number": (["--learner.inner_lr", "nan"], "learner.inner_lr is nan; it must be from 0 to 1000"),
    "way larger than the classes": (["--episode.way", "7"], r"validation classes.* 7-way .*6.*episode.way"),
    "shot + query larger than a class": (["--episode.query", "20"], r"glyphs.*20.*episode"),
    "an unknown option": (["--learner.inner_rate", "1"], "tiny.yaml: learner.inner_rate is not an option here"),
    "an option without value": (["--learner.steps"], "--learner.steps needs a value"),
    "first order": (["--learner.first_order", "true"], "first_order cannot be used with MetaDropout"),
}


@pytest.mark.parametrize("mistake", BAD_CALLS)
def test_a_mistake_gives_one_line_and_a_failing_status(
    mistake: str, recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, message = BAD_CALLS[mistake]
    assert main(["train", str(recipe), "--out", str(tmp_path / "run"), *arguments]) == 1
    error = capsys.readouterr().err.strip()
    assert re.search(message, error), error
    assert len(error.splitlines()) == 1
    assert not (tmp_path / "run").exists()  # the corrected command can use the folder


def test_resuming_refuses_what_would_be_another_run_or_none(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert main(["train", "--resume", str(run)]) == 1
    assert "is not a run's folder" in capsys.readouterr().err
    assert main(["train", str(recipe), "--out", str(run), "--training.iterations", "1"]) == 0
    assert main(["train", "--resume", str(run), "--learner.inner_lr", "1"]) == 1
    assert "learner.inner_lr cannot change on resuming" in capsys.readouterr().err
    assert main(["train", str(recipe), "--out", str(run)]) == 1
    assert "holds a run already" in capsys.readouterr().err
    newest = latest_checkpoint(run / "checkpoints")
    assert newest is not None
    newest.write_bytes(newest.read_bytes()[:-5])
    assert main(["train", "--resume", str(run), "--training.iterations", "2"]) == 1
    assert "delete it to go on from iteration-00000000.safetensors" in capsys.readouterr().err
    assert main(["evaluate", str(run)]) == 1
    assert "is damaged" in capsys.readouterr().err


def test_a_full_disk_stops_the_run_and_keeps_the_last_checkpoint(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert main(["train", str(recipe), "--out", str(run)]) == 0
    with small_files(5000):  # enough for metrics, too little for a checkpoint
        assert main(["train", "--resume", str(run), "--training.iterations", "50"]) == 1
    error = capsys.readouterr().err
    assert "the checkpoint cannot be written: File too large; the one before it is kept" in error
    assert f"metadropout train --resume {run}" in error
    assert latest_checkpoint(run / "checkpoints") == run / "checkpoints" / "iteration-00000012.safetensors"
    assert main(["train", "--resume", str(run), "--training.iterations", "13"]) == 0


def test_a_gpu_that_is_not_there_is_named(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(recipe), "--out", str(tmp_path / "run"), "--machine.device", "cuda:99"]) == 1
    assert "machine.device is 'cuda:99', but PyTorch finds" in capsys.readouterr().err


def test_a_disk_that_is_full_at_once_gives_a_message_too(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert main(["train", str(recipe), "--out", str(run)]) == 0
    with small_files(10):
        assert main(["train", "--resume", str(run), "--training.iterations", "50"]) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("metadropout: error: ")
    assert "File too large" in error
    assert main(["train", "--resume", str(run), "--training.iterations", "13"]) == 0


def test_a_signal_at_any_moment_saves_what_it_reports(recipe: Path, tmp_path: Path) -> None:
    main(["train", str(recipe), "--out", str(tmp_path / "run"), "--training.iterations", "1"])
    run = open_run(tmp_path / "run")
    config = replace(run.config, training=replace(run.config.training, iterations=5))
    splits, learner = open_parts(config)

    class Late:
        """A signal that comes between two looks."""

        looks = 0

        @property
        def received(self) -> signal.Signals | None:
            self.looks += 1
            return signal.SIGTERM if self.looks > 1 else None

    class Quiet:
        def on_iteration(self, *_: object) -> None: ...
        def on_message(self, *_: object) -> None: ...

    late = Late()
    with patch("metadropout.training.loop.interruptible", lambda: nullcontext(late)):
        result = train(run.folder, config, learner, splits, Quiet())
    assert result.stopped_by is signal.SIGTERM
    assert f"{result.iteration:08d}" in str(latest_checkpoint(run.checkpoints))


def test_two_processes_cannot_train_the_same_run(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    process = start("train", recipe, "--out", run, "--training.iterations", "100000")
    try:
        wait_for(lambda: len(read_metrics(run / "metrics.jsonl")) >= 1, process)
        assert main(["train", "--resume", str(run)]) == 1
        assert "another process is training this run" in capsys.readouterr().err
    finally:
        process.kill()
        process.communicate()


def test_the_real_resnet12_trains_a_few_iterations(recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    arguments = [
        "--network.name",
        "resnet12",
        "--network.channels",
        "[64, 128, 256, 512]",
        "--training.iterations",
        "2",
        "--training.meta_batch",
        "1",
    ]
    arguments += ["--training.validate_every", "100", "--training.validation_episodes", "1"]
    assert main(["train", str(recipe), "--out", str(run), *arguments]) == 0
    trained = weights(run)
    assert trained["learner.network.blocks.3.convs.2.weight"].shape == (512, 512, 3, 3)
    assert all(t.isfinite().all() for t in trained.values())
    assert md.ResNet12(5).perturbable[0] == "blocks.0.convs.0"


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in read_metrics(run / "metrics.jsonl") if line["kind"] == "training"]


def test_steps_may_be_recomputed_from_the_start_or_after_resuming(recipe: Path, tmp_path: Path) -> None:
    kept, recomputed = tmp_path / "kept", tmp_path / "recomputed"
    options = ["--training.iterations", "2", "--training.log_every", "1"]
    assert main(["train", str(recipe), "--out", str(kept), *options]) == 0
    assert (
        main(["train", str(recipe), "--out", str(recomputed), *options, "--learner.gradient_checkpointing", "true"])
        == 0
    )
    assert open_run(recomputed).config.learner["gradient_checkpointing"] is True
    assert losses(recomputed) == pytest.approx(losses(kept), rel=1e-4)
    assert (
        main(["train", "--resume", str(kept), "--training.iterations", "3", "--learner.gradient_checkpointing", "true"])
        == 0
    )
    assert open_run(kept).config.learner["gradient_checkpointing"] is True


def test_tasks_may_be_batched(recipe: Path, tmp_path: Path) -> None:
    options = ["--training.iterations", "2", "--training.log_every", "1", "--machine.tasks"]
    with patch.object(torch, "vmap", side_effect=torch.vmap) as vmap:
        assert main(["train", str(recipe), "--out", str(tmp_path / "loop"), *options, "auto"]) == 0
        assert not vmap.called  # on the CPU
        assert main(["train", str(recipe), "--out", str(tmp_path / "batched"), *options, "batched"]) == 0
        assert vmap.called
    assert losses(tmp_path / "batched") == pytest.approx(losses(tmp_path / "loop"), rel=1e-4)


def test_a_diverging_task_is_named_in_a_batch_too(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--machine.tasks", "batched"]
    assert main(["train", str(recipe), "--out", str(tmp_path / "run"), *DIVERGING, *options]) == 1
    assert "iteration 1, task 1: the inner loop diverged" in capsys.readouterr().err


@pytest.mark.parametrize("trained", ["transductive", "inductive", None])
def test_training_may_have_a_protocol_of_its_own(trained: str | None, recipe: Path) -> None:
    config = load_config(recipe, {"episode.protocol": "inductive", "episode.train_protocol": trained})
    splits = open_splits(config)
    assert episode_sampler(config, splits, "train", TRAINING).inductive == (trained != "transductive")
    assert episode_sampler(config, splits, "validation", VALIDATION).inductive
    assert episode_sampler(config, splits, "train", TESTING).inductive
