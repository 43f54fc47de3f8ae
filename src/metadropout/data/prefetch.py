"""Episodes made ahead of time in the background, so that a device never waits for one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from types import TracebackType
from typing import Self

from metadropout.data.episodes import Episode
from metadropout.errors import DataError


class Prefetcher(Iterator[Episode]):
    """Gives the episodes of (iteration, task) pairs in their order, while a thread makes those that follow.

    NumPy and PyTorch copy pixels without holding the interpreter's lock, so a thread is enough. An error met while
    making an episode is raised where that episode is asked for.

    Args:
        draw: makes an episode; an `EpisodeSampler`, its `raw`, or `SavedEpisodes`.
        pairs: for which iterations and tasks; may be endless.
        depth: how many episodes are made ahead.
        pin_memory: whether to put them into page-locked memory, for copying to a GPU in the background.
    """

    def __init__(
        self,
        draw: Callable[[int, int], Episode],
        pairs: Iterable[tuple[int, int]],
        *,
        depth: int = 16,
        pin_memory: bool = False,
    ) -> None:
        if depth < 1:
            raise DataError(f"depth is {depth}; at least 1 episode has to be made ahead")
        self._draw, self._pairs, self._pin_memory = draw, iter(pairs), pin_memory
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="episodes")
        self._pending: deque[Future[Episode]] = deque()
        self._submit(depth)

    def __next__(self) -> Episode:
        if not self._pending:
            self.close()
            raise StopIteration
        try:
            episode = self._pending.popleft().result()
        except BaseException:
            self.close()
            raise
        self._submit(1)
        return episode

    def close(self) -> None:
        """Drop what was made ahead and end the thread; safe to call more than once."""
        self._pairs = iter(())
        self._pending.clear()
        self._executor.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _submit(self, count: int) -> None:
        try:
            for iteration, task in islice(self._pairs, count):
                self._pending.append(self._executor.submit(self._make, iteration, task))
        except BaseException:
            self.close()
            raise

    def _make(self, iteration: int, task: int) -> Episode:
        episode = self._draw(iteration, task)
        return episode.pin_memory() if self._pin_memory else episode
