"""Several processes that train one run together, started by torchrun; a single process is a world of its own.

Each process does every size-th task, all get the results of all tasks in the order of the tasks, and from there on
all compute the same. So the run does not depend on their number.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from metadropout.errors import TrainingError
from metadropout.training.heartbeat import Heartbeat

PATIENCE = timedelta(minutes=10)
"""How long a process waits for the others. One that ends is noticed at once; this is for one that hangs."""


class ProcessLostError(TrainingError):
    """Another process of the run has ended, or cannot be reached."""


@dataclass(frozen=True)
class World:
    """The processes of a run, as one of them sees it."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    """Number of this process on its machine; it uses the GPU of that number."""
    heartbeat: Heartbeat | None = field(default=None, compare=False)
    """Notices hosts that are lost, where there are several."""

    @property
    def is_first(self) -> bool:
        """Whether this is the process that writes files and talks to the user."""
        return self.rank == 0

    def on_loss(self, advice: str) -> None:
        """Say what the user can do when a host is lost."""
        if self.heartbeat is not None:
            self.heartbeat.advice = advice

    def share(self, count: int) -> range:
        """Return which of that many tasks this process does."""
        return range(self.rank, count, self.size)

    def largest_share(self, count: int) -> int:
        """Return how many of that many tasks the busiest process does."""
        return len(range(0, count, self.size))

    def gather(self, rows: Tensor, count: int) -> Tensor:
        """Bring the rows of all tasks together, in the order of the tasks.

        Args:
            rows: of this process' share, filled up to the largest share; shape (largest_share(count), width).
            count: how many tasks there are.

        Returns:
            Shape (count, width), the same in every process.
        """
        if self.size == 1:
            return rows
        of_each = [torch.empty_like(rows) for _ in range(self.size)]
        with _reaching_others():
            dist.all_gather(of_each, rows)
        # Row k of process r is task k * size + r.
        return torch.stack(of_each, dim=1).reshape(-1, rows.shape[1])[:count]

    def largest(self, number: int) -> int:
        """Return the largest of the processes' numbers, once all have given theirs."""
        if self.size == 1:
            return number
        box = torch.tensor(number)
        with _reaching_others():
            dist.all_reduce(box, dist.ReduceOp.MAX)
        return int(box)

    def wait(self) -> None:
        """Wait until all processes have come this far."""
        self.largest(0)

    def from_first(self, make: Callable[[], str]) -> str:
        """Let the first process make a text, while the others wait, and return it in all of them."""
        text = make().encode() if self.is_first else b""
        content = torch.zeros(self.largest(len(text)), dtype=torch.uint8)
        content[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else 0
        if self.size > 1:
            with _reaching_others():
                dist.broadcast(content, src=0)
        return content.numpy().tobytes().decode()


ALONE = World()
"""The world of a single process."""


@contextmanager
def joined() -> Iterator[World]:
    """Meet the other processes that torchrun has started; without torchrun there are none.

    An error in one process ends all of them, and only the first to fail says why: its connections close, the others
    notice, find that the cause has been told, and exit with status 1.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ or os.environ["WORLD_SIZE"] == "1":
        yield ALONE
        return
    with _reaching_others():
        store, rank, size = next(rendezvous("env://", timeout=PATIENCE))
        # What processes that failed have left in it, such as their addresses, must not be taken for that of these.
        store = PrefixStore(f"start-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
            store=store,
            rank=rank,
            world_size=size,
            timeout=PATIENCE,
        )
    # As soon as one process ends, torchrun asks the others to end as well. Outside of the training loop that is not
    # obeyed: they notice by themselves, and may have a message to print or, if all went well, files to finish.
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    local_rank = int(os.environ["LOCAL_RANK"])
    several_hosts = os.environ.get("LOCAL_WORLD_SIZE", "1") != os.environ["WORLD_SIZE"]
    try:
        with _reaching_others():
            heartbeat = Heartbeat(rank, size, local_rank, store) if several_hosts else None
        world = World(rank, size, local_rank, heartbeat)
        yield world
        world.wait()
    except BaseException:
        if _told_already(store):
            raise SystemExit(1) from None
        raise
    if heartbeat is not None:
        heartbeat.stop()
    signal.signal(signal.SIGTERM, before)
    dist.destroy_process_group()


def restarted() -> bool:
    """Say whether torchrun has started this process in place of one that failed (`--max-restarts`)."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def _told_already(store: Any) -> bool:
    """Say whether another process has failed before this one and told the cause."""
    try:
        return bool(store.add("failed", 1) > 1)
    except RuntimeError:  # the store is gone, too
        return False


@contextmanager
def _reaching_others() -> Iterator[None]:
    try:
        yield
    except (RuntimeError, OSError) as error:  # what PyTorch raises where a connection closes or time is up
        # "[file.cc:1] Read error [127.0.0.1]:1: Connection reset by peer. This may ..." → what is in the middle
        reason = re.sub(r"^\[\S+\] ", "", str(error).strip().splitlines()[0]).partition(". ")[0]
        raise ProcessLostError(f"another process of this run has ended or cannot be reached ({reason})") from None
