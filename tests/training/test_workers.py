"""Tasks side by side in threads: the same results in the same order, whatever the number of threads."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from toys import assert_same_weights, make_episode

import metadropout as md
from metadropout.cli import main
from metadropout.data import Episode, open_dataset
from metadropout.evaluation import evaluate
from metadropout.learners import Learner, TaskGradient
from metadropout.ops import kernels
from metadropout.runs.folder import open_run
from metadropout.training.workers import Workers, on_one_thread, replica, threads_to_use


@pytest.fixture
def learner(conv4: md.Conv4) -> md.MAML:
    return md.MAML(conv4, md.MetaDropout(conv4), steps=2)


@pytest.fixture
def three_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("metadropout.training.workers.cpus", lambda: 3)


def test_the_number_of_threads_does_not_change_a_run(recipe: Path, tmp_path: Path, three_cpus: None) -> None:
    for threads in ("1", "2", "3"):
        options = ["--training.meta_batch", "4", "--training.iterations", "5", "--machine.threads", threads]
        options += ["--network.channels", "16"]  # as many as all compiled kernels can be used with
        assert main(["train", str(recipe), "--out", str(tmp_path / threads), *options]) == 0
        assert main(["evaluate", str(tmp_path / threads), "--episodes", "5", "--mc-samples", "2"]) == 0
    for threads in ("2", "3"):
        assert_same_weights(tmp_path / "1", tmp_path / threads)
        assert (tmp_path / threads / "evaluation-test-2samples.json").read_text() == (
            tmp_path / "1" / "evaluation-test-2samples.json"
        ).read_text()
    (start,) = json.loads((tmp_path / "3" / "environment.json").read_text())["starts"]
    assert (start["processes"], start["threads"]) == (1, 3)


def test_results_come_in_the_order_of_the_tasks_however_long_each_takes(learner: md.MAML) -> None:
    finished = []

    def do(_: Learner, number: int) -> torch.Tensor:
        time.sleep(0.05 * (3 - number % 4))
        finished.append(number)
        return torch.tensor([float(number), 1.0])

    counted = []
    with Workers(learner, 10, threads=4) as workers:
        results = workers.run(do, iter(workers.share), width=2, on_result=lambda: counted.append(1))
    assert results.tolist() == [[number, 1] for number in range(10)]
    assert finished != sorted(finished)
    assert len(counted) == 10


@pytest.mark.parametrize(("count", "threads", "at_once", "each"), [(8, 2, 2, 1), (3, 3, 3, 1), (2, 5, 2, 2)])
def test_threads_beyond_the_number_of_tasks_go_to_the_operations(
    learner: md.MAML, count: int, threads: int, at_once: int, each: int
) -> None:
    seen: dict[int, int] = {}  # numbers of the threads
    barrier = threading.Barrier(at_once)  # lets nobody go on before as many as expected are there

    def do(_: Learner, number: int) -> torch.Tensor:
        if number < at_once:
            barrier.wait(10)
        return torch.tensor([torch.get_num_threads(), seen.setdefault(threading.get_ident(), len(seen))])

    with Workers(learner, count, threads=threads) as workers:
        results = workers.run(do, workers.share, width=2)
    assert results[:, 0].tolist() == [each] * count
    assert len(set(results[:, 1].tolist())) == at_once
    assert torch.get_num_threads() == 1  # the caller's own


def test_a_replica_shares_parameters_but_runs_on_its_own(learner: md.MAML) -> None:
    other = replica(learner)
    assert all(a is b for a, b in zip(learner.parameters(), other.parameters(), strict=True))
    assert other.perturbed is not learner.perturbed
    assert other.perturbed.network is other.network
    episode = make_episode()
    with torch.no_grad():
        next(learner.parameters()).add_(1.0)
    losses = [one.loss(episode, generator=md.SeededNoise(0)) for one in (learner, other)]
    assert torch.equal(*losses)


def test_threads_see_whether_fused_kernels_are_switched_off(learner: md.MAML) -> None:
    def do(_: Learner, __: int) -> torch.Tensor:
        return torch.tensor([float(kernels._switched_off.get())])

    with Workers(learner, 1) as workers:
        assert workers.run(do, [0], width=1).item() == 0
        with kernels.disabled():
            assert workers.run(do, [0], width=1).item() == 1


def test_an_error_in_a_thread_stops_the_run_with_its_message_and_loses_nothing(recipe: Path, tmp_path: Path) -> None:
    options = ["--training.meta_batch", "3", "--machine.threads", "2"]
    assert main(["train", str(recipe), "--out", str(tmp_path / "whole"), *options]) == 0
    real = md.MAML.task_gradient
    calls = []

    def failing(self: md.MAML, episode: Episode, *, generator: md.SeededNoise) -> TaskGradient:
        calls.append(generator.seed)
        if generator.seed[2:] == (7, 1):
            raise ArithmeticError("the second task of iteration 8")
        return real(self, episode, generator=generator)

    run = tmp_path / "run"
    before = set(threading.enumerate())  # other tests may have left some
    with (
        patch.object(md.MAML, "task_gradient", failing),
        pytest.raises(ArithmeticError, match="the second task of iteration 8"),
    ):
        main(["train", str(recipe), "--out", str(run), *options])
    assert max(iteration for _, _, iteration, _ in calls) == 7
    assert open_run(run).latest().name == "iteration-00000006.safetensors"
    new = set(threading.enumerate()) - before
    assert not [thread.name for thread in new if thread.name.startswith(("tasks", "episodes"))]
    assert main(["train", "--resume", str(run)]) == 0
    assert_same_weights(tmp_path / "whole", run)


def test_a_run_is_resumed_on_a_machine_with_fewer_cpus(recipe: Path, tmp_path: Path, three_cpus: None) -> None:
    run = tmp_path / "run"
    options = ["--machine.threads", "1000", "--training.iterations", "1"]
    assert main(["train", str(recipe), "--out", str(run), *options]) == 0
    (start,) = json.loads((run / "environment.json").read_text())["starts"]
    assert start["threads"] == 3
    assert main(["train", "--resume", str(run), "--training.iterations", "2"]) == 0


def test_training_leaves_the_callers_number_of_threads_as_it_was(
    recipe: Path, tmp_path: Path, three_cpus: None
) -> None:
    assert (threads_to_use(3), threads_to_use(4)) == (3, 3)
    assert threads_to_use(0) == torch.get_num_threads()
    torch.set_num_threads(2)
    with on_one_thread():
        assert torch.get_num_threads() == 1
    main(["train", str(recipe), "--out", str(tmp_path / "run"), "--training.iterations", "1"])
    assert torch.get_num_threads() == 2


def test_evaluating_side_by_side_gives_the_same_accuracies_in_the_same_order() -> None:
    network = md.Conv4(way=3, in_channels=1, channels=4)
    learner = md.MAML(network, md.MetaDropout(network), steps=2)
    sampler = md.EpisodeSampler(open_dataset("glyphs", train_classes=8).train, way=3, shot=1, query=5, seed=0)
    seen: list[list[int]] = [[], []]
    alone, together = (
        evaluate(
            learner,
            sampler,
            episodes=9,
            mc_samples=3,
            seed=0,
            threads=threads,
            on_episode=lambda threads=threads: seen[threads > 1].append(1),  # type: ignore[misc]
        )
        for threads in (1, 3)
    )
    assert alone.accuracies == together.accuracies
    assert len(set(alone.accuracies)) > 1
    assert [len(s) for s in seen] == [9, 9]
