"""What was measured, as tables for a terminal and for a page."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from metadropout.bench.adaptation import AdaptationCost
from metadropout.bench.comparison import Comparison
from metadropout.bench.implementations import IMPLEMENTATIONS, OURS_IN
from metadropout.bench.measuring import Ratio
from metadropout.ops import kernels
from metadropout.runs.folder import environment

TITLES = {"maml": "MAML", "metadropout": "MAML + Meta-dropout"}


@dataclass(frozen=True)
class Report:
    """A table with a title above and a note below."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""

    def for_terminal(self) -> Group:
        """Return the report as rich draws it."""
        table = Table(box=None, pad_edge=False)
        for number, heading in enumerate(self.headings):
            table.add_column(heading, justify="right" if number else "left", no_wrap=number == 0)
        for row in self.rows:
            table.add_row(*row)
        return Group("", Text(self.title, style="bold"), table, self.note)

    def for_page(self) -> str:
        """Return the table as Markdown."""
        lines = [f"**{self.title}**", "", _line(self.headings), "|---" + "|--:" * (len(self.headings) - 1) + "|"]
        lines += [_line(row) for row in self.rows]
        return "\n".join([*lines, *(["", self.note] if self.note else []), ""])


def comparison_report(comparison: Comparison) -> Report:
    """Put every implementation of a meta-iteration in a row."""
    limit = comparison.convolutions
    rows = [
        [
            result.name,
            f"{result.median:.3f}",
            shown_ratio(comparison.slowdown(result)) if result is not comparison.results[0] else "1",
            megabytes(result.peak_memory),
            f"{comparison.flops / result.median / 1e9:.1f}",
            f"{comparison.fraction_of_limit(result):.2f}",
        ]
        for result in comparison.results
    ]
    rows.append([limit.name, f"{limit.median:.3f}", "", "", f"{comparison.flops / limit.median / 1e9:.1f}", "1"])
    note = (
        f"Median of {len(limit.seconds)} rounds; ratios within a round, lowest to highest in brackets. "
        f"{comparison.flops / 1e9:.1f} GFLOP of convolutions in an iteration. Meta-gradients differ by at most "
        f"{comparison.float64_difference:.0e} in float64 (float32 after one inner step: "
        f"{comparison.float32_difference:.0e})."
    )
    if comparison.rounded_difference is not None:
        faster = shown_ratio(comparison.speedup(OURS_IN["bf16"].name))
        note += (
            f" In bfloat16 training is {faster} times as fast as in float32; without inner steps the gradient "
            f"differs by {comparison.rounded_difference:.0e}."
        )
    headings = ["", "s / iteration", "times as long", "memory, MB", "GFLOP/s", "of the limit"]
    return Report(f"{TITLES[comparison.method]}: {comparison.setting}", headings, rows, note)


def adaptation_report(costs: Sequence[AdaptationCost]) -> Report:
    """Put every number of shots and samples in a row."""
    rows = [
        [
            f"{cost.setting.shot}-shot, S = {cost.samples}",
            f"{cost.batch.median:.3f}",
            *[shown_ratio(cost.speedup(loop)) for loop in (cost.loop, cost.plain)],
            *[megabytes(way.peak_memory) for way in (cost.batch, cost.loop, cost.plain)],
        ]
        for cost in costs
    ]
    headings = ["", "one batch, s / task", "loop, times as long", "plain loop, times as long"]
    headings += ["one batch, MB", "loop, MB", "plain loop, MB"]
    rounds, largest = len(costs[0].batch.seconds), max(cost.float64_difference for cost in costs)
    note = f"Median of {rounds} rounds; ratios within a round. Logits differ by at most {largest:.0e} in float64."
    return Report(f"Adapting with S noise samples per inner step: {costs[0].setting.way}-way", headings, rows, note)


def growth_report(measured: Sequence[tuple[str, int, Comparison]]) -> Report:
    """Put every point in a row."""
    rows = [
        [
            f"{TITLES[comparison.method]}, {parameter} {value}",
            *[f"{result.median:.3f}" for result in comparison.results],
            shown_ratio(comparison.slowdown(comparison.results[-1])),
            *[megabytes(result.peak_memory) for result in comparison.results],
        ]
        for parameter, value, comparison in measured
    ]
    names = [result.name for result in measured[0][2].results]
    headings = ["", *[f"{n}, s" for n in names], "times as long", *[f"{n}, MB" for n in names]]
    return Report("How a meta-iteration grows, one number at a time", headings, rows)


def describe_machine(threads: int) -> dict[str, Any]:
    """Describe the machine and the versions."""
    return {
        **environment(),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "threads_asked_for": threads,
        "fused_kernels": kernels.available(),
        "peers": {i.package: metadata.version(i.package) for i in IMPLEMENTATIONS if i.package and i.is_installed()},
    }


def _cpu() -> str:
    """Return the processor's name, where the system tells."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def shown_ratio(value: Ratio) -> str:
    """Write a ratio with its lowest and highest value."""
    return f"{value.median:.2f} ({value.lowest:.2f}–{value.highest:.2f})"


def megabytes(size: int) -> str:
    """Write a number of bytes in megabytes."""
    return f"{size / 1e6:.0f}"
