"""`metadropout export`: a trained run without what only training needs, small enough to share."""

from __future__ import annotations

import argparse
from pathlib import Path

from metadropout.config import build_learner
from metadropout.errors import ConfigError
from metadropout.files import read_regular, write_atomically
from metadropout.runs.folder import open_run
from metadropout.training.checkpoints import checkpoint_path, load_checkpoint, save_checkpoint
from metadropout.training.loop import open_splits
from metadropout.training.metrics import MAX_BYTES

COPIED = (
    "config.yaml",
    "data.json",
    "environment.json",
    "metrics.jsonl",
    "curves.png",
    "README.md",
    "evaluation-*.json",
)


def register(parser: argparse.ArgumentParser) -> None:
    """Give the command's parser its arguments."""
    parser.description = (
        "Copies a run's configuration, metrics, evaluations and weights to a new folder, without the "
        "optimiser's state. 'metadropout evaluate' takes such a folder like any run's; it cannot be trained on."
    )
    parser.add_argument("folder", type=Path, metavar="RUN", help="the run's folder")
    parser.add_argument("--out", type=Path, required=True, help="the new folder")
    parser.add_argument("--state", choices=["last", "best"], default="last", help="which weights (default: last)")
    parser.set_defaults(run=run_command)


def run_command(namespace: argparse.Namespace) -> int:
    """Export, and return the exit status."""
    run, out = open_run(namespace.folder), namespace.out
    if out.exists():
        raise ConfigError(f"{out}: is there already; choose another --out")
    learner = build_learner(run.config, open_splits(run.config).train.image_shape)
    progress = load_checkpoint(run.state(namespace.state), learner)
    path = checkpoint_path(out / "checkpoints", progress.iteration)
    save_checkpoint(path, learner, None, progress)
    for pattern in COPIED:
        for file in run.folder.glob(pattern):
            write_atomically(out / file.name, read_regular(file, MAX_BYTES))
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB")
    return 0
