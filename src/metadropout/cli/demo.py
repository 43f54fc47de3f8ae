"""`metadropout demo`: MAML with and without Meta-dropout on the built-in characters, in a few minutes."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from metadropout.analysis.plots import plot_accuracies, plot_comparison
from metadropout.cli.evaluate import evaluate_run
from metadropout.cli.train import train_and_show
from metadropout.errors import ConfigError
from metadropout.recipes import load_recipe
from metadropout.runs.folder import Run, create_run, open_run

METHODS = {"MAML": "glyphs-5way-1shot-maml", "MAML + Meta-dropout": "glyphs-5way-1shot-metadropout"}


def register(commands: Any) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "demo",
        help="compare MAML with and without Meta-dropout in a few minutes",
        description="Trains MAML with and without Meta-dropout on the built-in characters and prints and plots both "
        "accuracies on unseen characters. Stopped, it goes on where it was.",
    )
    parser.add_argument("--out", type=Path, default=Path("demo"), help="folder for runs and pictures (default: demo)")
    parser.add_argument("--iterations", type=int, default=300, help="outer steps for each method (default: 300)")
    parser.add_argument("--episodes", type=int, default=100, help="unseen tasks for each method (default: 100)")
    parser.set_defaults(run=run_command)


def run_command(namespace: argparse.Namespace) -> int:
    """Train, evaluate, print and plot."""
    results = {}
    runs = []
    for label, recipe in METHODS.items():
        print(f"\n{label}: {namespace.iterations} iterations of '{recipe}'")
        run = _run(namespace.out / recipe, recipe, namespace.iterations)
        if (stopped := train_and_show(run).stopped_by) is not None:
            return 128 + stopped
        results[label] = evaluate_run(run, episodes=namespace.episodes)
        runs.append(run)
    print(f"\nAccuracy on unseen characters, 5-way 1-shot, {namespace.episodes} tasks, 95 % interval:")
    for label, result in results.items():
        print(f"  {label:<20} {result}")
    curves = plot_comparison(runs, namespace.out / "curves.png", list(METHODS))
    picture = plot_accuracies(results, namespace.out / "accuracy.png", title="glyphs, 5-way 1-shot, unseen characters")
    if picture is None:
        print("no pictures: matplotlib is not installed (pip install 'metadropout[plots]')")
    else:
        print(f"pictures: {picture} and {curves}")
    return 0


def _run(folder: Path, recipe: str, iterations: int) -> Run:
    """Open the run of an earlier demo to go on with, or make a new one."""
    config = load_recipe(recipe, {"training.iterations": iterations})
    if not (folder / "config.yaml").exists():
        return create_run(folder, config)
    run = open_run(folder)
    if run.config != config:
        raise ConfigError(f"{folder}: is of another demo, with other options; delete it or choose another --out")
    return run
