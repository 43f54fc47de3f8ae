"""`metadropout figures`: the paper's figures, drawn from trained runs."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Sequence
from pathlib import Path

import torch

from metadropout.analysis.figures.base import FigureError
from metadropout.analysis.figures.drawing import require
from metadropout.analysis.figures.runs import FIGURES, FigureOptions, draw, open_subjects
from metadropout.cli.numbers import add_number
from metadropout.cli.progress import CountDisplay
from metadropout.config import parse_config
from metadropout.errors import ConfigError
from metadropout.options import Episodes, Iterations, Seed
from metadropout.runs.folder import Run, open_run
from metadropout.training.allocator import keep_freed_memory
from metadropout.training.workers import threads_to_use

EPILOG = "figures:\n" + "\n".join(f"  {name:<16} {kind.summary}" for name, kind in FIGURES.items())


def register(parser: argparse.ArgumentParser) -> None:
    """Give the command's parser its arguments."""
    parser.description = (
        "Draws the paper's figures from a trained run, or from two for comparison. Each becomes a PNG "
        "file; figures.json holds their titles, captions and alternative texts."
    )
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("folder", type=Path, metavar="RUN", help="the run's folder")
    parser.add_argument(
        "--compare",
        type=Path,
        metavar="RUN2",
        help="a run of the same data and way, for boundaries, noise and accuracies",
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", help="default: all that have a meaning for the run")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where the pictures go (default: RUN/figures)")
    parser.add_argument("--state", choices=["last", "best"], default="last", help="default: last, as in the paper")
    add_options(parser)
    parser.set_defaults(run=run_command, takes_overrides=True)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what can be chosen for the figures themselves."""
    defaults = FigureOptions(Path())
    add_number(parser, "--seed", Seed, default=0, help="seed of tasks, noise, t-SNE and decoder (default: 0)")
    add_number(
        parser,
        "--episodes",
        Episodes,
        default=defaults.episodes,
        help=f"test tasks for each setting of the figure of accuracies (default: {defaults.episodes})",
    )
    add_number(
        parser,
        "--decoder-iterations",
        Iterations,
        default=defaults.decoder_iterations,
        help=f"training steps of the decoder of reconstructions (default: {defaults.decoder_iterations})",
    )


def run_command(namespace: argparse.Namespace) -> int:
    """Draw the figures and return the exit status."""
    if odd := [name for name in namespace.overrides if not name.startswith(("machine.", "data.directory"))]:
        raise ConfigError(f"--{odd[0]} cannot change here: figures takes --machine options and --data.directory only")
    folders = [namespace.folder, *([namespace.compare] if namespace.compare else [])]
    opened = [open_run(folder) for folder in folders]
    runs = [Run(run.folder, parse_config(run.config.to_dict(), namespace.overrides)) for run in opened]
    options = FigureOptions(
        namespace.out or namespace.folder / "figures",
        namespace.seed,
        namespace.episodes,
        namespace.decoder_iterations,
        CountDisplay,
    )
    draw_figures(runs, options, only=namespace.only, state=namespace.state)
    return 0


def draw_figures(
    runs: Sequence[Run], options: FigureOptions, *, only: Sequence[str] | None = None, state: str = "last"
) -> None:
    """Draw figures of runs and say where they are; those that do not apply are named with the reason.

    Args:
        runs: one, or two to compare.
        options: what can be chosen.
        only: names of the figures; all by default. One that is named here and does not apply is an error.
        state: "last" or "best".
    """
    if unknown := [name for name in only or () if name not in FIGURES]:
        raise ConfigError(f"there is no figure '{unknown[0]}'; known are: {', '.join(FIGURES)}")
    names = list(only or FIGURES)
    require(*dict.fromkeys(package for name in names for package in FIGURES[name].packages))
    keep_freed_memory()
    torch.set_num_threads(threads_to_use(runs[0].config.machine.threads))
    subjects = open_subjects(runs, state)
    for subject in subjects:
        if subject.unfinished:
            planned = subject.run.config.training.iterations
            print(
                f"{subject.run.folder}: not finished; drawn as it is after {subject.iteration} of {planned} iterations"
            )
    for name, made in draw(names, subjects, options):
        if isinstance(made, FigureError):
            if only:
                raise made
            print(f"{name}: left out: {made}")
            continue
        print(f"{name}: {' and '.join(map(str, made.files))}")
        print(textwrap.indent(textwrap.fill(made.data.caption, 110), "    "))
