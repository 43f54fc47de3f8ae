"""`metadropout reproduce`: all runs of one of the paper's tables or figures, and the table or figure itself."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from metadropout.analysis.figures.paper import PAPER_FIGURES, PaperFigure, runs_table
from metadropout.analysis.figures.runs import FigureOptions
from metadropout.analysis.studies import read_study
from metadropout.analysis.tables import TableJob, as_markdown, as_picture, done_beside, entries, plan
from metadropout.cli.figures import draw_figures
from metadropout.cli.numbers import add_number
from metadropout.cli.places import PREFIX, add_place, place_of, raise_problems, run_jobs
from metadropout.cli.progress import CountDisplay
from metadropout.errors import ConfigError
from metadropout.files import write_atomically
from metadropout.jobs import Place, check_folders, slurm_status
from metadropout.options import Episodes, Limits, Seed
from metadropout.recipes import Table, tables
from metadropout.runs.folder import open_run

EPILOG = """\
  metadropout reproduce table3 --settings cifar-fs-5way-1shot --scale 0.07 --seeds 0 1 2 --episodes 400 --out runs/t3
trains every row of table 3 for 7 % of the paper's iterations with three seeds, on the same test episodes. Call it
again after a stop: what is done is skipped, what was begun goes on. Options of the recipes can be changed for all runs
at once (--network.channels 16).

  metadropout reproduce results/cifar-fs/study.yaml --show
prints the tables of a study from its runs, which are beside that file; without --show it trains them into --out.

  metadropout reproduce table2 --scale 0.1 --on slurm --slurm.partition gpu --slurm.time 8:00:00 --slurm.gpus-per-node 1
gives the runs to a cluster, one per job; --show says at any time how they are.

  metadropout reproduce figure4 --settings omniglot-5way-1shot --scale 0.5 --out runs/f4
trains MAML with and without Meta-dropout and draws figure 4 from them; --runs A B draws it from trained runs.
"""


STUDY = (".yaml", ".yml")

DEFAULTS = {"scale": 1.0, "seeds": [0], "episodes": 1000}
"""Filled in late, so that what was given can be told from what was not."""


def register(parser: argparse.ArgumentParser) -> None:
    """Give the command's parser its arguments."""
    parser.description = __doc__
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    known = f"{', '.join([*tables(), *PAPER_FIGURES])}, or a study's file"
    parser.add_argument("what", metavar="WHAT", type=_table_figure_or_study, help=f"which table or figure: {known}")
    scale = Annotated[float, Limits(0, 1000, above=True)]
    add_number(parser, "--scale", scale, help="fraction of the paper's iterations (default: 1)")
    parser.add_argument("--settings", nargs="+", metavar="SETTING", help="default: those of the table or figure")
    which = "rows, or groups of them (table1: common, original); default: all, or those of the paper's figure"
    parser.add_argument("--rows", nargs="+", metavar="ROW", help=which)
    parser.add_argument("--runs", nargs="+", type=Path, metavar="RUN", help="draw a figure from these trained runs")
    add_number(parser, "--seeds", Seed, nargs="+", metavar="SEED", help="default: 0")
    add_number(parser, "--episodes", Episodes, help="test episodes of each run (default: 1000)")
    parser.add_argument("--out", type=Path, help="folder of the runs (default: runs/tables, or runs/WHAT)")
    parser.add_argument("--figure", type=Path, help="picture of a table's differences (default: OUT/TABLE.png)")
    parser.add_argument("--show", action="store_true", help="run nothing: print the table of what is done")
    add_place(parser)
    parser.set_defaults(run=run_command, takes_overrides=True)


def _table_figure_or_study(name: str) -> str:
    if name not in tables() and name not in PAPER_FIGURES and not name.endswith(STUDY):
        known = ", ".join([*tables(), *PAPER_FIGURES])
        raise argparse.ArgumentTypeError(
            f"there is no '{name}'; known are: {known}, and studies, whose files end in .yaml"
        )
    return name


def run_command(namespace: argparse.Namespace) -> int:
    """Run what is not done yet, print the table or draw the figure, and return the exit status."""
    if namespace.what.endswith(STUDY):
        return _study(namespace, Path(namespace.what))
    # The tables share rows, and so they share a folder.
    out = namespace.out or Path("runs") / ("tables" if namespace.what.startswith("table") else namespace.what)
    place = place_of(namespace, out)
    if namespace.runs:
        return _figure_of_runs(namespace, out)
    for name, value in DEFAULTS.items():
        if getattr(namespace, name) is None:
            setattr(namespace, name, value)
    if namespace.what in PAPER_FIGURES:
        return _figure(namespace, PAPER_FIGURES[namespace.what], out, place)
    if namespace.figure and namespace.figure.suffix != ".png":
        raise ConfigError(f"--figure is {namespace.figure}; its name must end in .png")
    table = tables()[namespace.what]
    jobs = _plan(namespace, table, namespace.settings or _papers_settings(table), list(table.rows), out)
    problems = [] if namespace.show else run_jobs(jobs, place)
    title = f"{table.title}, {namespace.scale:g} of the iterations, {namespace.episodes} episodes"
    found = entries(table, [*jobs, *done_beside(table, jobs, namespace.scale)])
    text = f"{title}\n\n{as_markdown(table, found)}"
    print(text)
    for line in slurm_status(out, jobs) if namespace.show else []:
        print(line)
    picture = namespace.figure
    if not namespace.show:
        out.mkdir(parents=True, exist_ok=True)
        write_atomically(out / f"{namespace.what}.md", text)
        picture = picture or out / f"{namespace.what}.png"
    if picture:
        print(as_picture(table, found, picture) or "no picture: nothing to compare yet, or matplotlib is not installed")
    raise_problems(problems)
    return 0


def _study(namespace: argparse.Namespace, path: Path) -> int:
    """Run or print the tables of a study, one after the other."""
    study, own = read_study(path), ("settings", "rows", "runs", *DEFAULTS)
    given = [name for name in own if getattr(namespace, name) is not None]
    if unused := [*given, *(name for name in namespace.overrides if not name.startswith(("machine.", PREFIX)))]:
        raise ConfigError(f"--{unused[0]} is for {path} to say: change it in a copy of that file")
    if namespace.figure and len(study.tables) > 1:
        raise ConfigError(f"--figure is one picture, but {path} has {len(study.tables)} tables; leave it out")
    here = namespace.out or (path.parent if namespace.show else Path("runs") / path.absolute().parent.name)
    print(f"{study.title}\n")
    for table in study.tables:
        rows = study.rows_of(table)
        asked = {"what": table, "settings": study.settings, "rows": list(rows), "seeds": rows, "out": here}
        asked |= {"scale": study.scale, "episodes": study.episodes}
        overrides = {**study.options, **namespace.overrides}
        run_command(argparse.Namespace(**{**vars(namespace), **asked, "overrides": overrides}))
    return 0


def _figure_of_runs(namespace: argparse.Namespace, out: Path) -> int:
    """Draw a figure from runs that are trained already."""
    if namespace.what not in PAPER_FIGURES:
        raise ConfigError("--runs is for figures; a table trains its own runs")
    about_training = ["settings", "rows", "jobs", "on", *DEFAULTS]
    given = [name for name in about_training if getattr(namespace, name) is not None]
    if unused := [*given, *namespace.overrides]:
        raise ConfigError(f"--{unused[0]} says what to train; --runs names runs that are trained already")
    _refuse_options_of_tables(namespace)
    options = FigureOptions(out, display=CountDisplay)
    draw_figures([open_run(folder) for folder in namespace.runs], options, only=PAPER_FIGURES[namespace.what].figures)
    return 0


def _figure(namespace: argparse.Namespace, figure: PaperFigure, out: Path, place: Place) -> int:
    """Train the runs of a figure and draw it, once for each setting and seed."""
    _refuse_options_of_tables(namespace)
    jobs = _plan(namespace, runs_table(), namespace.settings or figure.settings, figure.rows, out)
    raise_problems(run_jobs(jobs, place))
    for setting, seed in dict.fromkeys((job.setting, job.seed) for job in jobs):
        runs = [open_run(job.folder) for job in jobs if (job.setting, job.seed) == (setting, seed)]
        options = FigureOptions(out / f"{namespace.what}-{setting}-seed{seed}", display=CountDisplay)
        draw_figures(runs, options, only=figure.figures)
    return 0


def _refuse_options_of_tables(namespace: argparse.Namespace) -> None:
    if namespace.show or namespace.figure:
        raise ConfigError(
            "--show and --figure are for tables; a figure is drawn into --out, from trained runs by --runs"
        )


def _plan(
    namespace: argparse.Namespace, table: Table, settings: Sequence[str], rows: Sequence[str], out: Path
) -> list[TableJob]:
    jobs = plan(
        table,
        scale=namespace.scale,
        settings=settings,
        rows=table.rows_of(namespace.rows or rows),
        seeds=namespace.seeds,
        episodes=namespace.episodes,
        out=out,
        overrides=namespace.overrides,
    )
    check_folders(jobs)
    return jobs


def _papers_settings(table: Table) -> list[str]:
    """Return the settings for which the paper gives figures, or all where it gives none."""
    papers = [name for name in table.settings if name.startswith(("omniglot-20way", "miniimagenet"))]
    return papers or list(table.settings)
