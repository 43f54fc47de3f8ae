"""What more machines give: constants measured here, and a cost model that is computed from them.

    python -m metadropout.bench.scaling
    python -m metadropout.bench.scaling --recipe glyphs-5way-1shot-metadropout --rounds 3     # smaller

measures on one thread the seconds of a task in training and in testing, and of a start; counts the bytes of a task's
gradient; and prints what numbers of workers give by the model of docs/scaling.md. The network is not measured: its rate
is given.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from metadropout.learners.base import TEST_SAMPLES
from metadropout.noise import SOURCES
from metadropout.recipes import load_recipe
from metadropout.training.allocator import keep_freed_memory
from metadropout.training.loop import TESTING, TRAINING, episode_sampler, open_parts

WORKERS = (1, 8, 64, 512)


@dataclass(frozen=True)
class Costs:
    """Constants of a recipe on a machine."""

    task: float
    """Seconds of a task in training."""
    episode: float
    """Seconds of an episode in testing."""
    start: float
    """Seconds until training begins."""
    size: int
    """Bytes of a task's gradient."""
    rate: float
    """Bytes per second of the network, for each worker."""
    latency: float
    """Seconds of an exchange between two workers, however little is sent."""

    def iteration(self, workers: int, meta_batch: int) -> float:
        """Return the seconds of an outer step.

        The busiest worker does ⌈B / W⌉ tasks. Each worker gets the gradients of all tasks that are not its own.
        """
        used = min(workers, meta_batch)
        tasks = math.ceil(meta_batch / used)
        if used == 1:
            return tasks * self.task
        exchange = (meta_batch - tasks) * self.size / self.rate + self.latency * math.ceil(math.log2(used))
        return tasks * self.task + exchange

    def training(self, workers: int, meta_batch: int, iterations: int) -> float:
        """Return the seconds of a run that workers train together."""
        return self.start + iterations * self.iteration(workers, meta_batch)

    def testing(self, workers: int, episodes: int) -> float:
        """Return the seconds of a test whose episodes are shared out."""
        return self.start + math.ceil(episodes / workers) * self.episode

    def table(self, workers: int, runs: int, meta_batch: int, iterations: int, episodes: int) -> float:
        """Return the seconds of many runs: one worker each, and several each once there are more workers than runs."""
        each = max(1, workers // runs)
        rounds = math.ceil(runs / min(workers, runs))
        return rounds * (self.training(each, meta_batch, iterations) + self.testing(each, episodes))


def measure(recipe: str, rounds: int, rate: float, latency: float) -> Costs:
    """Measure the constants of a recipe on one thread."""
    config = load_recipe(recipe)
    splits, learner = open_parts(config)
    learner.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    torch.set_num_threads(1)
    training = episode_sampler(config, splits, "train", TRAINING)(0, 0)
    test = episode_sampler(config, splits, "test", TESTING)(0, 0)
    source = SOURCES[config.training.noise]

    def adapt() -> None:
        with torch.no_grad():
            x, y = test.support_x, test.support_y
            learner.adapt(x, y, mc_samples=TEST_SAMPLES, generator=source(0))(test.query_x)

    trained = [parameter.numel() for parameter in learner.parameters() if parameter.requires_grad]
    return Costs(
        task=_seconds(lambda: learner.task_gradient(training, generator=source(0)), rounds),
        episode=_seconds(adapt, rounds),
        start=_start(recipe),
        size=4 * sum(trained),
        rate=rate,
        latency=latency,
    )


def _seconds(do: Callable[[], object], rounds: int) -> float:
    do()
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        do()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def _start(recipe: str) -> float:
    """Return the seconds of a training of one iteration, almost all of which is the start."""
    small = {
        "training.iterations": 1,
        "training.meta_batch": 1,
        "training.validation_episodes": 1,
        "machine.threads": 1,
    }
    options = [text for name, value in small.items() for text in (f"--{name}", str(value))]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "metadropout", "train", recipe, "--out", str(Path(folder) / "run"), *options]
        started = time.perf_counter()
        subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True, capture_output=True)
        return time.perf_counter() - started


def report(costs: Costs, recipe: str, meta_batches: Sequence[int], runs: int, episodes: int) -> str:
    """Write the constants, and what numbers of workers give."""
    iterations = load_recipe(recipe).training.iterations
    lines = [
        f"{recipe}: {costs.task:.3f} s a task in training, {costs.episode:.3f} s an episode in testing, "
        f"{costs.start:.1f} s a start, {costs.size / 1e6:.2f} MB a gradient",
        "",
    ]
    heads = [f"training, meta-batch {batch}" for batch in meta_batches]
    heads += [f"testing, {episodes} episodes", f"a table of {runs} runs"]
    lines += [f"| workers | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for workers in WORKERS:
        kinds = [partial(costs.training, meta_batch=batch, iterations=iterations) for batch in meta_batches]
        kinds.append(partial(costs.testing, episodes=episodes))
        first = meta_batches[0]
        kinds.append(partial(costs.table, runs=runs, meta_batch=first, iterations=iterations, episodes=episodes))
        cells = [_gain(kind, workers) for kind in kinds]
        lines.append(f"| {workers} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _gain(seconds: Callable[[int], float], workers: int) -> str:
    taken = seconds(workers)
    shown = f"{taken / 3600:.2f} h" if taken > 3600 else f"{taken / 60:.1f} min"
    return f"{shown}, {seconds(1) / taken:.1f} times"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="glyphs-5way-1shot-metadropout")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--meta-batch", type=int, nargs="+", default=[4, 64])
    parser.add_argument("--runs", type=int, default=48, help="runs of a table: 12 rows in 4 settings")
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--rate", type=float, default=1.25e9, help="bytes per second of the network (10 Gbit/s)")
    parser.add_argument("--latency", type=float, default=1e-4, help="seconds of an exchange")
    arguments = parser.parse_args()
    keep_freed_memory()
    found = measure(arguments.recipe, arguments.rounds, arguments.rate, arguments.latency)
    print(report(found, arguments.recipe, arguments.meta_batch, arguments.runs, arguments.episodes))
