"""A progress bar on the terminal, and nothing where there is none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)


@contextmanager
def progress_bar(description: str, total: int | None, *, bytes_: bool = False) -> Iterator[Callable[[int], None]]:
    """Show a bar on standard error while the block runs; call what it gives with each amount done.

    Args:
        description: what is being done.
        total: the amount that is everything, None where unknown.
        bytes_: whether amounts are bytes, shown with their rate.
    """
    amounts: list[ProgressColumn] = [DownloadColumn(), TransferSpeedColumn()] if bytes_ else [MofNCompleteColumn()]
    console = Console(stderr=True)
    columns = [TextColumn("{task.description}"), BarColumn(bar_width=None), *amounts, TimeRemainingColumn()]
    hidden = not console.is_terminal
    with Progress(*columns, console=console, transient=True, expand=True, disable=hidden) as progress:
        task = progress.add_task(description, total=total)
        yield lambda amount: progress.advance(task, amount)
