"""Reproducing a table: which runs it takes, what is done of them, and the table beside the paper's figures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from metadropout.config import Config
from metadropout.errors import ConfigError, MetadropoutError
from metadropout.evaluation import Evaluation
from metadropout.metrics import read_metrics
from metadropout.recipes import Table, load_recipe
from metadropout.runs import open_run


@dataclass(frozen=True)
class Job:
    """One run of a table: a row in a setting with a seed, trained and evaluated."""

    setting: str
    row: str
    seed: int
    folder: Path
    config: Config
    episodes: int
    overrides: Mapping[str, Any] = field(default_factory=dict)

    @property
    def recipe(self) -> str:
        """Name of the recipe."""
        return f"{self.setting}-{self.row}"

    @property
    def evaluation(self) -> Path:
        """Where the result is written."""
        return self.folder / "evaluation-test.json"

    @property
    def log(self) -> Path:
        """Where its commands write; apart from the runs, so that a pattern of their names finds nothing else."""
        return self.folder.parent / "logs" / f"{self.folder.name}.log"

    def result(self) -> Evaluation | None:
        """Return the result, None if the run is not trained or evaluated as asked."""
        try:
            record = json.loads(self.evaluation.read_text(encoding="utf-8"))
        except (OSError, json.JSONDecodeError):
            return None
        fits = (record["iteration"], record["episodes"]) == (self.config.training.iterations, self.episodes)
        return Evaluation(record["accuracies"]) if fits else None

    def iterations_done(self) -> int:
        """Return how many outer steps have been taken, for showing progress."""
        return max((line["iteration"] for line in read_metrics(self.folder / "metrics.jsonl")), default=0)

    def check_folder(self) -> None:
        """Refuse a folder that holds a run of other options than this one's."""
        if not (self.folder / "config.yaml").exists():
            return
        found, wanted = comparable_options(open_run(self.folder).config), comparable_options(self.config)
        for section, options in wanted.items():
            if found[section] != options:
                raise ConfigError(
                    f"{self.folder}: holds a run with another {section} section; choose another --out or delete it"
                )

    def commands(self) -> list[list[str]]:
        """Return the arguments of the commands that are still to be run: train or resume, then evaluate."""
        if (self.folder / "config.yaml").exists():
            which = ["--resume", str(self.folder)]
            options = []
        else:
            which = [self.recipe, "--out", str(self.folder), "--seed", str(self.seed)]
            options = [text for name, value in self.overrides.items() for text in (f"--{name}", _as_text(value))]
        iterations = ["--training.iterations", str(self.config.training.iterations)]
        train = ["train", *which, "--machine.threads", "1", *options, *iterations]  # the last of equals counts
        return [train, ["evaluate", str(self.folder), "--episodes", str(self.episodes)]]


def plan(
    table: Table,
    *,
    scale: float,
    settings: Sequence[str],
    rows: Sequence[str],
    seeds: Sequence[int],
    episodes: int,
    out: Path,
    overrides: Mapping[str, Any],
) -> list[Job]:
    """List the runs of a table, at a fraction of the recipes' iterations.

    Args:
        table: which one.
        scale: fraction of the iterations; 1 is the paper.
        settings: which of its settings.
        rows: which of its rows.
        seeds: each row is trained once with each.
        episodes: test episodes of each run, the same ones for all.
        out: folder of the runs.
        overrides: options that differ from the recipes in all runs.
    """
    for kind, asked, known in (("setting", settings, table.settings), ("row", rows, table.rows)):
        if unknown := [name for name in asked if name not in known]:
            raise ConfigError(f"there is no {kind} '{unknown[0]}' in this table; known are: {', '.join(known)}")
    if not scale > 0:
        raise ConfigError(f"--scale is {scale}; it must be above 0")
    if episodes < 1 or min(seeds, default=0) < 0:
        raise ConfigError("--episodes must be at least 1, and seeds 0 or more")
    jobs = []
    for seed in seeds:
        for setting in settings:
            for row in rows:
                config = load_recipe(f"{setting}-{row}", {**overrides, "seed": seed})
                iterations = max(1, round(scale * config.training.iterations))
                config = replace(config, training=replace(config.training, iterations=iterations))
                folder = out / f"{setting}-{row}-seed{seed}"
                jobs.append(Job(setting, row, seed, folder, config, episodes, overrides))
    return jobs


class Worker:
    """Runs jobs in processes of their own, so that several can run at once and be stopped."""

    def __init__(self) -> None:
        self._processes: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.Lock()
        self.stopping = False

    def run(self, job: Job) -> str | None:
        """Train and evaluate a run unless that is done; return what went wrong, None if nothing did."""
        job.check_folder()
        if job.result() is not None:
            return None
        job.log.parent.mkdir(parents=True, exist_ok=True)
        for arguments in job.commands():
            with job.log.open("ab") as output:
                status = self._call(arguments, output)
            if status != 0:
                return f"{job.folder.name}: stopped with status {status}; its log is {job.log}"
        return None

    def stop(self) -> None:
        """Ask all processes to save and stop."""
        with self._lock:
            self.stopping = True
            for process in self._processes:
                process.terminate()

    def _call(self, arguments: list[str], output: Any) -> int:
        with self._lock:
            if self.stopping:
                return 143
            # In a group of its own: Ctrl-C reaches the children through `stop` alone, once.
            process = subprocess.Popen(
                [sys.executable, "-m", "metadropout", *arguments],
                stdout=output,
                stderr=output,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
            self._processes.add(process)
        try:
            return process.wait()
        finally:
            with self._lock:
                self._processes.discard(process)


def as_markdown(table: Table, jobs: Sequence[Job]) -> str:
    """Write a table of the results so far, each beside the reported figure."""
    settings = list(dict.fromkeys(job.setting for job in jobs))
    rows = list(dict.fromkeys(job.row for job in jobs))
    head = "| row | " + " | ".join(f"{table.settings[s]} | reported" for s in settings) + " |"
    lines = [head, "|---" * (1 + 2 * len(settings)) + "|"]
    for row in rows:
        cells = [table.rows[row]]
        for setting in settings:
            mine = [job for job in jobs if (job.setting, job.row) == (setting, row)]
            cells.append(summary([result for job in mine if (result := job.result()) is not None]))
            cells.append(" ± ".join(f"{value:.2f}" for value in mine[0].config.reported.values()) or "–")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def summary(results: Sequence[Evaluation]) -> str:
    """Say mean and interval over all episodes of all seeds, and how much the seeds differ."""
    if not results:
        return "not yet"
    pooled = Evaluation([accuracy for result in results for accuracy in result.accuracies])
    text = f"{100 * pooled.mean:.2f} ± {100 * pooled.interval:.2f}"
    if len(results) == 1:
        return text
    spread = float(np.std([result.mean for result in results], ddof=1))
    return f"{text} ({len(results)} seeds, std {100 * spread:.2f})"


def failed(problem: str) -> MetadropoutError:
    """Return the error for runs that did not end well."""
    return MetadropoutError(f"{problem}; mend the cause and call the same command again: what is done is skipped")


def comparable_options(config: Config) -> dict[str, Any]:
    """Leave out what may differ between two calls: the number of iterations, logging and the machine."""
    plain = config.to_dict()
    for name in ("machine", "description", "reported"):
        plain.pop(name)
    plain["training"] = {k: v for k, v in plain["training"].items() if k in ("meta_batch", "meta_lr", "clip")}
    plain["data"] = {k: v for k, v in plain["data"].items() if k not in ("directory", "download")}
    return plain


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
