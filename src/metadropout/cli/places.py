"""Where a command's runs are trained: arguments of all commands that start several, and their progress."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import torch

from metadropout.cli.numbers import add_number
from metadropout.cli.progress import RunsDisplay
from metadropout.errors import ConfigError, MetadropoutError
from metadropout.jobs import Job, Local, Place, Slurm
from metadropout.jobs.slurm import AT_ONCE, DEFAULT_TIME
from metadropout.options import Limits

PREFIX = "slurm."


def add_place(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that say where runs are trained, and how many at once."""
    parser.add_argument(
        "--on",
        choices=["local", "slurm"],
        help="where runs are trained: on this machine (default), or as jobs of Slurm; --slurm.X VALUE gives them an "
        f"option of sbatch (--slurm.partition gpu --slurm.time 8:00:00; the time is {DEFAULT_TIME} by default, a run "
        "that needs longer saves its state and is queued again)",
    )
    jobs = Annotated[int, Limits(1, 1000)]
    text = f"runs at once (default: one per CPU core, or one on a GPU; {AT_ONCE} on Slurm)"
    add_number(parser, "--jobs", jobs, help=text)


def place_of(namespace: argparse.Namespace, out: Path) -> Place:
    """Return where the command's runs are trained; takes the options of Slurm out of those of the recipe."""
    options = {name: value for name, value in namespace.overrides.items() if name.startswith(PREFIX)}
    for name in options:
        del namespace.overrides[name]
    if namespace.on == "slurm":
        named = {name.removeprefix(PREFIX): value for name, value in options.items()}
        return Slurm(out, named, namespace.jobs or AT_ONCE)
    if options:
        raise ConfigError(f"--{next(iter(options))} is for clusters: give --on slurm, too")
    return Local(namespace.jobs or (1 if torch.cuda.is_available() else os.cpu_count() or 1))


def run_jobs(jobs: Sequence[Job], place: Place) -> list[str]:
    """Run jobs, several at once, with a progress bar; return what went wrong."""
    total, done = sum(job.config.training.iterations for job in jobs), sum(job.iterations_done() for job in jobs)
    with RunsDisplay(len(jobs), total, done) as display:
        return place.run(jobs, display)


def raise_problems(problems: Sequence[str]) -> None:
    """End the command where runs did not end well."""
    if not problems:
        return
    said = problems[0] if len(problems) == 1 else f"{len(problems)} runs failed:\n" + "\n".join(problems)
    joint = "\n" if "\n" in said else "; "
    raise MetadropoutError(f"{said}{joint}fix the cause and call the same command again: what is done is skipped")
