"""Reproducing a table: which runs it takes, what is done of them, and the table beside the paper's figures."""

from __future__ import annotations

import glob
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from metadropout.analysis.plots import Difference, Panel, plot_differences
from metadropout.config import Config, parse_config, task_options
from metadropout.errors import ConfigError
from metadropout.evaluation import Evaluation
from metadropout.jobs import Job
from metadropout.recipes import Table, load_recipe


@dataclass(frozen=True, kw_only=True)
class TableJob(Job):
    """One run of a table: a row in a setting with a seed, trained and tested."""

    setting: str
    row: str


def plan(
    table: Table,
    *,
    scale: float,
    settings: Sequence[str],
    rows: Sequence[str],
    seeds: Sequence[int] | Mapping[str, Sequence[int]],
    episodes: int,
    out: Path,
    overrides: Mapping[str, Any],
) -> list[TableJob]:
    """List the runs of a table, at a fraction of the recipes' iterations.

    Args:
        table: which one.
        scale: fraction of the iterations; 1 is the paper.
        settings: which of its settings.
        rows: which of its rows.
        seeds: each row is trained once with each; by row, where not all have the same.
        episodes: test episodes of each run, the same ones for all.
        out: folder of the runs.
        overrides: options that differ from the recipes in all runs.
    """
    for kind, asked, known in (("setting", settings, table.settings), ("row", rows, table.rows)):
        if unknown := [name for name in asked if name not in known]:
            raise ConfigError(f"there is no {kind} '{unknown[0]}' in this table; known are: {', '.join(known)}")
    if fixed := [name for name in overrides if name in ("data.name", "learner.name", "perturbation.name")]:
        raise ConfigError(f"--{fixed[0]} cannot change here: it is what rows or settings differ in; choose among those")
    jobs = []
    seeds_of = seeds if isinstance(seeds, Mapping) else dict.fromkeys(rows, seeds)
    for seed in dict.fromkeys(seed for row in rows for seed in seeds_of[row]):
        for setting in dict.fromkeys(settings):
            for row in dict.fromkeys(row for row in rows if seed in seeds_of[row]):
                jobs.append(_job(setting, row, seed, scale, episodes, out, overrides))
    return jobs


def _job(
    setting: str, row: str, seed: int, scale: float, episodes: int, out: Path, overrides: Mapping[str, Any]
) -> TableJob:
    config = load_recipe(f"{setting}-{row}", {**overrides, "seed": seed})
    iterations = max(1, round(scale * config.training.iterations))
    config = parse_config(config.to_dict(), {"training.iterations": iterations})
    return TableJob(
        setting=setting,
        row=row,
        recipe=f"{setting}-{row}",
        seed=seed,
        folder=out / f"{setting}-{row}-seed{seed}",
        config=config,
        episodes=episodes,
        overrides=overrides,
    )


def done_beside(table: Table, jobs: Sequence[TableJob], scale: float) -> list[TableJob]:
    """List what else of a table is done in the same folder, in the same settings and way: other rows and seeds."""
    first, asked = jobs[0], {job.folder for job in jobs}
    found = []
    for setting in dict.fromkeys(job.setting for job in jobs):
        for row in table.rows:
            for folder in sorted(first.folder.parent.glob(f"{glob.escape(f'{setting}-{row}')}-seed*")):
                seed = folder.name.rpartition("-seed")[2]
                if folder in asked or not seed.isdecimal():
                    continue
                with suppress(ConfigError):  # a run of another version, or a row without one of the options
                    job = _job(setting, row, int(seed), scale, first.episodes, folder.parent, first.overrides)
                    if job.folder == folder and job.result() is not None and job.conflict() is None:
                        found.append(job)
    return found


@dataclass(frozen=True)
class Entry:
    """What a table says of a row in a setting."""

    results: list[Evaluation]
    """One per seed that is done."""
    asked: int
    """How many seeds are asked for."""
    ahead: Evaluation | None
    """How far it is ahead of the first row, task by task; None for that row, and where one of them is not done or their
    tasks are not the same."""
    reported: Mapping[str, float]
    """The reported accuracy and its interval, as far as there are any."""
    elsewhere: bool
    """Whether these are the figures of the row that it is like, and so of another protocol."""
    reported_ahead: float | None
    """How far it is ahead of the first row by the reported figures."""
    protocol: str
    """How it is tested."""


def entries(table: Table, jobs: Sequence[TableJob]) -> dict[str, dict[str, Entry]]:
    """Gather what there is for a table, by setting and row."""
    base, rows = next(iter(table.rows)), [row for row in table.rows if any(job.row == row for job in jobs)]
    found: dict[str, dict[str, Entry]] = {}
    for setting in dict.fromkeys(job.setting for job in jobs):

        def figures(row: str, setting: str = setting) -> Mapping[str, float]:
            return load_recipe(f"{table.like.get(setting, setting)}-{row}").reported

        theirs = [job for job in jobs if (job.setting, job.row) == (setting, base)]
        bases = _results(theirs)
        found[setting] = {}
        for row in rows:
            mine = [job for job in jobs if (job.setting, job.row) == (setting, row)]
            results, own = _results(mine), figures(row)
            # A row may have a protocol of its own, as its authors had it, and so other tasks.
            comparable = results and bases and task_options(mine[0].config) == task_options(theirs[0].config)
            ahead = Evaluation.over_seeds(results).minus(Evaluation.over_seeds(bases)) if comparable else None
            both = own and figures(base) and row != base
            found[setting][row] = Entry(
                results,
                len(mine),
                ahead if row != base else None,
                own or (figures(table.like[row]) if row in table.like else {}),
                not own,
                own["accuracy"] - figures(base)["accuracy"] if both else None,
                _protocol(mine[0].config),
            )
    return found


def _protocol(config: Config) -> str:
    queries = f"{config.episode.query} {'query' if config.episode.query == 1 else 'queries'}"
    return f"{queries}, {config.episode.protocol}"


def _results(jobs: Sequence[TableJob]) -> list[Evaluation]:
    return [result for job in jobs if (result := job.result()) is not None]


def as_markdown(table: Table, found: Mapping[str, Mapping[str, Entry]]) -> str:
    """Write a table of the results so far: each beside its distance from the first row's, and the reported figure.

    Likelihood and calibration have columns in settings where some run has measured them. A table with rows of several
    protocols has a column that says which: that of its group, query images per class, and what these are normalised by.
    """
    measured = {setting: _columns(of_setting.values()) for setting, of_setting in found.items()}
    heads = ["row", "protocol"] if table.groups else ["row"]
    for setting, columns in measured.items():
        heads += [table.settings[setting], f"− {_base_title(table)}", *columns, _whose_figures(table, setting)]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in next(iter(found.values())):
        cells = [table.rows[row]]
        for group in (name for name, rows in table.groups.items() if row in rows):
            how = dict.fromkeys(of_setting[row].protocol for of_setting in found.values())
            cells.append(f"{group}: {' or '.join(how)}")
        for setting, columns in measured.items():
            entry = found[setting][row]
            cells.append(summary(entry.results, entry.asked))
            cells.append(f"{100 * entry.ahead.mean:+.2f} ± {100 * entry.ahead.interval:.2f}" if entry.ahead else "")
            cells += [columns[name](entry.results) for name in columns]
            reported = " ± ".join(f"{value:.2f}" for value in entry.reported.values())
            cells.append(f"{reported} (original)" if reported and entry.elsewhere else reported or "–")
        lines.append("| " + " | ".join(cells) + " |")
    if any("(original)" in line for line in lines):
        lines += ["", "(original): reported of the same system in the setting of its own paper; not comparable."]
    return "\n".join(lines) + "\n"


def _columns(of_setting: Iterable[Entry]) -> dict[str, Callable[[Sequence[Evaluation]], str]]:
    """Return the columns of a setting beside accuracies: those that are known of any of its rows."""
    columns = {"NLL": _nll, "ECE, %": _ece}
    results = [entry.results for entry in of_setting]
    return {name: of for name, of in columns.items() if any(of(each) != "–" for each in results)}


def _nll(results: Sequence[Evaluation]) -> str:
    nll = Evaluation.over_seeds(results).nll if results else None
    return "–" if nll is None else f"{nll:.4f}"


def _ece(results: Sequence[Evaluation]) -> str:
    calibration = Evaluation.over_seeds(results).calibration if results else None
    return "–" if calibration is None else f"{100 * calibration.error:.2f}"


def as_picture(table: Table, found: Mapping[str, Mapping[str, Entry]], path: Path) -> Path | None:
    """Draw how far each row is ahead of the first, here and as reported; None without matplotlib."""
    panels = [
        Panel(table.settings[setting], _whose_figures(table, setting), differences)
        for setting, of_setting in found.items()
        if (differences := _differences(table, of_setting))
    ]
    return plot_differences(panels, _base_title(table), path) if panels else None


def _differences(table: Table, of_setting: Mapping[str, Entry]) -> list[Difference]:
    return [
        Difference(table.rows[row], entry.ahead, entry.reported_ahead)
        for row, entry in of_setting.items()
        if entry.ahead is not None
    ]


def _base_title(table: Table) -> str:
    return next(iter(table.rows.values()))


def _whose_figures(table: Table, setting: str) -> str:
    other = table.like.get(setting)
    return f"reported on {table.settings[other]}" if other else "reported"


def summary(results: Sequence[Evaluation], asked: int) -> str:
    """Say mean and interval over the tasks, each averaged over the seeds, and how much the seeds differ."""
    if not results:
        return "not yet"
    pooled = Evaluation.over_seeds(results)
    text = f"{100 * pooled.mean:.2f} ± {100 * pooled.interval:.2f}"
    if asked == 1:
        return text
    seeds = f"{len(results)} seeds" if len(results) == asked else f"{len(results)} of {asked} seeds"
    spread = f", std {100 * float(np.std([result.mean for result in results], ddof=1)):.2f}" if len(results) > 1 else ""
    return f"{text} ({seeds}{spread})"
