"""`metadropout train`: meta-train a recipe, or go on with a run."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from metadropout.analysis.plots import plot_curves
from metadropout.cli.numbers import add_number
from metadropout.cli.progress import TrainingDisplay
from metadropout.config import MAY_CHANGE, Config, parse_config
from metadropout.data import Splits
from metadropout.errors import ConfigError, TrainingError
from metadropout.learners import Learner
from metadropout.options import Seed
from metadropout.recipes import load_recipe
from metadropout.runs.folder import Run, check_free, open_run
from metadropout.training.allocator import keep_freed_memory
from metadropout.training.distributed import ALONE, ProcessLostError, World, joined, restarted
from metadropout.training.loop import Existing, Result, open_parts, train

START_OR_RESUME = "\0"
"""What --resume is without a folder; no folder has this name."""

EPILOG = """\
Every option of the recipe can be changed: --SECTION.OPTION VALUE, for example
  metadropout train omniglot-20way-1shot-metadropout --out runs/a --training.meta_batch 4 --seed 1
'metadropout options' lists them all. Ctrl-C saves and stops; --resume goes on, to the same weights bit for bit.
The tasks of a meta-batch run side by side in --machine.threads threads, and in any number of processes:
  torchrun --nproc-per-node 2 -m metadropout train RECIPE --out RUN
On several hosts, in a folder that all see; a host that is lost stops the others, --max-restarts lets them go on:
  torchrun --nnodes 1:2 --max-restarts 3 --rdzv-backend c10d --rdzv-endpoint HOST0:29500 --nproc-per-node 8 \\
      -m metadropout train RECIPE --out RUN
Start, or go on if it has begun, with one and the same command:
  metadropout train RECIPE --out RUN --resume
"""


def register(parser: argparse.ArgumentParser) -> None:
    """Give the command's parser its arguments."""
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("recipe", nargs="?", help="name of a recipe ('metadropout recipes' lists them) or a YAML file")
    parser.add_argument("--out", type=Path, metavar="RUN", help="folder for the new run")
    parser.add_argument(
        "--resume",
        nargs="?",
        const=START_OR_RESUME,
        metavar="RUN",
        help="folder of a run to go on with; without a folder, beside RECIPE and --out: go on if that run has begun",
    )
    add_number(parser, "--seed", Seed, help="seed of everything random in the run")
    parser.set_defaults(run=run_command, takes_overrides=True)


def run_command(namespace: argparse.Namespace) -> int:
    """Train, alone or as one of the processes that torchrun has started, and return the exit status."""
    with joined() as world:
        # The first process reads and checks; a mistake is told once and leaves nothing behind.
        text = world.from_first(lambda: json.dumps(_asked_for(namespace)))
        asked = json.loads(text)
        config = parse_config(asked["config"])
        splits, learner = open_parts(config)
        result = show_training(Path(asked["folder"]), config, learner, splits, existing=asked["existing"], world=world)
    return 0 if result.stopped_by is None else 128 + result.stopped_by


def _asked_for(namespace: argparse.Namespace) -> dict[str, Any]:
    """Return the folder and the configuration that the command line asks for, and whether a run may be there."""
    overrides = dict(namespace.overrides)
    if namespace.seed is not None:
        overrides["seed"] = namespace.seed
    existing: Existing = "refuse"
    if namespace.resume is not None and namespace.resume is not START_OR_RESUME:
        if namespace.recipe or namespace.out:
            raise ConfigError("--resume RUN takes recipe and folder from the run: give neither RECIPE nor --out")
        folder, existing = Path(namespace.resume), "require"
        config = with_options(open_run(folder).config, overrides)
    else:
        if not namespace.recipe or namespace.out is None:
            raise ConfigError("give a RECIPE and --out RUN for a new run, or --resume RUN for an old one")
        # A process that torchrun starts again goes on with what the one before it has begun.
        goes_on = namespace.resume is START_OR_RESUME or restarted()
        folder, existing = namespace.out, "resume" if goes_on else "refuse"
        config = with_absolute_paths(load_recipe(namespace.recipe, overrides))
        if existing == "refuse":
            check_free(folder)
    return {"folder": str(folder), "config": config.to_dict(), "existing": existing}


def with_options(config: Config, overrides: Mapping[str, Any]) -> Config:
    """Return a run's configuration with changed options, of those that may change when it goes on."""
    for name in overrides:
        if not name.startswith(MAY_CHANGE):
            raise ConfigError(f"{name} cannot change on resuming: it would be another run; start one with --out")
    return with_absolute_paths(parse_config(config.to_dict(), overrides)) if overrides else config


def with_absolute_paths(config: Config) -> Config:
    """Make the data set's directory absolute, so that the run can be used from any folder."""
    if not (directory := config.data.get("directory")):
        return config
    return replace(config, data={**config.data, "directory": str(Path(directory).expanduser().resolve())})


def show_training(
    folder: Path, config: Config, learner: Learner, splits: Splits, *, existing: Existing, world: World = ALONE
) -> Result:
    """Train a run to its end with a live display, and plot its learning curves; the first process does the showing."""
    keep_freed_memory()
    options = config.training
    advice = f"The last checkpoint is kept; go on, with any number of processes: {Run(folder, config).resume_call}"
    world.on_loss(advice)
    with TrainingDisplay(folder.name, options.iterations, options.meta_batch, quiet=not world.is_first) as display:
        try:
            result = train(folder, config, learner, splits, display, existing=existing, world=world)
        except ProcessLostError as error:
            raise TrainingError(f"{error}. {advice}") from None
    if not world.is_first:
        return result
    try:
        plotted = plot_curves(result.run)
    except OSError as error:
        print(f"the learning curves cannot be drawn: {error}", file=sys.stderr)
        plotted = None
    if result.stopped_by is not None:
        print(f"stopped by {result.stopped_by.name} after iteration {result.iteration}, state saved")
        print(f"go on with: {result.run.resume_call}")
    else:
        print(f"trained to iteration {result.iteration}; see {plotted or result.run.metrics}")
        print(f"accuracy on unseen classes: {result.run.evaluate_call}")
    return result
