"""Episodes per second beside a plain Dataset and DataLoader on the same prepared cache, and the cost of preparing.

    python -m metadropout.bench.episodes

needs Omniglot and CIFAR-100 in the data directory (METADROPOUT_DATA). Ratios are taken within one run, the two sides
by turns, so that they hold on a busy machine as well.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from metadropout.data import EpisodeSampler, ImageSet, Prefetcher, open_dataset
from metadropout.data.inspection import prepared_of

WAY, SHOT, QUERY, DRAWINGS = 20, 1, 15, 20


class PlainDataset(Dataset[tuple[Tensor, int]]):
    """One image at a time, as the tutorials have it: index the memory map, turn, make a float tensor."""

    def __init__(self, images: ImageSet, *, floats: bool) -> None:
        self.floats = floats
        prepared = prepared_of(images)
        assert prepared is not None
        total = int(prepared.class_sizes.sum())
        self.pixels = np.memmap(prepared.pixel_path, np.uint8, "r", shape=(total, 28, 28))
        number = {name: i for i, name in enumerate(prepared.class_names)}
        self.characters = [number[name.rsplit("/", 1)[0]] for name in images.class_names]

    def __len__(self) -> int:
        return len(self.characters) * DRAWINGS

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        label, drawing = divmod(index, DRAWINGS)
        image = np.rot90(self.pixels[self.characters[label] * DRAWINGS + drawing], label % 4)
        tensor = torch.from_numpy(image[None].copy())
        return tensor.float().mul_(1 / 255) if self.floats else tensor, label


class EpisodeBatches(Sampler[list[int]]):
    """The images of the same episodes, support before query."""

    def __init__(self, sampler: EpisodeSampler) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[list[int]]:
        for task in range(10**9):
            classes, images = self.sampler.indices(0, task)
            index = classes[:, None] * DRAWINGS + images  # (way, shot + query)
            yield [*index[:, :SHOT].reshape(-1).tolist(), *index[:, SHOT:].reshape(-1).tolist()]


def rate(step: Callable[[], object], count: int) -> float:
    """Steps per second."""
    start = time.perf_counter()
    for _ in range(count):
        step()
    return count / (time.perf_counter() - start)


def compare(rounds: int) -> None:
    """Print episodes per second of the sampler and of data loaders, and their ratios."""
    train = open_dataset("omniglot").train
    sampler = EpisodeSampler(train, way=WAY, shot=SHOT, query=QUERY, seed=0)
    tasks = iter(range(10**9))
    prefetcher = Prefetcher(sampler.raw, ((1, task) for task in range(10**9)))
    ours: dict[str, Callable[[], object]] = {
        "sampler, floats": lambda: sampler(1, next(tasks)),
        "sampler, bytes": lambda: sampler.raw(1, next(tasks)),
        "prefetcher, bytes": lambda: next(prefetcher),
    }
    loaders = {
        name: iter(
            DataLoader(
                PlainDataset(train, floats="floats" in name), batch_sampler=EpisodeBatches(sampler), num_workers=workers
            )
        )
        for name, workers in (
            ("DataLoader, floats", 0),
            ("DataLoader, bytes", 0),
            ("DataLoader, floats, 2 workers", 2),
        )
    }
    # Both sides give the same episodes.
    for iterator in loaders.values():
        images, _ = next(iterator)
        episode = sampler(0, 0) if images.is_floating_point() else sampler.raw(0, 0)
        assert torch.equal(images, torch.cat([episode.support_x, episode.query_x]))
    first = rate(ours["sampler, floats"], 1500)  # classes are turned when first met; after this nearly all were
    rates: dict[str, list[float]] = {name: [] for name in [*ours, *loaders]}
    for _ in range(rounds):
        for name, step in ours.items():
            rates[name].append(rate(step, 400))
        for name, iterator in loaders.items():
            rates[name].append(rate(lambda iterator=iterator: next(iterator), 20))  # type: ignore[misc]
    prefetcher.close()
    print(f"\nOmniglot, {WAY}-way {SHOT}-shot with {QUERY} queries: episodes per second, median of {rounds} rounds")
    print(f"  {'sampler, floats, first 1500':30s} {first:8.0f}")
    for name, values in rates.items():
        print(f"  {name:30s} {statistics.median(values):8.0f}")
    for name in ours:
        plain = f"DataLoader, {name.split(', ')[1]}"
        ratios = [a / b for a, b in zip(rates[name], rates[plain], strict=True)]
        print(f"  {name} / {plain}: {statistics.median(ratios):.1f} (lowest {min(ratios):.1f})")


PROGRAM = """
import resource, sys, time
from metadropout.data import open_dataset
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
before, start, processor = peak(), time.perf_counter(), time.process_time()
open_dataset(sys.argv[1])
seconds, processor, more = time.perf_counter() - start, time.process_time() - processor, peak() - before
print(f"{seconds:.3f} s ({processor:.3f} s of processor time)", end=", ")
print(f"{before:.0f} MB of memory after all imports and {more:.0f} MB more at the peak")
"""


def prepare() -> None:
    """Print time and peak memory of preparing and of opening again, each in a process of its own."""
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "METADROPOUT_CACHE": cache}
        for name in ("omniglot", "cifar_fs"):
            for what in ("prepared", "opened again"):
                command = [sys.executable, "-c", PROGRAM, name]
                run = subprocess.run(
                    command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True
                )
                print(f"{name} {what}: {run.stdout.strip()}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--skip-preparing", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if not arguments.skip_preparing:
        prepare()
    compare(arguments.rounds)
