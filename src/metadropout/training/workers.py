"""Tasks side by side: in the threads of this process, and shared out over the processes of a run.

Threads that share every operation of a task wait for each other at its end, and how many there are changes the order
of its sums. So each thread has a task of its own.
"""

from __future__ import annotations

import copy
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from queue import SimpleQueue
from typing import Self, TypeVar

import torch
from torch import Tensor

from metadropout.learners import Learner
from metadropout.training.distributed import ALONE, World

T = TypeVar("T")


class Workers:
    """Does tasks side by side and brings their results together, in the order of the tasks.

    Each thread has a copy of the learner that shares the parameters. Where there are more threads than tasks, the
    operations of a task are split among several. On a GPU tasks run one after the other.

    Args:
        learner: what does the tasks.
        count: how many tasks are to be done together.
        threads: threads of this process.
        world: the processes among which the tasks are shared out.
    """

    def __init__(self, learner: Learner, count: int, *, threads: int = 1, world: World = ALONE) -> None:
        self.threads, self.world, self._count = threads, world, count
        self.share = world.share(count)
        """Numbers of the tasks of this process."""
        self._like = next(learner.parameters())
        self._at_once = min(threads, world.largest_share(count)) if self._like.device.type == "cpu" else 1
        self._threads_each = threads // self._at_once
        self._learners: SimpleQueue[Learner] = SimpleQueue()
        for number in range(self._at_once):
            self._learners.put(learner if number == 0 else replica(learner))
        self._mine = threading.local()
        self._pool = ThreadPoolExecutor(self._at_once, thread_name_prefix="tasks", initializer=self._start_thread)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # Who interrupts does not want to wait for the tasks that are being done.
        self._pool.shutdown(wait=kind is not KeyboardInterrupt, cancel_futures=True)

    def run(
        self,
        do: Callable[[Learner, T], Tensor],
        items: Iterable[T],
        *,
        width: int,
        on_result: Callable[[], None] = lambda: None,
    ) -> Tensor:
        """Do all tasks once and return their results, the same in every process.

        Args:
            do: does a task and returns its result, a vector, or several tasks and returns one below the other; must
                not change the learner.
            items: what this process' tasks are made of, in the order of `share`; taken when they are needed.
            width: length of the results.
            on_result: called after each task of this process, in this thread.

        Returns:
            Shape (count, width).
        """
        rows = self._like.new_zeros(self.world.largest_share(self._count), width)
        results = (row for result in self._results(do, items) for row in result.view(-1, width))
        for row, result in zip(rows, results, strict=False):  # the rest of the rows stays empty
            row.copy_(result)
            on_result()
        return self.world.gather(rows, self._count)

    def _results(self, do: Callable[[Learner, T], Tensor], items: Iterable[T]) -> Iterator[Tensor]:
        coming: deque[Future[Tensor]] = deque()
        for item in items:
            coming.append(self._pool.submit(copy_context().run, self._do_here, do, item))
            if len(coming) > 2 * self._at_once:  # enough for every thread to have something to do
                yield coming.popleft().result()
        while coming:
            yield coming.popleft().result()

    def _start_thread(self) -> None:
        torch.set_num_threads(self._threads_each)  # counts for the thread that calls it
        if self._like.device.type == "cuda":
            torch.cuda.set_device(self._like.device)
        self._mine.learner = self._learners.get()

    def _do_here(self, do: Callable[[Learner, T], Tensor], item: T) -> Tensor:
        return do(self._mine.learner, item)


def replica(learner: Learner) -> Learner:
    """Copy a learner for another thread; parameters and buffers are not copied but shared."""
    shared = [*learner.parameters(), *learner.buffers()]
    return copy.deepcopy(learner, memo={id(tensor): tensor for tensor in shared})


def threads_to_use(asked: int) -> int:
    """Return how many threads a process uses: as many as asked for and there are CPUs, or as PyTorch would for 0.

    A run keeps what was asked for, and may be resumed on a smaller machine.
    """
    return min(asked, cpus()) or torch.get_num_threads()


def cpus() -> int:
    """Return how many CPUs this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def on_one_thread() -> Iterator[None]:
    """Let the operations of the calling thread run on one thread, so that their rounding is the same on any machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
