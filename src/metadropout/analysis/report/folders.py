"""What a report shows of a run, read from its folder: what is missing is named, what is damaged is refused."""

from __future__ import annotations

import base64
import io
import shlex
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated, Any, TypeVar

from PIL import Image
from pydantic import Field, FiniteFloat, TypeAdapter, ValidationError

import metadropout
from metadropout.errors import CheckpointError, ConfigError, MetadropoutError
from metadropout.robustness.attacks import NORMS
from metadropout.robustness.curves import Record
from metadropout.runs.folder import Run, open_run
from metadropout.runs.results import TestResult, read_result
from metadropout.training.checkpoints import iteration_of, latest_checkpoint, read_checkpoint
from metadropout.training.metrics import read_metrics

T = TypeVar("T")
Fraction = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=0)]


@dataclass(frozen=True)
class Gap:
    """A part of a run that a report lacks, or that is not what one would expect, and what to do about it."""

    part: str
    reason: str
    command: str = ""


@dataclass(frozen=True)
class Start:
    """How a run was started or resumed, from `environment.json`."""

    command: str
    started: str
    python: str = ""
    platform: str = ""
    processor: str = ""
    gpus: list[str] = field(default_factory=list)
    versions: dict[str, str | None] = field(default_factory=dict)
    processes: Count = 1
    threads: Count | None = None


@dataclass(frozen=True)
class TrainingLine:
    """The mean over some outer steps, from `metrics.jsonl`."""

    iteration: Count
    loss: FiniteFloat
    accuracy: Fraction
    seconds: FiniteFloat | None = None
    tasks_per_second: FiniteFloat | None = None


@dataclass(frozen=True)
class ValidationLine:
    """A validation, from `metrics.jsonl`."""

    iteration: Count
    accuracy: Fraction
    interval: FiniteFloat


@dataclass(frozen=True)
class Picture:
    """A figure that `metadropout figures` has drawn, as a data URI."""

    name: str
    title: str
    caption: str
    alt: str
    uri: str
    width: int
    height: int
    animation: str = ""
    """File of the same in motion, which a page leaves out because of its size."""


@dataclass(frozen=True)
class RunRecord:
    """All that a report knows of a run."""

    name: str
    """What the page calls it: the folder's name, or the whole path where several folders have that name."""
    run: Run
    iteration: int
    """Outer steps done."""
    starts: list[Start]
    training: list[TrainingLine]
    validation: list[ValidationLine]
    tests: list[TestResult]
    attack: Record | None
    attacks: Path | None
    """Folder of the attack's record, None for the run's own."""
    pictures: list[Picture]
    gaps: list[Gap]

    @property
    def finished(self) -> bool:
        """Whether training has come to its end."""
        return self.iteration >= self.run.config.training.iterations

    @property
    def seconds(self) -> float | None:
        """Time spent training."""
        return max((line.seconds for line in self.training if line.seconds is not None), default=None)

    @property
    def speed(self) -> float | None:
        """Tasks per second: the median over what was logged."""
        return median(speeds) if (speeds := [s for line in self.training if (s := line.tasks_per_second)]) else None

    def commands(self) -> list[str]:
        """Return what made the run: recorded commands of training, and tests and attacks as their files tell them."""
        lines = list(dict.fromkeys(start.command for start in self.starts))
        for test in self.tests:
            options = ["--episodes", len(test.accuracies), "--mc-samples", test.mc_samples, "--seed", test.seed]
            options += ["--split", test.split] if test.split != "test" else []
            options += ["--state", test.state] if test.state != "last" else []
            options += ["--episode-list", test.episode_list] if test.episode_list else []
            lines.append(command("evaluate", self.run.folder, *options))
        return lines + ([self._attack_command(self.attack)] if self.attack else [])

    def _attack_command(self, attack: Record) -> str:
        """Return the command that attacks in the same way."""
        options: list[object] = ["--episodes", len(attack.episodes)]
        for name in ("steps", "restarts", "mc_samples", "seed"):
            options += [f"--{name.replace('_', '-')}", attack.measured[name]]
        options += ["--state", attack.state] if attack.state != "last" else []
        if attack.measured["protocol"] == "inductive" != self.run.config.episode.protocol:
            options.append("--inductive")
        options += ["--out", self.attacks] if self.attacks else []
        for norm in NORMS:
            if radii := attack.radii(norm):
                options += ["--norm", norm, "--epsilon", *(f"{radius:g}" for radius in sorted(radii))]
        return command("attack", self.run.folder, *options)


def command(name: str, folder: Path, *options: object) -> str:
    """Write a command for a run as one types it."""
    return shlex.join(["metadropout", name, str(folder), *map(str, options)])


def read_runs(folders: Sequence[Path], attacks: Path | None = None) -> list[RunRecord]:
    """Read the folders of runs.

    Args:
        folders: the runs' folders.
        attacks: where `metadropout attack` has written; the run's folder by default.

    Raises:
        MetadropoutError: if it is no run, one of another version that cannot be read, or a file is damaged.
    """
    places = [folder.resolve() for folder in folders]
    if twice := [place for place in places if places.count(place) > 1]:
        raise ConfigError(f"{twice[0]}: is named twice; name each run once")
    names = [place.name for place in places]
    return [
        _read_run(str(folder) if names.count(name) > 1 else name, folder, attacks)
        for folder, name in zip(folders, names, strict=True)
    ]


def _read_run(name: str, folder: Path, attacks: Path | None) -> RunRecord:
    run = open_run(folder)
    starts = _starts(folder / "environment.json")
    training = _metrics(run, "training", TypeAdapter(list[TrainingLine]))
    validation = _metrics(run, "validation", TypeAdapter(list[ValidationLine]))
    tests = [read_result(path) for path in sorted(folder.glob("evaluation-*.json"))]
    tests = [test for test in tests if test.is_of_own_tasks(run.config)]
    attack = _attack((attacks or folder) / f"attack-{folder.resolve().name}.json")
    has_pictures = (folder / "figures" / "figures.json").is_file()
    pictures, lost = read_pictures(folder / "figures") if has_pictures else ([], [])
    iteration, gaps = _progress(run, max((line.iteration for line in training), default=0))
    gaps += _record_gaps(starts, training) + _result_gaps(run, iteration, tests, attack, attacks)
    if not pictures:
        gaps.append(Gap("figures", "none have been drawn", command("figures", folder)))
    return RunRecord(name, run, iteration, starts, training, validation, tests, attack, attacks, pictures, gaps + lost)


def read_pictures(folder: Path) -> tuple[list[Picture], list[Gap]]:
    """Read the figures that `metadropout figures` has drawn into a folder, and name those whose file is gone.

    Raises:
        MetadropoutError: if the folder has no index, or the index or a picture is damaged.
    """
    index = folder / "figures.json"
    if not index.is_file():
        raise ConfigError(f"{folder}: has no figures.json; draw figures with 'metadropout figures RUN --out {folder}'")
    pictures, gaps = [], []
    for name, entry in _read(index, TypeAdapter(dict[str, _FigureEntry])).items():
        still = next((file for file in entry.files if file.endswith(".png")), entry.files[0])
        if Path(still).name != still:
            raise MetadropoutError(f"{index}: {name}.files: {still} is not in this folder; draw the figures again")
        if not (folder / still).is_file():
            gaps.append(Gap("figures", f"{folder / still} is listed in figures.json, but it is not there"))
            continue
        uri, width, height = _as_uri(folder / still)
        moving = next((str(folder / file) for file in entry.files if file.endswith(".gif")), "")
        pictures.append(Picture(name, entry.title, entry.caption, entry.alt, uri, width, height, moving))
    return pictures, gaps


@dataclass(frozen=True)
class _FigureEntry:
    files: Annotated[list[str], Field(min_length=1)]
    title: str
    caption: str
    alt: str


@dataclass(frozen=True)
class _Environment:
    starts: list[Start]


def _starts(path: Path) -> list[Start]:
    return _read(path, TypeAdapter(_Environment)).starts if path.is_file() else []


def _attack(path: Path) -> Record | None:
    """Read a record of attacks, if there is one with an attack in it."""
    record = _read(path, TypeAdapter(Record)) if path.is_file() else None
    needed = {"protocol", "iteration", "steps", "restarts", "mc_samples", "seed"}
    if record is not None and (odd := sorted(needed - record.measured.keys())):
        raise MetadropoutError(f"{path}: measured.{odd[0]} is missing; delete the file and attack again")
    return record if record is not None and any(episode.attacked for episode in record.episodes) else None


def _progress(run: Run, logged: int) -> tuple[int, list[Gap]]:
    """Return how many outer steps are done, by the last checkpoint or else by the metrics, and what is wrong there."""
    planned, resume = run.config.training.iterations, f"metadropout train --resume {shlex.quote(str(run.folder))}"
    path = latest_checkpoint(run.checkpoints)
    if path is None:
        reason = f"there is none in {run.checkpoints}: the weights are lost, and resuming starts from the beginning"
        return logged, [Gap("checkpoint", reason, resume)]
    gaps = []
    try:
        read_checkpoint(path)
    except CheckpointError as error:
        gaps.append(Gap("checkpoint", str(error)))
    if (done := iteration_of(path)) < planned:
        gaps.append(Gap("training", f"not finished: iteration {done} of {planned}", resume))
    return done, gaps


def _record_gaps(starts: list[Start], training: list[TrainingLine]) -> list[Gap]:
    gaps = []
    if not training:
        gaps.append(Gap("learning curves", "metrics.jsonl is missing or has no line of training"))
    if not starts:
        gaps.append(Gap("environment", "environment.json is missing or empty: versions and commands are not known"))
    others = {str(v) for start in starts if (v := start.versions.get("metadropout")) != metadropout.__version__}
    if others:
        reason = f"trained by metadropout {', '.join(sorted(others))}, reported by {metadropout.__version__}"
        gaps.append(Gap("version", f"{reason}: options may have had another meaning"))
    return gaps


def _result_gaps(
    run: Run, iteration: int, tests: list[TestResult], attack: Record | None, attacks: Path | None
) -> list[Gap]:
    """Name results that are missing, or older than the weights."""
    gaps = []
    evaluate = command("evaluate", run.folder)
    last = [test for test in tests if (test.split, test.state) == ("test", "last")]
    if not last:
        gaps.append(Gap("evaluation", "the last state has not been tested on unseen classes", evaluate))
    elif last[0].iteration != iteration:
        gaps.append(Gap("evaluation", f"is of iteration {last[0].iteration}, the run is at {iteration}", evaluate))
    options: list[object] = ["--episodes", 100, *(["--out", attacks] if attacks else [])]
    again = command("attack", run.folder, *options)
    if attack is None:
        gaps.append(Gap("attacks", "the run has not been attacked", again))
    elif attack.state == "last" and attack.measured["iteration"] != iteration:
        measured = attack.measured["iteration"]
        reason = f"are of iteration {measured}, the run is at {iteration}; delete their file before attacking again"
        gaps.append(Gap("attacks", reason, again))
    return gaps


def _metrics(run: Run, kind: str, lines: TypeAdapter[T]) -> T:
    found = [line for line in read_metrics(run.metrics) if line["kind"] == kind]
    try:
        return lines.validate_python(found)
    except ValidationError as error:
        first = error.errors()[0]
        number, *names = first["loc"]
        where = f"iteration {found[int(number)]['iteration']}, {_dotted(names)}"
        raise MetadropoutError(
            f"{run.metrics}: line of {kind} at {where}: {_said(first)}; delete the line or mend it"
        ) from None


def _read(path: Path, kind: TypeAdapter[T]) -> T:
    """Read a JSON file and check that it holds what it should."""
    try:
        return kind.validate_json(path.read_bytes())
    except OSError as error:
        raise MetadropoutError(f"{path}: cannot be read: {error.strerror}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = f"{_dotted(first['loc'])}: " if first["loc"] else ""
        raise MetadropoutError(
            f"{path}: {where}{_said(first)}; delete the file and run the command that wrote it again, or restore it"
        ) from None


def _dotted(names: Any) -> str:
    return ".".join(map(str, names))


def _said(error: Any) -> str:
    message: str = error["msg"]
    return message[:1].lower() + message[1:]


def _as_uri(path: Path) -> tuple[str, int, int]:
    """Turn a picture into a data URI that is as small as it can be without loss, and return its size, too."""
    try:
        with warnings.catch_warnings(), Image.open(path) as image:
            warnings.simplefilter("error")  # Pillow only warns of pictures that are suspiciously large
            width, height = image.size
            content = io.BytesIO()
            image.convert("RGB").save(content, "WEBP", lossless=True, method=4)
    except (OSError, SyntaxError, ValueError, Warning, Image.DecompressionBombError) as error:
        raise MetadropoutError(f"{path}: is not a picture that can be read ({error}); draw the figures again") from None
    return f"data:image/webp;base64,{base64.b64encode(content.getvalue()).decode()}", width, height
