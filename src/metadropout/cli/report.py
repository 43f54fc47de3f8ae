"""`metadropout report`: runs on one page that can be read anywhere."""

from __future__ import annotations

import argparse
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path

from metadropout.analysis.report import Report, read_figures, read_runs, render
from metadropout.analysis.report.page import GENERATOR, Album
from metadropout.errors import ConfigError
from metadropout.files import open_regular, write_atomically

EPILOG = """\
  metadropout report runs/maml runs/metadropout --attacks runs/attacks --out report.html
shows what is in the runs' folders; nothing is recomputed. What is missing is named,
with the command that makes it if there is one.
"""


def register(parser: argparse.ArgumentParser) -> None:
    """Give the command's parser its arguments."""
    parser.description = (
        "Writes one HTML file that needs no network: the runs' accuracies beside reported ones, learning "
        "curves, attacks, figures, configuration, environment and commands."
    )
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("folders", type=Path, nargs="+", metavar="RUN", help="folders of runs")
    parser.add_argument("--out", type=Path, default=Path("report.html"), metavar="FILE", help="default: report.html")
    parser.add_argument(
        "--attacks", type=Path, metavar="FOLDER", help="the --out of 'metadropout attack' (default: each run's folder)"
    )
    parser.add_argument(
        "--figures",
        type=Path,
        nargs="+",
        default=[],
        metavar="FOLDER",
        help="an --out of 'metadropout figures', shown beside those in each RUN/figures",
    )
    parser.set_defaults(run=run_command)


def run_command(namespace: argparse.Namespace) -> int:
    """Write the page, say what it lacks, and return the exit status."""
    out: Path = namespace.out
    _check_out(out)
    if namespace.attacks is not None and not namespace.attacks.is_dir():
        raise ConfigError(f"--attacks {namespace.attacks}: there is no such folder")
    summaries = read_runs(namespace.folders, namespace.attacks)
    albums = [Album(str(folder), read_figures(folder)) for folder in namespace.figures]
    report = Report(summaries, albums, _command(namespace), datetime.now(UTC))
    content = render(report).encode(errors="replace")  # names of files need not be valid text
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, content)
    for name, gaps in report.gaps.items():
        for gap in gaps:
            print(f"{name}: {gap.part}: {gap.reason}{f' ({gap.command})' if gap.command else ''}", file=sys.stderr)
    print(f"{out}: {len(summaries)} run{'s' * (len(summaries) > 1)}, {len(content) / 1e6:.2f} MB")
    return 0


def _check_out(out: Path) -> None:
    """Refuse to write over anything but an earlier report."""
    if out.is_dir():
        raise ConfigError(f"{out}: is a folder; give --out the name of a file, such as {out / 'report.html'}")
    if out.exists() and not _is_report(out):
        raise ConfigError(f"{out}: is there already and is not a report; choose another --out")


def _is_report(path: Path) -> bool:
    try:
        with open_regular(path, sys.maxsize) as file:
            return GENERATOR.encode() in file.read(2000)
    except OSError:
        return False


def _command(namespace: argparse.Namespace) -> str:
    """Write the command as it can be typed again."""
    words = ["metadropout", "report", *namespace.folders]
    words += ["--attacks", namespace.attacks] if namespace.attacks else []
    words += ["--figures", *namespace.figures] if namespace.figures else []
    return shlex.join(map(str, [*words, "--out", namespace.out]))
