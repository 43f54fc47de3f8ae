"""`metadropout bench`: speed and memory beside a plain PyTorch loop, `higher` and TorchOpt, in one run."""

from __future__ import annotations

import argparse
import itertools
import json
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, get_args

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from metadropout.analysis import gradients, time_to_accuracy
from metadropout.bench import adaptation, comparison, learners
from metadropout.bench.adaptation import SAMPLES, SHOTS, AdaptationCost, measure_adaptation
from metadropout.bench.comparison import Comparison, compare
from metadropout.bench.growth import points
from metadropout.bench.implementations import IMPLEMENTATIONS, INSTALL, OURS, OURS_IN, PLAIN
from metadropout.bench.measuring import OnStep
from metadropout.bench.plots import plot_adaptation, plot_comparisons, plot_growth
from metadropout.bench.problem import SETTINGS, Method, Setting
from metadropout.bench.report import Report, adaptation_report, comparison_report, describe_machine, growth_report
from metadropout.cli.numbers import add_number
from metadropout.errors import ConfigError
from metadropout.files import write_atomically
from metadropout.ops.precision import Precision
from metadropout.options import Channels, Episodes, Limits, Shot, Threads, Way
from metadropout.runs.folder import open_run
from metadropout.training.workers import cpus

EPILOG = """\
  metadropout bench                              one meta-iteration: this project and its peers
  metadropout bench --precision bf16             the same, and this project in bfloat16 beside float32
  metadropout bench evaluation                   30 noise samples as one batch, beside loops over them
  metadropout bench growth --out bench           how time and memory grow with way, shot, steps, channels, image size
  metadropout bench learners [ROW ...]           a task of each row of table 1, beside MAML
  metadropout bench gradient RUN RECIPE ...      signal and noise of the meta-gradient, at all states kept
  metadropout bench accuracy RUN ...             how long runs trained until 90 and 95 % on validation classes

The first three compare programs that compute the same gradients, which is checked first. Each program runs in a process
of its own, by turns with the others.
Ctrl-C stops at any time; parts that are finished are in --out.
"""

SIZES = {
    "way": Way,
    "shot": Shot,
    "query": Shot,
    "steps": Annotated[int, Limits(0, 1000)],
    "channels": Channels,
    "image_size": Annotated[int, Limits(16, 1024)],
    "meta_batch": Annotated[int, Limits(1, 1000)],
}


def register(parser: argparse.ArgumentParser) -> None:
    """Give the command's parser its arguments."""
    parser.description = __doc__
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "what", nargs="?", choices=list(ACTIONS), default="training", help="what to measure (default: training)"
    )
    what = "accuracy: runs; gradient: runs, or recipes for initial weights; learners: rows of table 1 (default: all)"
    parser.add_argument("runs", nargs="*", metavar="NAME", help=what)
    add_number(
        parser, "--tasks", Episodes, default=100, metavar="N", help="for gradient: training tasks (default: 100)"
    )
    reach = "for accuracy: which to reach, in %% (default: 90 95)"
    percent = Annotated[float, Limits(0, 100, above=True)]
    add_number(parser, "--reach", percent, nargs="+", default=[90.0, 95.0], metavar="ACCURACY", help=reach)
    parser.add_argument(
        "--setting", choices=list(SETTINGS), help="default: omniglot-20way; omniglot-5way for evaluation and growth"
    )
    parser.add_argument("--method", choices=[*get_args(Method), "both"], default="both", help="default: both")
    precision = "also measure training in this precision, beside the full one, which is float32 (default: full)"
    parser.add_argument("--precision", choices=get_args(Precision), default="full", help=precision)
    for name, kind in SIZES.items():
        add_number(parser, f"--{name.replace('_', '-')}", kind, metavar="N", help="default: the setting's")
    often = "how often each is timed (default: 7)"
    add_number(parser, "--rounds", Annotated[int, Limits(1, 10_000)], default=7, metavar="N", help=often)
    add_number(parser, "--threads", Threads, default=0, metavar="N", help="default: PyTorch's own choice")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write results (JSON) and plots to this folder")
    parser.add_argument("--markdown", action="store_true", help="print tables as Markdown")
    parser.set_defaults(run=run_command)


def run_command(namespace: argparse.Namespace) -> int:
    """Measure, print and return the exit status."""
    namespace.threads = min(namespace.threads, cpus())
    if namespace.runs and namespace.what not in ("accuracy", "gradient", "learners"):
        raise ConfigError(f"bench {namespace.what} takes no run: it measures the settings that --setting lists")
    if namespace.precision != "full" and namespace.what != "training":
        raise ConfigError(f"bench {namespace.what} takes no --precision: only training is measured in others")
    if namespace.out is not None:
        namespace.out.mkdir(parents=True, exist_ok=True)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # both end the other processes, too
    try:
        ACTIONS[namespace.what](namespace, _setting(namespace))
    except KeyboardInterrupt:
        print("metadropout: stopped", file=sys.stderr)
        return 130
    finally:
        signal.signal(signal.SIGTERM, before)
    return 0


def bench_training(namespace: argparse.Namespace, setting: Setting) -> None:
    """Compare a meta-iteration with the peers'."""
    missing = [i.name for i in IMPLEMENTATIONS if not i.is_installed()]
    if missing and "maml" in _methods(namespace):
        print(f"not installed and left out: {', '.join(missing)} ({INSTALL})", file=sys.stderr)
    done: list[Comparison] = []
    known = (OURS, *(OURS_IN[p] for p in OURS_IN if p == namespace.precision), *IMPLEMENTATIONS[1:])
    for method in _methods(namespace):
        chosen = [i for i in known if method in i.methods and i.is_installed()]
        with _progress(comparison.steps_of(chosen, namespace.rounds)) as on_step:
            done.append(compare(setting, method, chosen, **_how(namespace), on_step=on_step))
        _print(namespace, comparison_report(done[-1]))
        _write(namespace, {"missing": missing, "comparisons": [c.to_dict() for c in done]})
    if namespace.out is not None:
        plot_comparisons(done, namespace.out / "training.png")


def bench_evaluation(namespace: argparse.Namespace, setting: Setting) -> None:
    """Compare noise samples in one batch with loops over them."""
    cases = [(shot, samples) for shot in _shots(namespace) for samples in SAMPLES]
    done: list[AdaptationCost] = []
    with _progress(len(cases) * adaptation.steps_of(namespace.rounds)) as on_step:
        for shot, samples in cases:
            size = replace(setting, shot=shot)
            done.append(measure_adaptation(size, samples, rounds=namespace.rounds, on_step=on_step))
            _write(namespace, {"costs": [cost.to_dict() for cost in done]})
    _print(namespace, adaptation_report(done))
    if namespace.out is not None:
        plot_adaptation(done, namespace.out / "evaluation.png")


def bench_growth(namespace: argparse.Namespace, setting: Setting) -> None:
    """Measure a meta-iteration while one number at a time grows."""
    cases = [(method, *point) for method in _methods(namespace) for point in points(setting)]
    known: dict[tuple[Method, Setting], Comparison] = {}  # the setting itself is a point of every parameter
    done: list[tuple[str, int, Comparison]] = []
    steps = len({(method, size) for method, _, _, size in cases}) * comparison.steps_of([OURS, PLAIN], namespace.rounds)
    with _progress(steps) as on_step:
        for method, parameter, value, size in cases:
            if (method, size) not in known:
                known[method, size] = compare(size, method, [OURS, PLAIN], **_how(namespace), on_step=on_step)
            done.append((parameter, value, known[method, size]))
            _write(namespace, {"points": [{"parameter": p, "value": v, **c.to_dict()} for p, v, c in done]})
    _print(namespace, growth_report(done))
    if namespace.out is not None:
        plot_growth(done, namespace.out / "growth.png")


def bench_gradient(namespace: argparse.Namespace, setting: Setting) -> None:
    """Compare the exact meta-gradient with the public code's, at each state."""
    if not namespace.runs:
        raise ConfigError("bench gradient needs a run or a recipe: metadropout bench gradient glyphs-5way-1shot-maml")
    states = [(name, which) for name in namespace.runs for which in gradients.states_of(name)]
    done: list[gradients.PartGradients] = []
    with _progress(len(states) * namespace.tasks) as on_step:
        for name, which in states:
            state = gradients.open_state(name, which)
            done += gradients.measure_gradients(state, tasks=namespace.tasks, on_task=partial(on_step, name))
            _write(namespace, {"gradients": [m.to_dict() for m in done]})
    note = "± 95 % interval over tasks, by the jackknife. Public: without the second derivative of normalisation."
    _print(namespace, Report("The meta-gradient", gradients.HEADINGS, list(gradients.as_rows(done)), note))
    if namespace.out is not None:
        gradients.plot_gradients(done, namespace.out / "gradient.png")


def bench_accuracy(namespace: argparse.Namespace, setting: Setting) -> None:
    """Say how long runs trained until they reached accuracies."""
    if not namespace.runs:
        raise ConfigError("bench accuracy needs a run: metadropout bench accuracy runs/maml runs/metadropout")
    found = [time_to_accuracy.time_to_accuracy(open_run(Path(name)), namespace.reach) for name in namespace.runs]
    _write(namespace, {"runs": [one.to_dict() for one in found]})
    every = "/".join(dict.fromkeys(str(one.every) for one in found))
    note = (
        f"The first validation that reached it, of one every {every} iterations. Time of training without validations."
    )
    headings = time_to_accuracy.headings(namespace.reach)
    _print(namespace, Report("Time to an accuracy", headings, list(time_to_accuracy.as_rows(found)), note))


def bench_learners(namespace: argparse.Namespace, setting: Setting) -> None:
    """Measure a task of each row of table 1, in training and testing."""
    if given := [f"--{size}" for size in ("steps", "meta_batch") if getattr(namespace, size) is not None]:
        flag = given[0].replace("_", "-")
        raise ConfigError(f"bench learners takes no {flag}: every row is measured with its recipe's own")
    name, rows = _setting_name(namespace), learners.rows_to_measure(namespace.runs)
    sizes = {size: getattr(namespace, size) for size in learners.OPTIONS}
    overrides = {learners.OPTIONS[size]: value for size, value in sizes.items() if value is not None}
    done: list[learners.RowCost] = []
    with _progress(len(rows) * learners.steps_of(namespace.rounds)) as on_step:
        for row in rows:
            how = {"rounds": namespace.rounds, "on_step": on_step}
            done.append(learners.measure_row(name, setting, overrides, row, **how))
            _write(namespace, {"rows": [cost.to_dict() for cost in done]})
    _print(namespace, learners.learners_report(name, done))


ACTIONS = {
    "training": bench_training,
    "evaluation": bench_evaluation,
    "growth": bench_growth,
    "learners": bench_learners,
    "gradient": bench_gradient,
    "accuracy": bench_accuracy,
}


def _setting(namespace: argparse.Namespace) -> Setting:
    """Return the setting asked for, with the sizes that the command line changes."""
    given = {size: getattr(namespace, size) for size in SIZES if getattr(namespace, size) is not None}
    return replace(SETTINGS[_setting_name(namespace)], **given)


def _setting_name(namespace: argparse.Namespace) -> str:
    large = namespace.what in ("training", "learners")
    return namespace.setting or ("omniglot-20way" if large else "omniglot-5way")


def _methods(namespace: argparse.Namespace) -> Sequence[Method]:
    return get_args(Method) if namespace.method == "both" else [namespace.method]


def _shots(namespace: argparse.Namespace) -> Sequence[int]:
    return SHOTS if namespace.shot is None else [namespace.shot]


def _how(namespace: argparse.Namespace) -> dict[str, int]:
    return {"rounds": namespace.rounds, "threads": namespace.threads}


@contextmanager
def _progress(steps: int) -> Iterator[OnStep]:
    """Show what is being done: a bar on a terminal, nothing elsewhere."""
    console = Console(stderr=True)
    columns = [BarColumn(bar_width=24), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}")]
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar, done = progress.add_task("", total=steps), itertools.count()

        def on_step(text: str) -> None:
            progress.update(bar, completed=next(done), description=text)

        yield on_step


def _print(namespace: argparse.Namespace, report: Report) -> None:
    if namespace.markdown:
        print(report.for_page())
    else:
        Console(highlight=False).print(report.for_terminal())


def _write(namespace: argparse.Namespace, results: dict[str, Any]) -> None:
    """Write what has been measured so far."""
    if namespace.out is not None:
        measured = {"environment": describe_machine(namespace.threads), **results}
        write_atomically(namespace.out / f"{namespace.what}.json", json.dumps(measured, indent=1) + "\n")
