"""Live progress: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections import deque
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

SECONDS_BETWEEN_LINES = 30.0


class _Display:
    """Shows its progress inside of a `with` block."""

    _progress: Progress

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()


class TrainingDisplay(_Display):
    """Shows iteration, loss, accuracy, tasks per second and time left.

    Args:
        name: what is being trained.
        iterations: outer steps in all.
        tasks_per_iteration: the meta-batch.
        quiet: whether to show nothing.
    """

    def __init__(self, name: str, iterations: int, tasks_per_iteration: int, *, quiet: bool = False) -> None:
        self._iterations, self._tasks = iterations, tasks_per_iteration
        self._console = Console(stderr=True, quiet=quiet)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            TimeElapsedColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._bar = self._progress.add_task(name, total=iterations, status="")
        # Times and results of recent iterations: speed and averages that follow the present.
        self._recent: deque[tuple[float, float, float]] = deque([(time.monotonic(), 0.0, 0.0)], maxlen=51)
        self._last_line = time.monotonic()

    def on_iteration(self, iteration: int, loss: float, accuracy: float) -> None:
        """Show one more outer step."""
        self._recent.append((time.monotonic(), loss, accuracy))
        self._progress.update(self._bar, completed=iteration, status=(status := self._status(iteration)))
        due = time.monotonic() - self._last_line > SECONDS_BETWEEN_LINES or iteration == self._iterations
        if due and not self._console.is_terminal:
            self._console.print(f"iteration {iteration}/{self._iterations}  {status}", highlight=False)
            self._last_line = time.monotonic()

    def on_message(self, text: str) -> None:
        """Show a line above the bar."""
        self._console.print(text, highlight=False)

    def _status(self, iteration: int) -> str:
        steps = list(self._recent)
        n = len(steps) - 1
        per_iteration = (steps[-1][0] - steps[0][0]) / n
        left = _duration(per_iteration * (self._iterations - iteration))
        loss = sum(s[1] for s in steps[-n:]) / n
        accuracy = sum(s[2] for s in steps[-n:]) / n
        return (
            f"loss {loss:.3f}  accuracy {100 * accuracy:.1f} %  {self._tasks / per_iteration:.1f} tasks/s  left {left}"
        )


class CountDisplay(_Display):
    """Shows how many of a number of things are done, and the time left.

    Args:
        name: what is being done.
        total: how many.
        quiet: whether to show nothing.
    """

    def __init__(self, name: str, total: int, *, quiet: bool = False) -> None:
        self._name, self._total, self._done = name, total, 0
        self._console = Console(stderr=True, quiet=quiet)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._progress = Progress(
            *columns, console=self._console, transient=True, disable=not self._console.is_terminal
        )
        self._bar = self._progress.add_task(name, total=total)
        self._started = self._last_line = time.monotonic()

    def advance(self) -> None:
        """Show that one more is done."""
        self._done += 1
        self._progress.advance(self._bar)
        now = time.monotonic()
        if now - self._last_line > SECONDS_BETWEEN_LINES and not self._console.is_terminal:
            left = (now - self._started) / self._done * (self._total - self._done)
            self._console.print(f"{self._name}: {self._done}/{self._total}  left {_duration(left)}", highlight=False)
            self._last_line = now


class RunsDisplay(_Display):
    """Shows how many of several runs and of their iterations are done, and the time left.

    Args:
        runs: how many.
        iterations: of all of them together.
        done: iterations that were done before.
    """

    def __init__(self, runs: int, iterations: int, done: int) -> None:
        self._runs, self._iterations, self._before = runs, iterations, done
        self._console = Console(stderr=True)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[left]}"),
        )
        self._progress = Progress(*columns, console=self._console, disable=not self._console.is_terminal)
        self._bars = [self._progress.add_task(name, left="") for name in ("runs", "iterations")]
        self._started = self._last_line = time.monotonic()

    def update(self, runs: int, iterations: int) -> None:
        """Show how many runs and iterations are done by now."""
        now, left = time.monotonic(), ""
        if iterations > self._before:
            seconds = (now - self._started) / (iterations - self._before) * (self._iterations - iterations)
            left = f"left {_duration(seconds)}"
        self._progress.update(self._bars[0], completed=runs, total=self._runs)
        self._progress.update(self._bars[1], completed=iterations, total=self._iterations, left=left)
        if now - self._last_line > SECONDS_BETWEEN_LINES and not self._console.is_terminal:
            done = f"runs {runs}/{self._runs}  iterations {iterations}/{self._iterations}"
            self._console.print(f"{done}  {left}".rstrip(), highlight=False)
            self._last_line = now

    def on_message(self, text: str) -> None:
        """Show a line above the bars."""
        self._console.print(text, highlight=False)


def _duration(seconds: float) -> str:
    """Write a time as 3 d 04:05:06."""
    days, rest = divmod(int(seconds), 86400)
    return f"{f'{days} d ' if days else ''}{time.strftime('%H:%M:%S', time.gmtime(rest))}"
