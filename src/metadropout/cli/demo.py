"""`metadropout demo`: MAML with and without Meta-dropout on the built-in characters, in a few minutes."""

from __future__ import annotations

import argparse
from pathlib import Path

from metadropout.analysis.plots import plot_accuracies, plot_comparison
from metadropout.cli.evaluate import evaluate_run
from metadropout.cli.numbers import add_number
from metadropout.cli.train import show_training
from metadropout.options import Episodes, Iterations
from metadropout.recipes import load_recipe
from metadropout.training.loop import open_parts

METHODS = {"MAML": "glyphs-5way-1shot-maml", "MAML + Meta-dropout": "glyphs-5way-1shot-metadropout"}


def register(parser: argparse.ArgumentParser) -> None:
    """Give the command's parser its arguments."""
    parser.description = (
        "Trains MAML with and without Meta-dropout on the built-in characters and prints and plots both "
        "accuracies on unseen characters. Stopped, it goes on where it was."
    )
    parser.add_argument("--out", type=Path, default=Path("demo"), help="folder for runs and pictures (default: demo)")
    add_number(parser, "--iterations", Iterations, default=300, help="outer steps for each method (default: 300)")
    add_number(parser, "--episodes", Episodes, default=100, help="unseen tasks for each method (default: 100)")
    parser.set_defaults(run=run_command)


def run_command(namespace: argparse.Namespace) -> int:
    """Train, evaluate, print and plot."""
    results = {}
    runs = []
    for label, recipe in METHODS.items():
        print(f"\n{label}: {namespace.iterations} iterations of '{recipe}'")
        config = load_recipe(recipe, {"training.iterations": namespace.iterations})
        splits, learner = open_parts(config)
        trained = show_training(namespace.out / recipe, config, learner, splits, existing="resume")
        if trained.stopped_by is not None:
            return 128 + trained.stopped_by
        results[label] = evaluate_run(trained.run, episodes=namespace.episodes)
        runs.append(trained.run)
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
