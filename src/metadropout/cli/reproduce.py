"""`metadropout reproduce`: all runs of one of the paper's tables, and the table beside the paper's figures."""

from __future__ import annotations

import argparse
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from metadropout.errors import MetadropoutError
from metadropout.files import write_atomically
from metadropout.recipes import Table, tables
from metadropout.reproduce import Job, Worker, as_markdown, failed, plan

EPILOG = """\
  metadropout reproduce table3 --settings cifar-fs-5way-1shot --scale 0.07 --seeds 0 1 2 --episodes 400 --out runs/t3
trains every row of table 3 for 7 % of the paper's iterations with three seeds, on the same test episodes. Call it
again after a stop: what is done is skipped, what was begun goes on. Options of the recipes can be changed for all runs
at once (--network.channels 16).
"""


def register(commands: Any) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "reproduce",
        help="train and evaluate all rows of one of the paper's tables",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("table", choices=list(tables()), help="which table")
    parser.add_argument("--scale", type=float, default=1.0, help="fraction of the paper's iterations (default: 1)")
    parser.add_argument("--settings", nargs="+", metavar="SETTING", help="default: all four of the paper's")
    parser.add_argument("--rows", nargs="+", metavar="ROW", help="default: all")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], metavar="SEED", help="default: 0")
    parser.add_argument("--episodes", type=int, default=1000, help="test episodes of each run (default: 1000)")
    parser.add_argument("--out", type=Path, help="folder of the runs (default: runs/TABLE)")
    parser.add_argument("--jobs", type=int, help="runs at once (default: one per CPU core, or one on a GPU)")
    parser.set_defaults(run=run_command, takes_overrides=True)


def run_command(namespace: argparse.Namespace) -> int:
    """Run what is not done yet, print the table and return the exit status."""
    table = tables()[namespace.table]
    out = namespace.out or Path("runs") / namespace.table
    jobs = plan(
        table,
        scale=namespace.scale,
        settings=namespace.settings or _papers_settings(table),
        rows=namespace.rows or list(table.rows),
        seeds=namespace.seeds,
        episodes=namespace.episodes,
        out=out,
        overrides=namespace.overrides,
    )
    at_once = namespace.jobs or (1 if torch.cuda.is_available() else os.cpu_count() or 1)
    problems = run_jobs(jobs, max(1, at_once))
    text = as_markdown(table, jobs)
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(out / f"{namespace.table}.md", text)
    print(f"{table.title}, {namespace.scale:g} of the iterations, {namespace.episodes} episodes\n\n{text}")
    if problems:
        raise failed(problems[0] if len(problems) == 1 else f"{len(problems)} runs failed, first {problems[0]}")
    return 0


def run_jobs(jobs: list[Job], at_once: int) -> list[str]:
    """Run jobs, several at once, with a progress bar; return what went wrong."""
    worker, console = Worker(), Console(stderr=True)
    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
    with (
        ThreadPoolExecutor(at_once) as pool,
        Progress(*columns, console=console, disable=not console.is_terminal) as progress,
    ):
        runs = progress.add_task("runs", total=len(jobs))
        steps = progress.add_task("iterations", total=sum(job.config.training.iterations for job in jobs))
        futures = [pool.submit(worker.run, job) for job in jobs]
        before = signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGINT))  # both stop the runs, too
        try:
            while not all(future.done() for future in futures):
                progress.update(runs, completed=sum(future.done() for future in futures))
                progress.update(steps, completed=sum(job.iterations_done() for job in jobs))
                time.sleep(1)
        except KeyboardInterrupt:
            console.print("stopping: all runs save their state; the same command goes on")
            worker.stop()
            raise
        finally:
            signal.signal(signal.SIGTERM, before)
            for future in futures:
                future.cancel()
    problems = []
    for future in futures:
        try:
            problems.append(future.result())
        except MetadropoutError as error:
            problems.append(str(error))
    return [problem for problem in problems if problem is not None]


def _papers_settings(table: Table) -> list[str]:
    """Return the settings for which the paper gives figures, or all where it gives none."""
    papers = [name for name in table.settings if name.startswith(("omniglot-20way", "miniimagenet"))]
    return papers or list(table.settings)
