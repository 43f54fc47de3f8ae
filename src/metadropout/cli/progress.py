"""Live progress: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from typing import Self

from rich.console import Console, RenderableType
from rich.progress import Progress
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

SECONDS_BETWEEN_LINES = 30.0
LONGEST_BAR = 40


class _Bars(Progress):
    """A line for each task that fits any terminal: the numbers stay whole, the bar and then the name give way.

    A task's field `right` stands at the line's end, its field `below` on a line of its own.
    """

    def get_renderables(self) -> Iterable[RenderableType]:
        tasks = self.tasks
        if not tasks:
            return
        counts = [f"{int(task.completed)}/{int(task.total or 0)}" for task in tasks]
        rights = [str(task.fields.get("right", "")) for task in tasks]
        numbers = max(map(len, counts)), max(map(len, rights))
        room = self.console.width - sum(numbers) - 3  # a space between the four columns
        name = max(1, min(max(len(task.description) for task in tasks), room // 2))
        bar = max(1, min(LONGEST_BAR, room - name))
        table = Table.grid(padding=(0, 1))
        for width in (name, bar, *numbers):
            table.add_column(width=width, no_wrap=True)
        for task, count, right in zip(tasks, counts, rights, strict=True):
            drawn = ProgressBar(task.total, task.completed, width=bar, pulse=task.total is None)
            table.add_row(Text(_shortened(task.description, name)), drawn, Text(count, justify="right"), Text(right))
        yield table
        for task in tasks:
            if below := task.fields.get("below"):
                yield Text(str(below))


class _Display:
    """Shows its progress inside of a `with` block."""

    _progress: Progress

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()


class TrainingDisplay(_Display):
    """Shows iteration and time left, and below them loss, accuracy and tasks per second.

    Args:
        name: what is being trained.
        iterations: outer steps in all.
        tasks_per_iteration: the meta-batch.
        quiet: whether to show nothing.
    """

    def __init__(self, name: str, iterations: int, tasks_per_iteration: int, *, quiet: bool = False) -> None:
        self._iterations, self._tasks = iterations, tasks_per_iteration
        self._console = Console(stderr=True, quiet=quiet)
        self._progress = _Bars(console=self._console, disable=not self._console.is_terminal)
        self._bar = self._progress.add_task(name, total=iterations)
        # Times and results of recent iterations: speed and averages that follow the present.
        self._recent: deque[tuple[float, float, float]] = deque([(time.monotonic(), 0.0, 0.0)], maxlen=51)
        self._last_line = time.monotonic()

    def on_iteration(self, iteration: int, loss: float, accuracy: float) -> None:
        """Show one more outer step."""
        self._recent.append((time.monotonic(), loss, accuracy))
        numbers, left = self._status(iteration)
        self._progress.update(self._bar, completed=iteration, right=left, below=numbers)
        due = time.monotonic() - self._last_line > SECONDS_BETWEEN_LINES or iteration == self._iterations
        if due and not self._console.is_terminal:
            self._console.print(f"iteration {iteration}/{self._iterations}  {numbers}  {left}", highlight=False)
            self._last_line = time.monotonic()

    def on_message(self, text: str) -> None:
        """Show a line above the bar."""
        self._console.print(text, highlight=False)

    def _status(self, iteration: int) -> tuple[str, str]:
        """Return recent results and speed, and the time left."""
        steps = list(self._recent)
        n = len(steps) - 1
        per_iteration = (steps[-1][0] - steps[0][0]) / n
        loss = sum(s[1] for s in steps[-n:]) / n
        accuracy = sum(s[2] for s in steps[-n:]) / n
        results = f"loss {loss:.3f}  accuracy {100 * accuracy:.1f} %  {self._tasks / per_iteration:.1f} tasks/s"
        return results, f"left {_duration(per_iteration * (self._iterations - iteration))}"


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
        self._progress = _Bars(console=self._console, transient=True, disable=not self._console.is_terminal)
        self._bar = self._progress.add_task(name, total=total)
        self._started = self._last_line = time.monotonic()

    def advance(self) -> None:
        """Show that one more is done."""
        self._done += 1
        now = time.monotonic()
        left = f"left {_duration((now - self._started) / self._done * (self._total - self._done))}"
        self._progress.update(self._bar, completed=self._done, right=left)
        if now - self._last_line > SECONDS_BETWEEN_LINES and not self._console.is_terminal:
            self._console.print(f"{self._name}: {self._done}/{self._total}  {left}", highlight=False)
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
        self._progress = _Bars(console=self._console, disable=not self._console.is_terminal)
        self._bars = [self._progress.add_task(name) for name in ("runs", "iterations")]
        self._started = self._last_line = time.monotonic()

    def update(self, runs: int, iterations: int) -> None:
        """Show how many runs and iterations are done by now."""
        now, left = time.monotonic(), ""
        if iterations > self._before:
            seconds = (now - self._started) / (iterations - self._before) * (self._iterations - iterations)
            left = f"left {_duration(seconds)}"
        self._progress.update(self._bars[0], completed=runs, total=self._runs)
        self._progress.update(self._bars[1], completed=iterations, total=self._iterations, right=left)
        if now - self._last_line > SECONDS_BETWEEN_LINES and not self._console.is_terminal:
            done = f"runs {runs}/{self._runs}  iterations {iterations}/{self._iterations}"
            self._console.print(f"{done}  {left}".rstrip(), highlight=False)
            self._last_line = now

    def on_message(self, text: str) -> None:
        """Show a line above the bars."""
        self._console.print(text, highlight=False)


def _shortened(text: str, width: int) -> str:
    """Cut a name in its middle: runs differ in how their names end."""
    if len(text) <= width:
        return text
    tail = 2 * (width - 1) // 3
    return f"{text[: width - 1 - tail]}…{text[len(text) - tail :]}"


def _duration(seconds: float) -> str:
    """Write a time as 3 d 04:05:06."""
    days, rest = divmod(int(seconds), 86400)
    return f"{f'{days} d ' if days else ''}{time.strftime('%H:%M:%S', time.gmtime(rest))}"
