"""`metadropout attack`: the accuracy that is left when query images are moved to fool the adapted model."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import torch

from metadropout.analysis.plots import NORM_NAMES, robustness_figure, save_figure
from metadropout.cli.evaluate import open_for_testing
from metadropout.cli.numbers import add_number
from metadropout.cli.progress import CountDisplay
from metadropout.config import parse_config, task_options
from metadropout.data import Splits
from metadropout.data.locks import exclusive
from metadropout.errors import ConfigError, MetadropoutError
from metadropout.files import write_atomically
from metadropout.learners.base import TEST_SAMPLES
from metadropout.options import Episodes, Limits, Samples, Seed
from metadropout.robustness.attacks import NORMS, Norm
from metadropout.robustness.curves import COLOUR_RADII, GREY_RADII, Attack, Curves, Target, common_radii
from metadropout.runs.folder import Run
from metadropout.training.allocator import keep_freed_memory
from metadropout.training.loop import TESTING, episode_sampler, open_splits
from metadropout.training.workers import threads_to_use

ALL = "all"

PROTOCOLS = {
    "transductive": "Transductive: the query images of a task are normalised together, so they depend on each other.\n"
    "They are attacked jointly, and the strongest attack is chosen for all of them as a whole.",
    "inductive": "Inductive: query images are normalised one by one, with the statistics of the support images.\n"
    "The strongest attack is chosen for each image.",
}

EPILOG = """\
  metadropout attack runs/maml runs/metadropout --episodes 100 --out runs/attacks
attacks both runs on the same 100 episodes with all norms at the usual radii. Call it again after a stop, with more
episodes or with more radii: what is done is skipped.
  metadropout attack runs/maml --norm l1 --epsilon 2.5 5 --norm l2 --epsilon 0.5 1 2
attacks with radii of your own. docs/robustness.md says how the attack works.
"""


class _RadiiOfNorm(argparse.Action):
    """Keeps radii with the norm that stands before them on the command line."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: object = None
    ) -> None:
        norm = namespace.norm[-1] if namespace.norm else ALL
        namespace.epsilon = namespace.epsilon | {norm: [*namespace.epsilon.get(norm, []), *values]}


def register(parser: argparse.ArgumentParser) -> None:
    """Give the command's parser its arguments."""
    parser.description = (
        "Adapts trained runs to episodes of unseen classes and attacks the adapted models by projected "
        "gradient descent on the query images. Writes, to the --out folder, the accuracies of every episode "
        "(attack-RUN.json), all means with 95 % intervals (attacks.json, attacks.md) and the figure "
        "(attacks.png)."
    )
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("folders", type=Path, nargs="+", metavar="RUN", help="folders of runs on the same tasks")
    parser.add_argument(
        "--norm",
        choices=[*NORMS, ALL],
        action="append",
        default=[],
        help="which ball; may be given several times (default: all three)",
    )
    add_number(
        parser,
        "--epsilon",
        Annotated[float, Limits(0, 1e6)],
        nargs="+",
        metavar="E",
        action=_RadiiOfNorm,
        default={},
        help="radii of the norm named before them (default: the paper's for Omniglot; ours for colour images)",
    )
    steps = "steps from each start (default: 200, as in the paper)"
    add_number(parser, "--steps", Annotated[int, Limits(1, 100_000)], default=200, help=steps)
    add_number(
        parser,
        "--restarts",
        Annotated[int, Limits(1, 1000)],
        default=1,
        help="random starts at each radius, beside the one from the radius below (default: 1)",
    )
    add_number(parser, "--episodes", Episodes, default=1000, help="number of tasks (default: 1000)")
    add_number(parser, "--mc-samples", Samples, default=TEST_SAMPLES, help="noise samples per inner step (default: 30)")
    parser.add_argument("--state", choices=["last", "best"], default="last", help="default: last, as in the paper")
    add_number(parser, "--seed", Seed, default=0, help="seed of the episodes (default: 0, as for evaluate)")
    parser.add_argument(
        "--inductive",
        action="store_true",
        help="normalise query images one by one with statistics of the support images, however the runs were trained",
    )
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="default: the run's folder; needed for several runs")
    parser.set_defaults(run=run_command, takes_overrides=True)


def run_command(namespace: argparse.Namespace) -> int:
    """Attack what has not been attacked yet, print tables, draw the figure and return the exit status."""
    _check(namespace)
    keep_freed_memory()
    runs = open_runs(namespace.folders, namespace.overrides, inductive=namespace.inductive)
    torch.set_num_threads(threads_to_use(runs[0].config.machine.threads))
    splits = open_splits(runs[0].config)
    for run in runs:
        run.check_tested_data(run.config, splits.identity, "test")
    attack = Attack(
        _radii(namespace, splits), namespace.steps, namespace.restarts, namespace.mc_samples, namespace.seed
    )
    out = _out_folder(namespace)
    sampler = episode_sampler(runs[0].config, splits, "test", TESTING, namespace.seed)
    targets = [Target(run, namespace.state, splits, sampler, attack, out) for run in runs]
    for run, target in zip(runs, targets, strict=True):
        if target.iteration < run.config.training.iterations:
            asked = run.config.training.iterations
            print(f"{target.name}: is attacked as it is after iteration {target.iteration} of {asked}", file=sys.stderr)
    try:
        measure(targets, namespace.episodes)
    except KeyboardInterrupt:
        print("metadropout: stopped; what was measured is kept, the same command goes on", file=sys.stderr)
        return 130
    report(targets, attack, namespace.episodes, out)
    return 0


def open_runs(folders: Sequence[Path], overrides: Mapping[str, Any], *, inductive: bool) -> list[Run]:
    """Open runs of which all have the same tasks and protocol; anything else could not be compared.

    Args:
        folders: the runs' folders.
        overrides: options of the machine and the data's place.
        inductive: use the inductive protocol, however they were trained.
    """
    runs = [open_for_testing(folder, overrides) for folder in folders]
    if inductive:
        for run in runs:
            if run.config.episode.protocol != "inductive":
                print(f"{run.folder.name}: was trained transductively, and is tested inductively", file=sys.stderr)
        forced = {"episode.protocol": "inductive"}
        runs = [Run(run.folder, parse_config(run.config.to_dict(), forced)) for run in runs]
    first = task_options(runs[0].config)
    for run in runs[1:]:
        for name, value in (first | task_options(run.config)).items():
            if name not in first or first[name] != value:
                raise ConfigError(
                    f"{run.folder}: has {name} {value}, but {runs[0].folder} has {first.get(name)}; "
                    "only runs on the same tasks can be compared"
                )
    return runs


def measure(targets: Sequence[Target], episodes: int) -> None:
    """Attack all runs, episode by episode, so that after a stop all have got equally far."""
    radii_by_norm = common_radii(targets)
    radii = sum(len(radii) for t in targets for e in range(episodes) for radii in t.missing(e, radii_by_norm).values())
    with ExitStack() as stack:
        for target in targets:
            try:
                stack.enter_context(exclusive(target.path.with_suffix(".lock"), wait=False))
            except BlockingIOError:
                raise MetadropoutError(f"{target.path}: another process is attacking this run; stop it first") from None
        for target in targets:
            target.ask(radii_by_norm, episodes)
        display = stack.enter_context(CountDisplay("radii attacked", radii))
        for episode in range(episodes):
            for target in targets:
                target.measure(episode, radii_by_norm, on_radius=display.advance)


def report(targets: Sequence[Target], attack: Attack, episodes: int, out: Path) -> None:
    """Print and write the tables, the data and the figure."""
    results = {target.name: target.results.curves(attack.radii, episodes) for target in targets}
    text = as_markdown(results)
    protocol = str(targets[0].results.measured["protocol"])
    rows, figure = robustness_figure(results)
    measured = {target.name: target.results.measured for target in targets}
    write_atomically(out / "attacks.json", json.dumps({"measured": measured, "results": rows}, indent=1) + "\n")
    write_atomically(out / "attacks.md", f"{PROTOCOLS[protocol]}\n\n{text}")
    print(f"{PROTOCOLS[protocol]}\n{attack.steps} steps, {episodes} episodes\n\n{text}")
    if figure is None:
        print("no figure: matplotlib is not installed (pip install 'metadropout[plots]')")
    else:
        save_figure(figure, out / "attacks.png")
        print(f"figure: {out / 'attacks.png'}")


def as_markdown(results: Mapping[str, Curves]) -> str:
    """Write a table for each norm: runs × radii, accuracies in %."""
    tables = []
    for norm in next(iter(results.values())):
        radii = next(iter(results.values()))[norm]
        lines = [
            f"| {NORM_NAMES[norm]} | clean | " + " | ".join(f"ε = {radius:g}" for radius in list(radii)[1:]) + " |",
            "|---" * (1 + len(radii)) + "|",
        ]
        for name, curves in results.items():
            cells = [f"{100 * result.mean:.2f} ± {100 * result.interval:.2f}" for result in curves[norm].values()]
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
        tables.append("\n".join(lines) + "\n")
    return "\n".join(tables)


def _check(namespace: argparse.Namespace) -> None:
    if ALL in namespace.epsilon:
        raise ConfigError("--epsilon needs --norm l1, l2 or linf before it: a radius means something else in each norm")
    names = [folder.resolve().name for folder in namespace.folders]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"two runs are called {twice[0]}: their results would go to the same file; rename one")


def _radii(namespace: argparse.Namespace, splits: Splits) -> dict[Norm, list[float]]:
    """Return for each norm the radii above 0 in rising order."""
    usual = GREY_RADII if splits.train.image_shape.channels == 1 else COLOUR_RADII
    norms = [norm for norm in NORMS if not namespace.norm or norm in namespace.norm or ALL in namespace.norm]
    return {norm: sorted({float(r) for r in namespace.epsilon.get(norm, usual[norm]) if r > 0}) for norm in norms}


def _out_folder(namespace: argparse.Namespace) -> Path:
    if namespace.out is None and len(namespace.folders) > 1:
        raise ConfigError("several runs are compared: say with --out FOLDER where the results go")
    out: Path = namespace.out or namespace.folders[0]
    out.mkdir(parents=True, exist_ok=True)
    return out
