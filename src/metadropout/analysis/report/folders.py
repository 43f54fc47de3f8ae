"""What a report shows of a run, read from its folder: what is missing is named, what is damaged is refused."""

from __future__ import annotations

import base64
import io
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from pydantic import TypeAdapter

import metadropout
from metadropout.analysis.figures.index import FigureIndex, read_index
from metadropout.data.decode import open_image
from metadropout.data.trees import UnreadableError
from metadropout.errors import CheckpointError, ConfigError, RunFileError
from metadropout.files import read_regular
from metadropout.robustness.attacks import NORMS, Norm
from metadropout.robustness.curves import AttackRequest, AttackResults, read_attacks
from metadropout.runs.folder import Run, open_run
from metadropout.runs.reading import read_checked
from metadropout.runs.results import Count, TestResult, read_result
from metadropout.training.checkpoints import iteration_of, read_checkpoint
from metadropout.training.metrics import Metrics, TrainingLine, ValidationLine, load_metrics

MAX_PICTURE_BYTES = 64 * 2**20


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
    iteration: int | None = None
    """Outer steps of the last state when it was drawn; None where that is not known, or another state is shown."""

    @property
    def wide(self) -> bool:
        """Whether its letters can be read only near its own size, for which it takes the page's whole width."""
        return self.width > 600


@dataclass(frozen=True)
class Figures:
    """What a folder of figures holds."""

    pictures: list[Picture] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    """Figures that do not apply to the run, with the reason."""
    gaps: list[Gap] = field(default_factory=list)


@dataclass(frozen=True)
class RunSummary:
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
    """On the tasks that the run was made for."""
    tests_during_training: list[TestResult]
    """The same, of states that training went on from."""
    other_tests: list[TestResult]
    """On other tasks: never to be mixed with those."""
    attack: AttackResults | None
    attacks: Path | None
    """Folder of the attack's results, None for the run's own."""
    figures: Figures
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

    def test_curve(self) -> list[TestResult]:
        """Return the tests on unseen classes over training, with one number of noise samples, by iteration."""
        during = [test for test in self.tests_during_training if test.split == "test"]
        if not during:
            return []
        counts = Counter((test.tasks, test.asked_samples) for test in during)
        (tasks, samples), _ = counts.most_common(1)[0]
        last = [test for test in self.tests if test.state == "last"]
        found = [test for test in (*during, *last) if (test.tasks, test.asked_samples) == (tasks, samples)]
        return sorted(found, key=lambda test: test.iteration)

    def commands(self) -> list[str]:
        """Return what made the run: recorded commands of training, and tests and attacks as their files tell them."""
        lines = list(dict.fromkeys(start.command for start in self.starts))
        for test in (*self.tests, *self.tests_during_training, *self.other_tests):
            lines.append(command("evaluate", self.run.folder, *test.command_options(self.run)))
        return lines + (attack_commands(self.run, self.attack, self.attacks) if self.attack else [])


def attack_commands(
    run: Run, attack: AttackResults, folder: Path | None, asked: Mapping[Norm, AttackRequest] | None = None
) -> list[str]:
    """Return the commands that attack a run in the same way: one for each number of episodes.

    Args:
        run: the run.
        attack: what has been measured.
        folder: where the results are, None for the run's own folder.
        asked: what is to be measured, by norm; what was asked for, or else what has been measured, by default.
    """
    asked = asked or attack.asked or measured_of(attack)
    options: list[object] = []
    for name in ("steps", "restarts", "mc_samples", "seed"):
        options += [f"--{name.replace('_', '-')}", attack.measured[name]]
    options += ["--state", attack.state] if attack.state != "last" else []
    if attack.measured["protocol"] == "inductive" != run.config.episode.protocol:
        options.append("--inductive")
    options += ["--out", folder] if folder else []
    lines = []
    for episodes in sorted({each.episodes for each in asked.values()}, reverse=True):
        radii: list[object] = []
        for norm in NORMS:
            if norm in asked and asked[norm].episodes == episodes:
                radii += ["--norm", norm, "--epsilon", *(f"{radius:g}" for radius in sorted(asked[norm].radii))]
        lines.append(command("attack", run.folder, "--episodes", episodes, *options, *radii))
    return lines


def measured_of(attack: AttackResults) -> dict[Norm, AttackRequest]:
    """Return what has been measured as if it had been asked for, for files that do not say what was."""
    return {
        norm: AttackRequest(len(attack.episodes), tuple(sorted(radii)))
        for norm in NORMS
        if (radii := attack.radii(norm))
    }


def command(name: str, folder: Path, *options: object) -> str:
    """Write a command for a run as one types it."""
    return shlex.join(["metadropout", name, str(folder), *map(str, options)])


def read_runs(folders: Sequence[Path], attacks: Path | None = None) -> list[RunSummary]:
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


def _read_run(name: str, folder: Path, attacks: Path | None) -> RunSummary:
    run = open_run(folder)
    starts = _starts(folder / "environment.json")
    metrics = load_metrics(run.metrics)
    training = metrics.training
    tests = [read_result(path) for path in sorted(folder.glob("evaluation-*.json"))]
    measured = [test.completed(run) for test in tests if test.is_of_own_tasks(run)]
    own = [test for test in measured if not test.is_during_training()]
    during = [test for test in measured if test.is_during_training()]
    others = [test for test in tests if not test.is_of_own_tasks(run)]
    attack = _attack((attacks or folder) / f"attack-{folder.resolve().name}.json")
    figures = read_figures(folder / "figures", folder)
    iteration, gaps = _progress(run, max((line.iteration for line in training), default=0))
    gaps += _log_gaps(run, starts, metrics) + _test_gaps(run, iteration, own, others)
    gaps += _attack_gaps(run, iteration, attack, attacks) + figures.gaps
    if not figures.pictures and not figures.gaps:
        gaps.append(Gap("figures", "none have been drawn", command("figures", folder)))
    for picture in figures.pictures:
        if picture.iteration not in (None, iteration):
            reason = f"{picture.name} shows iteration {picture.iteration}, the run is at {iteration}"
            gaps.append(Gap("figures", reason, command("figures", folder, "--only", picture.name)))
    validation = metrics.validation
    return RunSummary(
        name, run, iteration, starts, training, validation, own, during, others, attack, attacks, figures, gaps
    )


def read_figures(folder: Path, run: Path | None = None) -> Figures:
    """Read the figures that `metadropout figures` has drawn into a folder, and name what is missing among them.

    Args:
        folder: the folder; it may be missing where it is a run's own.
        run: the run's folder, where this is its own folder of figures.

    Raises:
        RunFileError: if the index or a picture is damaged.
    """
    if run is None and not (folder / "figures.json").exists():
        raise ConfigError(f"{folder}: has no figures.json; draw figures with 'metadropout figures RUN --out {folder}'")
    index = read_index(folder)
    pictures, gaps = [], _pending_gaps(index, folder, run)
    for name, drawn in index.figures.items():
        still = next((file for file in drawn.files if file.endswith(".png")), drawn.files[0])
        if not (folder / still).exists():
            gaps.append(Gap("figures", f"{folder / still} is listed in figures.json, but it does not exist"))
            continue
        uri, width, height = _as_uri(folder / still)
        moving = next((str(folder / file) for file in drawn.files if file.endswith(".gif")), "")
        iteration = drawn.iteration if drawn.state == "last" else None
        words = drawn.title, drawn.caption, drawn.alt
        pictures.append(Picture(name, *words, uri, width, height, moving, iteration))
    return Figures(pictures, index.left_out, gaps)


def _pending_gaps(index: FigureIndex, folder: Path, run: Path | None) -> list[Gap]:
    """Name the figures that a command was stopped before, with the commands that go on."""
    gaps = []
    for asked in dict.fromkeys(index.pending.values()):
        names = [name for name, each in index.pending.items() if each == asked]
        first, *others = asked.runs or ("RUN",)
        options: list[object] = ["--only", *names]
        options += ["--compare", *others[:1]] if others else []
        options += [*asked.options, *([] if run else ["--out", folder])]
        goes_on = command("figures", run or Path(first), *options)
        gaps.append(Gap("figures", f"stopped before these were drawn: {', '.join(names)}", goes_on))
    return gaps


@dataclass(frozen=True)
class _Environment:
    starts: list[Start]


def _starts(path: Path) -> list[Start]:
    if not path.exists():
        return []
    return read_checked(path, TypeAdapter(_Environment), "restore or delete it: a run needs none of it").starts


def _attack(path: Path) -> AttackResults | None:
    """Read what attacks have measured, or were asked to measure."""
    results = read_attacks(path) if path.exists() else None
    return results if results is not None and (results.episodes or results.asked) else None


def _progress(run: Run, logged: int) -> tuple[int, list[Gap]]:
    """Return how many outer steps are done, by the last checkpoint or else by the metrics, and what is wrong there."""
    planned, resume = run.config.training.iterations, f"metadropout train --resume {shlex.quote(str(run.folder))}"
    gaps = []
    try:
        path = run.latest()
    except CheckpointError as error:
        return logged, [Gap("checkpoint", str(error))]
    try:
        read_checkpoint(path)
    except CheckpointError as error:
        gaps.append(Gap("checkpoint", str(error)))
    if (done := iteration_of(path)) < planned:
        gaps.append(Gap("training", f"not finished: iteration {done} of {planned}", resume))
    return done, gaps


def _log_gaps(run: Run, starts: list[Start], metrics: Metrics) -> list[Gap]:
    gaps = []
    if not metrics.training:
        gaps.append(Gap("learning curves", "metrics.jsonl is missing or has no line of training"))
    if metrics.damaged:
        lines = "1 line is" if len(metrics.damaged) == 1 else f"{len(metrics.damaged)} lines are"
        reason = f"{lines} damaged in {run.metrics} and left out ({metrics.damaged[0]}); fix or delete them"
        gaps.append(Gap("learning curves", reason))
    if not starts:
        gaps.append(Gap("environment", "environment.json is missing or empty: versions and commands are not known"))
    others = {str(v) for start in starts if (v := start.versions.get("metadropout")) != metadropout.__version__}
    if others:
        reason = f"trained by metadropout {', '.join(sorted(others))}, reported by {metadropout.__version__}"
        gaps.append(Gap("version", f"{reason}: options may have had another meaning"))
    return gaps


def _test_gaps(run: Run, iteration: int, own: list[TestResult], others: list[TestResult]) -> list[Gap]:
    """Name tests that are missing, were stopped, or are older than the weights."""
    gaps = []
    last = [test.iteration for test in own if (test.split, test.state) == ("test", "last")]
    if not last:
        reason = "the last state has not been tested on unseen classes"
        gaps.append(Gap("evaluation", reason, command("evaluate", run.folder)))
    elif iteration not in last:
        reason = f"is of iteration {max(last)}, the run is at {iteration}"
        gaps.append(Gap("evaluation", reason, command("evaluate", run.folder)))
    for test in (*own, *others):
        if test.stopped():
            reason = f"stopped after {len(test.accuracies)} of {test.asked_episodes} episodes"
            gaps.append(Gap("evaluation", reason, command("evaluate", run.folder, *test.command_options(run))))
    return gaps


def _attack_gaps(run: Run, iteration: int, attack: AttackResults | None, folder: Path | None) -> list[Gap]:
    """Name attacks that are missing, were stopped, or are older than the weights."""
    if attack is None:
        options: list[object] = ["--episodes", 100, *(["--out", folder] if folder else [])]
        return [Gap("attacks", "the run has not been attacked", command("attack", run.folder, *options))]
    measured = attack.measured["iteration"]
    if attack.state == "last" and measured != iteration:
        reason = f"are of iteration {measured}, the run is at {iteration}; delete their file before attacking again"
        return [Gap("attacks", reason, line) for line in attack_commands(run, attack, folder)]
    if not attack.asked:
        reason = "an earlier version did not record how many were asked for; this command goes on or confirms that "
        return [Gap("attacks", f"{reason}all are there", line) for line in attack_commands(run, attack, folder)]
    left = attack.unfinished()
    if not left:
        return []
    done = [f"{attack.done(norm)} of {asked.episodes} episodes in the {norm} norm" for norm, asked in left.items()]
    return [
        Gap("attacks", f"stopped after {', '.join(done)}", line) for line in attack_commands(run, attack, folder, left)
    ]


def _as_uri(path: Path) -> tuple[str, int, int]:
    """Turn a picture into a data URI that is as small as it can be without loss, and return its size, too."""
    content = io.BytesIO()
    try:
        image = open_image(read_regular(path, MAX_PICTURE_BYTES))
        image.convert("RGB").save(content, "WEBP", lossless=True, method=4)
    except (OSError, ValueError, UnreadableError) as error:
        said = getattr(error, "strerror", None) or error
        raise RunFileError(f"{path}: cannot be shown: {said}; draw the figures again") from None
    return f"data:image/webp;base64,{base64.b64encode(content.getvalue()).decode()}", *image.size
