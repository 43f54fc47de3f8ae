"""Several processes by torchrun: the same run whatever their number, and an end to all of them if one ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
import torch
from toys import DIVERGING, assert_same_weights, finish, start, wait_for

from metadropout.cli import main
from metadropout.config import MachineOptions, resolve_device
from metadropout.errors import ConfigError
from metadropout.runs.folder import open_run
from metadropout.training.checkpoints import latest_checkpoint
from metadropout.training.distributed import ALONE, World, joined
from metadropout.training.metrics import read_metrics


def workers_of(torchrun: subprocess.Popen[str]) -> list[int]:
    """Return the processes that torchrun has started, in the order of their ranks."""
    children = Path(f"/proc/{torchrun.pid}/task/{torchrun.pid}/children").read_text()
    return sorted(map(int, children.split()))


def messages(err: str) -> list[str]:
    return [line for line in err.splitlines() if line.startswith("metadropout:")]


def test_two_processes_with_three_tasks_give_the_run_of_one_process(recipe: Path, tmp_path: Path) -> None:
    alone, together = tmp_path / "alone", tmp_path / "together"
    options = ["--training.iterations", "5", "--training.meta_batch", "3", "--perturbation.name", "combined"]
    options += ["--perturbation.parts", "[{name: metadropout}, {name: mixup}]"]  # normal noise, and other numbers
    assert main(["train", str(recipe), "--out", str(alone), *options]) == 0
    out, err = finish(start("train", recipe, "--out", together, *options, processes=2))
    assert out.count("trained to iteration 5") == 1, err
    assert err.count("iteration 4: validation accuracy") == 1
    assert_same_weights(alone, together)
    lines = [read_metrics(run / "metrics.jsonl") for run in (alone, together)]
    for one, other in zip(*lines, strict=True):
        same = one.keys() - {"seconds", "tasks_per_second"}
        assert {name: one[name] for name in same} == {name: other[name] for name in same}
    starts = json.loads((together / "environment.json").read_text())["starts"]
    assert [begun["processes"] for begun in starts] == [2]


def test_after_one_process_is_killed_all_end_with_one_message_and_one_process_can_go_on(
    recipe: Path, tmp_path: Path
) -> None:
    run, whole = tmp_path / "run", tmp_path / "whole"
    options = [
        "--training.iterations",
        "60",
        "--training.validate_every",
        "1000",
        "--training.validation_episodes",
        "1",
    ]
    process = start("train", recipe, "--out", run, *options, processes=2)
    wait_for(lambda: len(read_metrics(run / "metrics.jsonl")) >= 2, process)
    os.kill(workers_of(process)[1], signal.SIGKILL)
    _, err = finish(process)
    assert process.returncode != 0
    (message,) = messages(err)
    assert "another process of this run has ended or cannot be reached" in message
    assert f"metadropout train --resume {run}" in message
    assert open_run(run).latest().name < "iteration-00000060"
    assert main(["train", "--resume", str(run)]) == 0
    assert main(["train", str(recipe), "--out", str(whole), *options]) == 0
    assert_same_weights(whole, run)


def test_a_signal_to_torchrun_saves_and_stops_and_more_processes_than_tasks_can_go_on(
    recipe: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    process = start("train", recipe, "--out", run, "--training.iterations", "100000", processes=2)
    wait_for(lambda: len(read_metrics(run / "metrics.jsonl")) >= 2, process)
    process.send_signal(signal.SIGTERM)
    out, err = finish(process)
    assert process.returncode != 0
    assert messages(err) == []
    assert out.count("stopped by SIGTERM after iteration") == 1, err
    iteration = int(out.split("after iteration ")[1].split(",")[0])
    assert f"{iteration:08d}" in str(latest_checkpoint(run / "checkpoints"))

    more = str(iteration + 2)
    _, err = finish(start("train", "--resume", run, "--training.iterations", more, processes=3))
    assert f"resuming after iteration {iteration}" in err
    whole = tmp_path / "whole"
    assert main(["train", str(recipe), "--out", str(whole), "--training.iterations", more]) == 0
    assert_same_weights(whole, run)


def test_an_error_in_any_process_gives_one_message_and_ends_all(recipe: Path, tmp_path: Path) -> None:
    """Both processes meet a loss that is not finite; then the first one alone finds the folder taken."""
    run = tmp_path / "run"
    for expected in ("lower learner.inner_lr", "holds a run already"):
        process = start("train", recipe, "--out", run, *DIVERGING, processes=2)
        out, err = finish(process)
        assert process.returncode != 0
        assert out == ""
        (message,) = messages(err)
        assert expected in message
    assert (run / "checkpoints" / "iteration-00000000.safetensors").exists()


def test_processes_evaluate_together(recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert main(["train", str(recipe), "--out", str(run), "--training.iterations", "1"]) == 0
    arguments = ["evaluate", str(run), "--episodes", "5", "--mc-samples", "2"]
    assert main(arguments) == 0
    alone = json.loads((run / "evaluation-test-2samples.json").read_text())
    episodes = tmp_path / "episodes.json"  # does not exist: one process writes it, both read it
    out, err = finish(start(*arguments, "--episode-list", episodes, processes=2))
    assert out.count("on 5 episodes of test classes") == 1, err
    together = json.loads((run / "evaluation-test-2samples-list-episodes.json").read_text())
    assert together == {**alone, "episode_list": str(episodes)}


def test_tasks_are_shared_out_evenly_and_none_is_left_out() -> None:
    for size in (1, 2, 3, 5):
        for count in (1, 4, 6):
            shares = [World(rank, size).share(count) for rank in range(size)]
            assert sorted(task for share in shares for task in share) == list(range(count))
            assert World(0, size).largest_share(count) == max(map(len, shares)) <= min(map(len, shares)) + 1


def test_a_single_process_is_a_world_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "7")  # some clusters set it for every program; torchrun says that it is there
    with joined() as world:
        assert world == ALONE
        assert world.is_first
    assert ALONE.from_first(lambda: "naïve\n") == "naïve\n"
    assert ALONE.from_first(lambda: "") == ""
    assert ALONE.largest(15) == 15


def test_each_process_takes_the_gpu_of_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for device in ("auto", "cuda"):
        assert [resolve_device(MachineOptions(device=device), rank).index for rank in (0, 1)] == [0, 1]
        with pytest.raises(ConfigError, match="PyTorch finds 2 GPUs here; start at most that many processes"):
            resolve_device(MachineOptions(device=device), 2)
    assert resolve_device(MachineOptions(device="cuda:1")).index == 1
    with pytest.raises(ConfigError, match="each process needs a GPU of its own"):
        resolve_device(MachineOptions(device="cuda:0"), 1)
    assert resolve_device(MachineOptions(device="cpu"), 5).type == "cpu"
