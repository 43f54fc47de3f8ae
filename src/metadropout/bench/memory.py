"""Peak memory and time of one task with and without recomputed inner steps (`--gradient-checkpointing`).

    python -m metadropout.bench.memory
    python -m metadropout.bench.memory --way 20 --shot 5

Each peak is that of a process of its own, less what the process held before its first task of that size. Times are
processor times of one thread, the two sides by turns, so that their ratio holds on a busy machine as well.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import time

import torch

import metadropout as md
from metadropout.training.allocator import keep_freed_memory

EXACT = {"MALLOC_MMAP_THRESHOLD_": "65536"}
"""Makes glibc give freed tensors back at once, so that a peak is what was in use and not how the heap was cut up."""


def make_learner(options: argparse.Namespace, steps: int, gradient_checkpointing: bool) -> md.MAML:
    """Meta-dropout on Conv4 for one-channel images of 28 x 28."""
    torch.manual_seed(0)
    network = md.Conv4(way=options.way, in_channels=1, channels=options.channels)
    learner = md.MAML(network, md.MetaDropout(network), steps=steps, gradient_checkpointing=gradient_checkpointing)
    return learner.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def make_episode(way: int, shot: int, query: int) -> md.Episode:
    """Random images: time and memory do not depend on what they show."""
    labels = torch.arange(way)
    x, y = torch.rand(way * shot, 1, 28, 28), labels.repeat_interleave(shot)
    return md.Episode(x, y, torch.rand(way * query, 1, 28, 28), labels.repeat_interleave(query))


def run_task(learner: md.MAML, episode: md.Episode) -> float:
    """Compute a task's meta-gradient and return the processor time it took, in seconds."""
    start = time.process_time()
    learner.task_gradient(episode, generator=md.SeededNoise(0))
    return time.process_time() - start


def peak() -> float:
    """Most memory that this process has held so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure_peak(options: argparse.Namespace) -> None:
    """Print how much memory a task needs beyond what one step on two images loads and keeps."""
    run_task(make_learner(options, 1, options.gradient_checkpointing), make_episode(way=2, shot=1, query=1))
    learner = make_learner(options, options.steps, options.gradient_checkpointing)
    before = peak()
    run_task(learner, make_episode(options.way, options.shot, options.query))
    print(peak() - before)


def compare(options: argparse.Namespace) -> None:
    """Print both sides and their ratios, and what remains without any inner step: the query pass."""
    sides = {"graph kept": [], "steps recomputed": ["--gradient-checkpointing"], "no inner steps": ["--steps", "0"]}
    peaks = []
    for side, flags in sides.items():
        command = [sys.executable, "-m", "metadropout.bench.memory", *sys.argv[1:], "--measure-peak", *flags]
        child = subprocess.run(command, env={**os.environ, **EXACT}, stdout=subprocess.PIPE, text=True, check=True)
        peaks.append(float(child.stdout))
        print(f"{side:16s} {peaks[-1]:8.1f} MiB")
    learners = [
        make_learner(options, options.steps, gradient_checkpointing) for gradient_checkpointing in (False, True)
    ]
    episode = make_episode(options.way, options.shot, options.query)
    for learner in learners:
        run_task(learner, episode)
    times = [[run_task(learner, episode) for learner in learners] for _ in range(options.rounds)]
    for side, seconds in zip(sides, zip(*times, strict=True), strict=False):
        print(f"{side:16s} {1000 * statistics.median(seconds):8.1f} ms, median of {options.rounds} rounds")
    print(f"recomputing needs {peaks[1] / peaks[0]:.2f} of the memory", end=" and ")
    print(f"{statistics.median(b / a for a, b in times):.2f} times the time")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("way", 5), ("shot", 1), ("query", 15), ("steps", 10), ("channels", 64), ("rounds", 11)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--measure-peak", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--gradient-checkpointing", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.measure_peak:
        measure_peak(arguments)
    else:
        keep_freed_memory()  # as `metadropout train` does
        compare(arguments)
