"""How many times as fast this version is as another one, per task on one thread, by turns in one run.

    git archive COMMIT src | tar -x -C before
    python -m metadropout.bench.versions before/src
    python -m metadropout.bench.versions before/src --setting omniglot-5way --work test

The other version runs as it does by default. This one runs with the convolutions of before and `SeededNoise`, as a run
that was begun before does; with the convolutions that are fastest here; and with `CounterNoise` as well. Times are
processor time, so that a busy machine matters little; the ratios' median, lowest and highest are printed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from metadropout.bench.problem import SETTINGS, Problem

SAMPLES = 30
HOW = ("before", "as before", "convolutions", "and noise")


def serve(setting: str, method: Any, work: str, how: str) -> None:
    """Do a task for each line that comes in, and print the seconds it took; with what both versions have."""
    torch.set_num_threads(1)
    problem = Problem(SETTINGS[setting], method)
    learner, episode = problem.learner(), problem.episodes()[0]
    learner.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def task(number: int) -> None:
        noise: Any = problem.noise(number)
        if how == "and noise":
            from metadropout.noise import CounterNoise  # noqa: PLC0415 - not in every version

            noise = CounterNoise(problem.seed, number)
        if work == "train":
            learner.task_gradient(episode, generator=noise)
            return
        with torch.no_grad():
            x, y = episode.support_x, episode.support_y
            learner.adapt(x, y, mc_samples=SAMPLES, generator=noise)(episode.query_x)

    choices: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if how == "as before":
        from metadropout.ops import kernels  # noqa: PLC0415 - not in every version

        choices = kernels.using({})
    with choices:
        task(0)  # compiles, measures and warms up
        for number, _ in enumerate(sys.stdin):
            start = time.process_time()
            task(number)
            print(time.process_time() - start, flush=True)


def keep_freed_memory() -> None:
    """Do as `metadropout train` does, wherever a version has it."""
    try:
        from metadropout.training.allocator import keep_freed_memory  # noqa: PLC0415
    except ImportError:
        from metadropout.memory import keep_freed_memory  # type: ignore[import-not-found,no-redef] # noqa: PLC0415
    keep_freed_memory()


def compare(before: Path, setting: str, method: str, work: str, rounds: int) -> None:
    """Print seconds and ratios."""
    here = Path(__file__).parents[2]
    servers = {
        how: subprocess.Popen(
            [sys.executable, "-P", __file__, "--serve", setting, method, work, how],
            env={**os.environ, "PYTHONPATH": str(before if how == "before" else here)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for how in HOW
    }
    seconds: dict[str, list[float]] = {how: [] for how in HOW}
    for _ in range(rounds):
        for how, server in servers.items():
            assert server.stdin is not None
            assert server.stdout is not None
            server.stdin.write("\n")
            server.stdin.flush()
            seconds[how].append(float(server.stdout.readline()))
    for server in servers.values():
        server.communicate()
    print(f"{work}, {method}, {setting}: seconds of processor time per task, and times as fast as before")
    for how, values in seconds.items():
        ratios = [a / b for a, b in zip(seconds["before"], values, strict=True)]
        low, middle, high = min(ratios), statistics.median(ratios), max(ratios)
        print(f"  {how:14s} {statistics.median(values):.3f}  {middle:.2f} ({low:.2f}–{high:.2f})", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        keep_freed_memory()
        serve(*sys.argv[2:6])
        sys.exit()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="folder that holds the other version's package")
    parser.add_argument("--setting", choices=list(SETTINGS), default="omniglot-20way")
    parser.add_argument("--method", choices=["maml", "metadropout"], default="metadropout")
    parser.add_argument("--work", choices=["train", "test"], default="train", help=f"test: {SAMPLES} noise samples")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    compare(arguments.before, arguments.setting, arguments.method, arguments.work, arguments.rounds)
