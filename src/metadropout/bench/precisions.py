"""How many times as fast a task is in bfloat16 as in float32, on one thread, and how far convolutions are off.

    python -m metadropout.bench.precisions
    python -m metadropout.bench.precisions --setting miniimagenet --method maml

A task of each precision by turns, with the kernels of each that are fastest here. Times are processor time, so that a
busy machine matters little; the ratios' median, lowest and highest are printed. Errors are those of 64 channels of
normal values, relative to the norm of the exact result.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from typing import get_args

import torch
from torch import Tensor
from torch.nn.functional import conv2d
from torch.nn.grad import conv2d_weight

from metadropout.bench.measuring import Ratio, Timing, ratio
from metadropout.bench.problem import SETTINGS, Method, Problem
from metadropout.bench.report import shown_ratio
from metadropout.noise import CounterNoise
from metadropout.ops import kernels
from metadropout.ops.kernels.convolutions import convolve, weight_gradient
from metadropout.ops.precision import Precision
from metadropout.training.allocator import keep_freed_memory

SIZE = (300, 64, 14, 14)
"""Images whose convolution's error is measured."""


def compare(problem: Problem, rounds: int) -> tuple[list[Timing], Ratio]:
    """Return the processor time of a task in float32 and in bfloat16, and how many times as fast the latter is."""
    episode = problem.episodes()[0]
    learners = {kind: problem.learner(kind) for kind in get_args(Precision)}
    timings = [Timing(kind, [], 0) for kind in learners]
    for number in range(rounds + 1):
        for learner, timing in zip(learners.values(), timings, strict=True):
            learner.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            start = time.process_time()
            learner.task_gradient(episode, generator=CounterNoise(problem.seed, number))
            if number:  # the first time compiles, measures and warms up
                timing.seconds.append(time.process_time() - start)
    full, rounded = timings
    return timings, ratio(full.seconds, rounded.seconds)


def errors() -> Iterator[tuple[str, float, float]]:
    """Give the relative errors of a convolution and of its weights' gradient, by type and size of tiles."""
    generator = torch.Generator().manual_seed(0)
    x, g = (torch.randn(SIZE, generator=generator).bfloat16().double() for _ in range(2))
    weight = torch.randn(SIZE[1], SIZE[1], 3, 3, generator=generator)
    exact = conv2d(x, weight.double(), padding=1), conv2d_weight(x, weight.shape, g, padding=1)  # type: ignore[no-untyped-call]
    for dtype in (torch.float32, torch.bfloat16):
        for tile in (2, 4):
            images, gradient = (t.to(dtype).contiguous(memory_format=torch.channels_last) for t in (x, g))
            found = convolve(images, weight, tile=tile), weight_gradient(images, gradient, tile=tile)[0]
            yield f"{dtype}, winograd-{tile}", _error(found[0], exact[0]), _error(found[1], exact[1])


def _error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setting", choices=list(SETTINGS), default="omniglot-20way")
    parser.add_argument("--method", choices=get_args(Method), default="metadropout")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    if not kernels.has_bf16():
        raise SystemExit("there are no kernels for bfloat16 here: no AVX512-BF16, or no compiler")
    keep_freed_memory()
    torch.set_num_threads(1)
    (full, rounded), faster = compare(Problem(SETTINGS[arguments.setting], arguments.method), arguments.rounds)
    print(f"{arguments.method}, {arguments.setting}: seconds of processor time per task")
    print(f"  float32 {full.median:.3f}, bfloat16 {rounded.median:.3f}, {shown_ratio(faster)} times as fast")
    for name, of_result, of_gradient in errors():
        print(f"  error, {name}: {of_result:.1e}; of the weights' gradient {of_gradient:.1e}")
