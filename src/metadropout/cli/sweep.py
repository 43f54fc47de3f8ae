"""`metadropout sweep`: one recipe with several values of its options, compared on validation classes."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from metadropout.analysis.sweeps import Point, Search, Sweep, as_csv, as_markdown, best_point
from metadropout.cli.numbers import add_number
from metadropout.cli.places import PREFIX, add_place, place_of, raise_problems, run_jobs
from metadropout.config import as_text
from metadropout.errors import ConfigError
from metadropout.files import write_atomically
from metadropout.jobs import Job, Place, check_folders, slurm_status
from metadropout.options import Episodes, Limits, Seed
from metadropout.recipes import load_recipe
from metadropout.training.loop import open_splits

EPILOG = """\
  metadropout sweep glyphs-5way-1shot-maml --learner.inner_lr 0.05 0.1 0.2 --seeds 0 1 2
trains the recipe with each value (of several options: with each combination) and each seed, several runs at once, and
tests all of them on the same tasks of validation classes. It prints a table and names the best values; test classes are
never looked at. Call it again after a stop: what is done is skipped, what was begun goes on. An option with one value
has it in all runs.

  metadropout sweep glyphs-5way-1shot-maml --learner.inner_lr 0.01..1 --training.meta_lr 1e-4..1e-2 --search 30
tries 30 combinations from the ranges, each chosen by what those before it have reached (needs Optuna).

  metadropout sweep RECIPE --learner.inner_lr 0.05 0.1 0.2 --on slurm --slurm.partition gpu --slurm.time 8:00:00
gives the runs to a cluster, one per job; --show says at any time how they are.
"""


def register(parser: argparse.ArgumentParser) -> None:
    """Give the command's parser its arguments."""
    parser.description = __doc__
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("recipe", help="name of a recipe ('metadropout recipes' lists them) or a YAML file")
    add_number(parser, "--seeds", Seed, nargs="+", default=[0], metavar="SEED", help="default: 0")
    add_number(
        parser,
        "--episodes",
        Episodes,
        default=600,
        help="tasks of validation classes on which each run is tested (default: 600)",
    )
    add_number(
        parser,
        "--search",
        Annotated[int, Limits(1, 10_000)],
        metavar="TRIALS",
        help="try this many combinations, chosen with Optuna; options take a range (0.01..1) or values to choose among",
    )
    parser.add_argument("--out", type=Path, help="folder of the runs (default: runs/sweeps/RECIPE)")
    parser.add_argument("--show", action="store_true", help="run nothing: print the table of what is done")
    add_place(parser)
    parser.set_defaults(run=run_command, takes_overrides=True)


def run_command(namespace: argparse.Namespace) -> int:
    """Run what is not done yet, print the table and the best values, and return the exit status."""
    out = namespace.out or Path("runs") / "sweeps" / Path(namespace.recipe).stem
    fixed, axes = _fixed_and_varied(namespace.overrides, searching=namespace.search is not None)
    namespace.overrides = fixed
    place = place_of(namespace, out)
    sweep = Sweep(namespace.recipe, out, namespace.overrides, namespace.seeds, namespace.episodes)
    if not axes:
        raise ConfigError("give some option several values, such as --learner.inner_lr 0.05 0.1 0.2")
    if not namespace.show:
        _check_validation_classes(namespace.recipe, sweep.fixed)
    problems: list[str] = []
    if namespace.search is not None:
        search = Search(sweep, axes)
        problems = [] if namespace.show else _search(search, namespace.search, place, len(set(sweep.seeds)))
        points = search.points()
    else:
        points = sweep.grid(axes)
        problems = [] if namespace.show else _run(points, place)
    if points:
        _report(points, out, write=not namespace.show)
    else:
        print("nothing has been tried yet")
    for line in slurm_status(out, _jobs(points)) if namespace.show else []:
        print(line)
    raise_problems(problems)
    return 0


def _fixed_and_varied(
    given: Mapping[str, list[Any]], *, searching: bool
) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Tell options that have one value in all runs from those that are varied."""
    varied = {
        name: values
        for name, values in given.items()
        if len(values) > 1 or (searching and isinstance(values[0], str) and ".." in values[0])
    }
    if wrong := [name for name in varied if name.startswith(PREFIX)]:
        raise ConfigError(f"--{wrong[0]} takes one value")
    return {name: values[0] for name, values in given.items() if name not in varied}, varied


def _check_validation_classes(recipe: str, fixed: Mapping[str, Any]) -> None:
    """Refuse, before any work, a data set without classes to compare on."""
    config = load_recipe(recipe, fixed)
    if open_splits(config).validation is None:
        raise ConfigError(
            f"{config.data['name']} has no validation classes here, and a sweep never looks at test classes; set some "
            "aside (Omniglot: --data.validation_characters 100)"
        )


def _jobs(points: Sequence[Point]) -> list[Job]:
    """Return the runs of all points, each once."""
    return list({job.folder: job for point in points for job in point.jobs}.values())


def _run(points: Sequence[Point], place: Place) -> list[str]:
    jobs = _jobs(points)
    check_folders(jobs)
    return run_jobs(jobs, place)


def _search(search: Search, trials: int, place: Place, seeds: int) -> list[str]:
    """Run trials in rounds of as many runs as there can be at once; return what went wrong."""
    problems: list[str] = []
    tried = 0
    while True:
        points = search.points()[:trials]
        fresh, tried = points[tried:], len(points)
        problems += _run(fresh, place) if fresh else []
        if tried == trials or (fresh and not any(point.is_done() for point in fresh)):
            return problems
        search.choose(min(max(1, place.at_once // seeds), trials - tried))


def _report(points: Sequence[Point], out: Path, *, write: bool) -> None:
    text = as_markdown(points)
    print(text)
    if write:
        out.mkdir(parents=True, exist_ok=True)
        write_atomically(out / "sweep.md", text)
        write_atomically(out / "sweep.csv", as_csv(points))
        print(f"all runs: {out / 'sweep.csv'}")
    if best := best_point(points):
        options = " ".join(f"--{name} {as_text(value)}" for name, value in best.values.items())
        print(f"best by validation classes: {options}")
        print(f"on test classes, once: metadropout evaluate {best.jobs[0].folder}")
