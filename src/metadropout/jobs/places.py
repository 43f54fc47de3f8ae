"""What all places have in common where jobs run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from signal import SIGTERM, default_int_handler, signal
from typing import Protocol

from metadropout.files import open_regular
from metadropout.jobs.job import Job

END_OF_LOG = 8
"""Lines of a failed run's log that are shown."""

_LONGEST = 2**16
_LARGEST = 2**40


class Watcher(Protocol):
    """Shows the user how jobs go."""

    def update(self, runs: int, iterations: int) -> None:
        """Show how many runs and iterations are done by now."""
        ...

    def on_message(self, text: str) -> None:
        """Show a line."""
        ...


class Place(Protocol):
    """Where jobs run: on this machine, or on a cluster."""

    at_once: int
    """How many jobs run at once, at most."""

    def run(self, jobs: Sequence[Job], watcher: Watcher) -> list[str]:
        """Run the jobs that are not done, and wait for them; return what went wrong, one text for each that failed.

        What was begun goes on. A stop by Ctrl-C or SIGTERM raises KeyboardInterrupt; the same call goes on later.
        """
        ...


@contextmanager
def stopped_by_sigterm() -> Iterator[None]:
    """Let SIGTERM do what Ctrl-C does, whose own handler may not be there: shells start background jobs without it."""
    before = signal(SIGTERM, default_int_handler)
    try:
        yield
    finally:
        signal(SIGTERM, before)


def end_of(log: Path, lines: int = END_OF_LOG) -> list[str]:
    """Return the last lines of a log that say something."""
    try:
        with open_regular(log, _LARGEST) as file:
            file.seek(max(0, log.stat().st_size - _LONGEST))
            text = file.read(_LONGEST).decode(errors="replace")
    except OSError:
        return []
    return [line.rstrip() for line in text.splitlines() if line.strip()][-lines:]
