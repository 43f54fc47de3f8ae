"""`metadropout train`: meta-train a recipe, or go on with a run."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from metadropout.analysis.plots import plot_curves
from metadropout.cli.progress import TrainingDisplay
from metadropout.config import MAY_CHANGE, Config, parse_config
from metadropout.errors import ConfigError, TrainingError
from metadropout.recipes import load_recipe
from metadropout.runs.folder import Run, create_run, locked, open_run, write_config
from metadropout.training.allocator import keep_freed_memory
from metadropout.training.checkpoints import iteration_of, latest_checkpoint
from metadropout.training.distributed import ALONE, ProcessLostError, World, joined
from metadropout.training.loop import Result, open_parts, train

EPILOG = """\
Every option of the recipe can be changed: --SECTION.OPTION VALUE, for example
  metadropout train omniglot-20way-1shot-metadropout --out runs/a --training.meta_batch 4 --seed 1
'metadropout options' lists them all. Ctrl-C saves and stops; --resume goes on, to the same weights bit for bit.
The tasks of a meta-batch run side by side in --machine.threads threads, and in any number of processes:
  torchrun --nproc-per-node 2 -m metadropout train RECIPE --out RUN
"""


def register(commands: Any) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "train",
        help="meta-train a recipe, or resume a run",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("recipe", nargs="?", help="name of a recipe ('metadropout recipes' lists them) or a YAML file")
    parser.add_argument("--out", type=Path, metavar="RUN", help="folder for the new run")
    parser.add_argument("--resume", type=Path, metavar="RUN", help="folder of a run to go on with")
    parser.add_argument("--seed", type=int, help="seed of everything random in the run")
    parser.set_defaults(run=run_command, takes_overrides=True)


def run_command(namespace: argparse.Namespace) -> int:
    """Train, alone or as one of the processes that torchrun has started, and return the exit status."""
    with joined() as world:
        result = train_and_show(made_by_first(world, lambda: make_or_reopen(namespace)), world)
    return 0 if result.stopped_by is None else 128 + result.stopped_by


def made_by_first(world: World, make: Callable[[], Run]) -> Run:
    """Let the first process make a run and its folder, and return it in all."""

    def as_text() -> str:
        run = make()
        return json.dumps({"folder": str(run.folder), "config": run.config.to_dict()})

    run = json.loads(world.from_first(as_text))
    return Run(Path(run["folder"]), parse_config(run["config"]))


def make_or_reopen(namespace: argparse.Namespace) -> Run:
    """Make the run that the command line asks for, or open it to go on."""
    overrides = dict(namespace.overrides)
    if namespace.seed is not None:
        overrides["seed"] = namespace.seed
    if namespace.resume is not None:
        if namespace.recipe or namespace.out:
            raise ConfigError("--resume takes the recipe and the folder from the run: give neither RECIPE nor --out")
        return reopen(namespace.resume, overrides)
    if not namespace.recipe or namespace.out is None:
        raise ConfigError("give a RECIPE and --out RUN for a new run, or --resume RUN for an old one")
    config = with_absolute_paths(load_recipe(namespace.recipe, overrides))
    open_parts(config)  # before there is a folder: a mistake leaves nothing behind
    return create_run(namespace.out, config)


def reopen(folder: Path, overrides: Mapping[str, Any]) -> Run:
    """Open a run to go on with, with options that may change given anew."""
    for name in overrides:
        if not name.startswith(MAY_CHANGE):
            raise ConfigError(f"{name} cannot change on resuming: it would be another run; start one with --out")
    run = open_run(folder)
    if overrides:
        run = replace(run, config=with_absolute_paths(parse_config(run.config.to_dict(), overrides)))
        with locked(run):
            latest = latest_checkpoint(run.checkpoints)
            if latest is not None and run.config.training.iterations < (done := iteration_of(latest)):
                raise ConfigError(
                    f"training.iterations is {run.config.training.iterations}, but {done} are done already"
                )
            write_config(folder, run.config)
    return run


def with_absolute_paths(config: Config) -> Config:
    """Make the data set's directory absolute, so that the run can be used from any folder."""
    if not (directory := config.data.get("directory")):
        return config
    return replace(config, data={**config.data, "directory": str(Path(directory).expanduser().resolve())})


def train_and_show(run: Run, world: World = ALONE) -> Result:
    """Train a run to its end with a live display, and plot its learning curves; the first process does the showing."""
    keep_freed_memory()
    options = run.config.training
    with TrainingDisplay(run.folder.name, options.iterations, options.meta_batch, quiet=not world.is_first) as display:
        try:
            result = train(run, display, world)
        except ProcessLostError as error:
            raise TrainingError(
                f"{error}. The last checkpoint is kept; go on, with any number of processes, "
                f"with: metadropout train --resume {run.folder}"
            ) from None
    if not world.is_first:
        return result
    try:
        plotted = plot_curves(run)
    except OSError as error:
        print(f"the learning curves cannot be drawn: {error}", file=sys.stderr)
        plotted = None
    if result.stopped_by is not None:
        print(f"stopped by {result.stopped_by.name} after iteration {result.iteration}, state saved")
        print(f"go on with: metadropout train --resume {run.folder}")
    else:
        print(f"trained to iteration {result.iteration}; see {plotted or run.metrics}")
        print(f"accuracy on unseen classes: metadropout evaluate {run.folder}")
    return result
