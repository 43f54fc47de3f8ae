"""`metadropout report`: runs on one page that can be read anywhere."""

from __future__ import annotations

import argparse
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path

from metadropout.analysis.report import Report, read_pictures, read_runs, render
from metadropout.analysis.report.page import GENERATOR, Album
from metadropout.errors import ConfigError, MetadropoutError
from metadropout.files import write_atomically

EPILOG = """\
  metadropout report runs/maml runs/metadropout --attacks runs/attacks --out report.html
shows what is in the runs' folders; nothing is computed anew. What is missing is named,
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
    records = read_runs(namespace.folders, namespace.attacks)
    albums = [_album(folder) for folder in namespace.figures]
    page = render(Report(records, albums, _command(namespace), datetime.now(UTC)))
    content = page.encode(errors="replace")  # names of files need not be valid text
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, content)
    for record in records:
        for gap in record.gaps:
            print(
                f"{record.name}: {gap.part}: {gap.reason}{f' ({gap.command})' if gap.command else ''}", file=sys.stderr
            )
    print(f"{out}: {len(records)} run{'s' * (len(records) > 1)}, {len(content) / 1e6:.2f} MB")
    return 0


def _check_out(out: Path) -> None:
    """Refuse to write over anything but an earlier report."""
    if out.is_dir():
        raise ConfigError(f"{out}: is a folder; give --out the name of a file, such as {out / 'report.html'}")
    if out.exists() and GENERATOR.encode() not in out.read_bytes()[:2000]:
        raise ConfigError(f"{out}: is there already and is not a report; choose another --out")


def _album(folder: Path) -> Album:
    pictures, gaps = read_pictures(folder)
    if gaps:
        raise MetadropoutError(f"{gaps[0].reason}; draw the figures again")
    return Album(str(folder), pictures)


def _command(namespace: argparse.Namespace) -> str:
    """Write the command as it can be typed again."""
    words = ["metadropout", "report", *namespace.folders]
    words += ["--attacks", namespace.attacks] if namespace.attacks else []
    words += ["--figures", *namespace.figures] if namespace.figures else []
    return shlex.join(map(str, [*words, "--out", namespace.out]))
