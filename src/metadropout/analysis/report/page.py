"""The page: one HTML file that loads nothing, and to which nothing from a run's folder can add a script."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

import metadropout
from metadropout.analysis.figures.runs import FIGURES
from metadropout.analysis.plots import SMOOTHING
from metadropout.analysis.report import charts
from metadropout.analysis.report.comparison import Setting, compare, span_of
from metadropout.analysis.report.folders import Figures, Gap, RunSummary, command
from metadropout.analysis.report.results import attack_groups, learning_charts, styled_runs
from metadropout.analysis.verdict import told_apart
from metadropout.evaluation import BINS

FOLDER = Path(__file__).parent
GENERATOR = '<meta name="generator" content="metadropout report'
"""By which a file is known to be a report."""


@dataclass(frozen=True)
class Album:
    """Figures of a run, or of a folder that was named by itself."""

    name: str
    figures: Figures
    not_drawn: Sequence[str] = ()
    command: str = ""
    """Draws what is not drawn, or says why it cannot."""


@dataclass(frozen=True)
class Report:
    """What goes on the page.

    Args:
        summaries: the runs.
        albums: figures from folders that were named by themselves.
        command: what made the page.
        made: when.
    """

    summaries: Sequence[RunSummary]
    albums: Sequence[Album]
    command: str
    made: datetime

    @property
    def gaps(self) -> dict[str, list[Gap]]:
        """What is missing, by the name of the run or folder; without those that lack nothing."""
        named = [(summary.name, summary.gaps) for summary in self.summaries]
        named += [(album.name, album.figures.gaps) for album in self.albums]
        return {name: gaps for name, gaps in named if gaps}


def render(report: Report) -> str:
    """Return the page's HTML.

    Raises:
        MetadropoutError: if the runs cannot be compared.
    """
    environment = Environment(
        loader=FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(percent=_percent, signed=_signed, duration=_duration, plain=_plain)
    environment.globals.update(charts=charts, Style=charts.Style, told_apart=told_apart, span_of=span_of)
    environment.globals.update(bins=BINS, smoothing=SMOOTHING)
    style, script = ((FOLDER / name).read_text(encoding="utf-8") for name in ("style.css", "script.js"))
    settings = compare(report.summaries)
    options = {summary.name: _flat(summary) for summary in report.summaries}
    common, differing = _common_and_differing(list(options.values()))
    return environment.get_template("page.html").render(
        report=report,
        version=metadropout.__version__,
        generator=Markup(GENERATOR),
        policy=_policy(style, script),
        style=Markup(style),
        script=Markup(script),
        title=settings[0].title if len(settings) == 1 else f"{len(report.summaries)} runs in {len(settings)} settings",
        settings=settings,
        learning={setting.title: learning_charts(setting) for setting in settings},
        attacks={setting.title: groups for setting in settings if (groups := attack_groups(setting))},
        legends={setting.title: _legend(setting) for setting in settings},
        albums=[*(_album(s) for s in report.summaries if s.figures.pictures), *report.albums],
        options=options,
        common=common,
        differing=differing,
        packages=_packages(report.summaries),
    )


def _policy(style: str, script: str) -> str:
    """Allow this very style sheet and script, and pictures inside the page; nothing else is loaded or run."""
    return (
        f"default-src 'none'; img-src data:; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _legend(setting: Setting) -> list[tuple[str, charts.Style]]:
    return [(method.label(summary), style) for method, summary, style in styled_runs(setting)]


def _album(summary: RunSummary) -> Album:
    figures = summary.figures
    known = {*figures.left_out, *(picture.name for picture in figures.pictures)}
    not_drawn = [name for name in FIGURES if name not in known]
    return Album(summary.name, figures, not_drawn, command("figures", summary.run.folder, "--only", *not_drawn))


def _flat(summary: RunSummary) -> dict[str, Any]:
    """Return a run's options by dotted name; its description and what others report are no options."""
    flat: dict[str, Any] = {}
    options = {k: v for k, v in summary.run.config.to_dict().items() if k not in ("description", "reported")}
    for name, value in options.items():
        flat |= {f"{name}.{key}": v for key, v in value.items()} if isinstance(value, dict) else {name: value}
    return flat


def _common_and_differing(options: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], list[str]]:
    """Tell options that are the same in all runs from those that are not, or that only some have."""
    names = list(dict.fromkeys(name for flat in options for name in flat))
    differing = [n for n in names if any(n not in flat or flat[n] != options[0].get(n) for flat in options)]
    return {name: options[0][name] for name in names if name not in differing}, differing


def _packages(summaries: Sequence[RunSummary]) -> list[str]:
    return list(
        dict.fromkeys(name for summary in summaries for start in summary.starts[-1:] for name in start.versions)
    )


def _percent(value: float) -> str:
    return f"{100 * value:.2f}"


def _signed(value: float) -> str:
    return f"{value:+.2f}".replace("-", "\N{MINUS SIGN}")


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min" if minutes >= 60 else f"{seconds / 60:.1f} min"


def _plain(value: Any) -> str:
    """Write an option's value as it is typed on the command line."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
