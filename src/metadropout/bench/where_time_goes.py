"""Where the time of a task's meta-gradient goes, by kind of operation, on one thread.

    python -m metadropout.bench.where_time_goes
    python -m metadropout.bench.where_time_goes --setting miniimagenet --method maml

The same task several times under PyTorch's profiler.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import get_args

import torch
from torch.profiler import ProfilerActivity, profile

from metadropout.bench.problem import SETTINGS, Method, Problem
from metadropout.noise import CounterNoise, NoiseSource, SeededNoise
from metadropout.ops import kernels
from metadropout.ops.precision import Precision
from metadropout.training.allocator import keep_freed_memory

KINDS = {
    "convolutions": ("Convolution",),
    "their gradients": ("_ConvolutionGradient",),
    "gradients of those": ("_ConvolutionGradientBackward",),
    "noisy product, with gradients": ("NoisyProduct", "_NoisyProductGradient", "_NoisyProductGradientBackward"),
    "norm, ReLU, pooling, with gradients": ("NormReluPool", "_NormReluPoolGradient", "_NormReluPoolGradientBackward"),
    "drawing noise": ("aten::normal_",),
}
"""Names of the profiler's events; all others are 'the rest'."""


SOURCES: dict[str, Callable[[int], NoiseSource]] = {"counter": CounterNoise, "seeded": SeededNoise}


def shares(
    problem: Problem, source: Callable[[int], NoiseSource], rounds: int, precision: Precision = "full"
) -> tuple[float, dict[str, float]]:
    """Return the seconds of a task, and the share of each kind of operation."""
    learner = problem.learner(precision)
    learner.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    episode = problem.episodes()[0]
    learner.task_gradient(episode, generator=source(0))  # warms up, and builds missing kernels
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for number in range(rounds):
            learner.task_gradient(episode, generator=source(number))
    times = {event.key: event.self_cpu_time_total for event in profiler.key_averages()}
    total = sum(times.values())
    found = {kind: sum(times.get(name, 0) for name in names) / total for kind, names in KINDS.items()}
    return total / 1e6 / rounds, {**found, "the rest": 1 - sum(found.values())}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setting", choices=list(SETTINGS), default="omniglot-20way")
    parser.add_argument("--method", choices=get_args(Method), default="metadropout")
    parser.add_argument("--noise", choices=list(SOURCES), default="counter")
    parser.add_argument("--precision", choices=get_args(Precision), default="full")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    if not kernels.available():
        raise SystemExit("there are no fused kernels here (no compiler?): PyTorch's own profiler tells more")
    keep_freed_memory()
    torch.set_num_threads(1)
    problem = Problem(SETTINGS[arguments.setting], arguments.method)
    seconds, found = shares(problem, SOURCES[arguments.noise], arguments.rounds, arguments.precision)
    print(f"{arguments.method}, {arguments.setting}: {seconds:.3f} s per task")
    for kind, share in found.items():
        print(f"  {kind:36s} {100 * share:5.1f} %")
