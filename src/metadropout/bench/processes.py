"""Tasks per second in meta-training: two processes beside one, and tasks side by side beside operations split up.

    python -m metadropout.bench.processes
    python -m metadropout.bench.processes --way 5 --channels 16 --rounds 3      # smaller

needs two free cores. By default 20-way 1-shot Meta-dropout on the built-in characters. Ratios are taken within a round,
the two sides by turns; start-up, the first iterations and validation are not counted.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

import metadropout as md
from metadropout.data import open_dataset
from metadropout.learners import Learner
from metadropout.training.allocator import keep_freed_memory
from metadropout.training.metrics import read_metrics
from metadropout.training.workers import Workers

RECIPE = "glyphs-5way-1shot-metadropout"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


def rate_of_training(options: argparse.Namespace, processes: int) -> float:
    """Train from the command line, one thread per process, and return tasks per second of the second half."""
    launcher = [*TORCHRUN, str(processes)] if processes > 1 else []
    changes = {
        "episode.way": options.way,
        "network.channels": options.channels,
        "training.meta_batch": options.meta_batch,
        "training.iterations": 2 * options.iterations,
        "training.log_every": options.iterations,
        "training.checkpoint_every": 10**6,
        "training.validate_every": 10**6,
        "training.validation_episodes": 1,
        "training.validation_samples": 1,
        "machine.device": "cpu",
        "machine.threads": 1,
    }
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        command = [sys.executable, *launcher, "-m", "metadropout", "train", RECIPE, "--out", str(out)]
        command += [text for name, value in changes.items() for text in (f"--{name}", str(value))]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"training failed with status {done.returncode}:\n{done.stderr}")
        rates = [line["tasks_per_second"] for line in read_metrics(out / "metrics.jsonl") if line["kind"] == "training"]
    return float(rates[-1])


def rate_of_separate_runs(options: argparse.Namespace) -> float:
    """Train two runs at once that share nothing but the machine, and return the tasks per second of both."""
    with ThreadPoolExecutor(2) as pool:
        return sum(pool.map(lambda _: rate_of_training(options, 1), range(2)))


def compare_processes(options: argparse.Namespace) -> None:
    """Print tasks per second of one process, of two, and of two that do not wait for each other: the most to be had."""
    report(
        options.rounds,
        {
            "1 process, 1 thread": lambda: rate_of_training(options, 1),
            "2 runs at once that share nothing": lambda: rate_of_separate_runs(options),
            "2 processes by torchrun, 1 thread each": lambda: rate_of_training(options, 2),
        },
    )


def compare_threads(options: argparse.Namespace) -> None:
    """Print tasks per second of two tasks side by side and of one task after the other on two threads."""
    network = md.Conv4(way=options.way, in_channels=1, channels=options.channels)
    learner = md.MAML(network, md.MetaDropout(network))
    learner.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    sampler = md.EpisodeSampler(open_dataset("glyphs").train, way=options.way, shot=1, query=15, seed=0)
    episodes = [sampler(0, task) for task in range(options.meta_batch)]

    def do(learner: Learner, episode: md.Episode) -> Tensor:
        return learner.task_gradient(episode, generator=md.SeededNoise(0)).loss

    def rate(step: Callable[[], object]) -> float:
        start = time.perf_counter()
        for _ in range(options.iterations):
            step()
        tasks: int = options.iterations * len(episodes)
        return tasks / (time.perf_counter() - start)

    with Workers(learner, len(episodes), threads=2) as two, Workers(learner, 1, threads=2) as one:

        def side_by_side() -> Tensor:
            return two.run(do, episodes, width=1)

        def in_turn() -> Tensor:
            return torch.cat([one.run(do, [episode], width=1) for episode in episodes])

        torch.testing.assert_close(side_by_side(), in_turn(), rtol=1e-3, atol=1e-3)  # the same work; also warms up
        report(
            options.rounds,
            {
                "one task after the other, operations on 2 threads": lambda: rate(in_turn),
                "2 tasks side by side, 1 thread each": lambda: rate(side_by_side),
            },
        )


def report(rounds: int, sides: dict[str, Callable[[], float]]) -> None:
    """Measure by turns and print the rates of all sides, and their ratios to the first."""
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, measure in sides.items():
            rates[name].append(measure())
    first = next(iter(rates.values()))
    for name, values in rates.items():
        ratios = [b / a for a, b in zip(first, values, strict=True)]
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        print(f"  {name:50s} {statistics.median(values):8.2f} tasks/s, ratio {spread}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--way", type=int, default=20)
    parser.add_argument("--channels", type=int, default=64)
    parser.add_argument("--meta-batch", type=int, default=4)
    parser.add_argument(
        "--iterations", type=int, default=3, help="outer steps in a measurement, after as many before it"
    )
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    keep_freed_memory()
    size = f"{arguments.way}-way 1-shot, {arguments.channels} channels, meta-batch {arguments.meta_batch}"
    print(f"Meta-dropout, {size}: median of {arguments.rounds} rounds", flush=True)
    compare_processes(arguments)
    compare_threads(arguments)
