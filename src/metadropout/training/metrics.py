"""Metrics of a run, as JSON lines and as TensorBoard events."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, FiniteFloat, TypeAdapter, ValidationError

from metadropout.errors import RunFileError, TrainingError, shortened
from metadropout.files import errors_naming, open_regular, read_regular, write_atomically
from metadropout.runs.reading import described, set_aside

MAX_BYTES = 64 * 2**20
"""Some 400,000 lines."""
_LONGEST = 2**16
"""Bytes at the end of a file in which its last lines are sure to lie."""

Fraction = Annotated[float, Field(ge=0, le=1)]
Iteration = Annotated[int, Field(ge=0, lt=10**8)]
Seconds = Annotated[FiniteFloat, Field(ge=0)]


@dataclass(frozen=True)
class TrainingLine:
    """The mean over some outer steps."""

    iteration: Iteration
    loss: FiniteFloat
    accuracy: Fraction
    seconds: Seconds | None = None
    """Time spent training by then."""
    tasks_per_second: Seconds | None = None


@dataclass(frozen=True)
class ValidationLine:
    """A validation."""

    iteration: Iteration
    accuracy: Fraction
    interval: Seconds


@dataclass(frozen=True)
class Metrics:
    """What a run's `metrics.jsonl` holds."""

    lines: list[dict[str, Any]]
    """Whole lines of known kinds, as they were written, in their order."""
    damaged: list[str]
    """Which lines are something else, and why; but for a last one that a crash has cut short."""

    @property
    def training(self) -> list[TrainingLine]:
        """The lines of training."""
        return [_KINDS["training"].validate_python(line) for line in self.lines if line["kind"] == "training"]

    @property
    def validation(self) -> list[ValidationLine]:
        """The lines of validations."""
        return [_KINDS["validation"].validate_python(line) for line in self.lines if line["kind"] == "validation"]


class MetricsLog:
    """Averages training metrics between flushes and writes them, validations at once.

    What a killed run wrote after its last checkpoint is dropped on resuming, because those iterations are done again.

    Args:
        folder: the run's folder.
        from_iteration: outer steps done so far; later lines are dropped.
    """

    def __init__(self, folder: Path, from_iteration: int) -> None:
        self.path = folder / "metrics.jsonl"
        kept = [line for line in _lines_to_keep(self.path) if line["iteration"] <= from_iteration]
        write_atomically(self.path, "".join(json.dumps(line) + "\n" for line in kept))
        self._file = self.path.open("a", encoding="utf-8")
        events = folder / "events"
        if events.exists() and not events.is_dir():
            set_aside(events)
        self._events = _event_writer(events, from_iteration + 1)
        self._pending: list[tuple[int, float, float, int, float]] = []
        self._seconds_before = max((line["seconds"] for line in kept if "seconds" in line), default=0.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # all lines are written but one that could not be, which has been reported
            self._file.close()
        if self._events is not None:
            with errors_naming(self.path.parent / "events"):
                self._events.close()

    def add_training(self, iteration: int, loss: float, accuracy: float, tasks: int, seconds: float) -> None:
        """Take note of one outer step."""
        self._pending.append((iteration, loss, accuracy, tasks, seconds))

    def flush(self) -> None:
        """Write the mean of what was noted since the last flush."""
        if not self._pending:
            return
        iterations, losses, accuracies, tasks, seconds = zip(*self._pending, strict=True)
        n, elapsed = len(iterations), seconds[-1] - self._seconds_before
        self._write(
            {
                "kind": "training",
                "iteration": iterations[-1],
                "loss": sum(losses) / n,
                "accuracy": sum(accuracies) / n,
                "tasks_per_second": round(sum(tasks) / elapsed, 3) if elapsed > 0 else None,
                "seconds": round(seconds[-1], 3),
            }
        )
        self._seconds_before = seconds[-1]
        self._pending.clear()

    def add_validation(self, iteration: int, accuracy: float, interval: float) -> None:
        """Write the result of a validation."""
        self._write({"kind": "validation", "iteration": iteration, "accuracy": accuracy, "interval": interval})

    def add_noise(self, iteration: int, strengths: Mapping[str, float]) -> None:
        """Write how strong the noise on each layer is; nothing where there is none."""
        if strengths:
            rounded = {name: float(f"{value:.4g}") for name, value in strengths.items()}
            self._write({"kind": "noise", "iteration": iteration, **rounded})

    def _write(self, line: dict[str, Any]) -> None:
        try:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
        except OSError as error:
            raise TrainingError(
                f"{self.path}: cannot be written: {error.strerror}; the last checkpoint is kept. Make room, then resume"
            ) from None
        if self._events is not None:
            for name, value in line.items():
                if name not in ("kind", "iteration") and value is not None:
                    with errors_naming(self.path.parent / "events"):
                        self._events.add_scalar(f"{line['kind']}/{name}", value, line["iteration"])


def load_metrics(path: Path) -> Metrics:
    """Read a run's metrics; lines that are damaged are left out and named. Nothing where there is no file.

    Raises:
        RunFileError: if it cannot be read at all.
    """
    try:
        content = read_regular(path, MAX_BYTES)
    except FileNotFoundError:
        return Metrics([], [])
    except OSError as error:
        raise RunFileError(f"{path}: cannot be read: {error.strerror}; delete or rename it: a run needs none") from None
    whole, _, _ = content.rpartition(b"\n")  # what follows the last line's end was cut short by a crash
    return _parse(whole.decode("utf-8", errors="replace").split("\n") if whole else [])


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read the lines of a run's metrics that are whole; see `load_metrics`."""
    return load_metrics(path).lines


def newest_iteration(path: Path) -> int:
    """Return the iteration of the last whole line of a run's metrics, 0 if there is none; quick for long files, too."""
    try:
        with open_regular(path, MAX_BYTES) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _LONGEST))
            texts = file.read(_LONGEST).decode("utf-8", errors="replace").split("\n")
    except OSError:
        return 0
    return max((line["iteration"] for line in _parse(texts[:-1]).lines), default=0)


def _lines_to_keep(path: Path) -> list[dict[str, Any]]:
    """Return the lines with which a log goes on; a damaged file is kept beside it, as a run needs none to go on."""
    try:
        metrics = load_metrics(path)
    except RunFileError:
        metrics = Metrics([], ["all"])
    if metrics.damaged:
        set_aside(path)
    return metrics.lines


def _parse(texts: Iterable[str]) -> Metrics:
    lines, damaged = [], []
    for number, text in enumerate(texts, start=1):
        try:
            lines.append(_line(text))
        except ValidationError as error:
            damaged.append(f"line {number}: {described(error)}")
    return Metrics(lines, damaged)


@dataclass(frozen=True)
class _AnyLine:
    kind: Literal["training", "validation", "noise"]
    iteration: Iteration


def _line(text: str) -> dict[str, Any]:
    """Read a line and check it: its numbers are numbers then."""
    kind = _KINDS[_ANY.validate_json(text, strict=True).kind]
    kind.validate_json(text, strict=True)
    line: dict[str, Any] = json.loads(text)
    return line


def _numbers_only(line: dict[str, float | str]) -> dict[str, float | str]:
    if odd := [name for name, value in line.items() if isinstance(value, str) and name != "kind"]:
        raise ValueError(f"{shortened(odd[0])} must be a number")
    return line


_ANY = TypeAdapter(_AnyLine)
_KINDS: dict[str, TypeAdapter[Any]] = {
    "training": TypeAdapter(TrainingLine),
    "validation": TypeAdapter(ValidationLine),
    "noise": TypeAdapter(Annotated[dict[str, FiniteFloat | Literal["noise"]], AfterValidator(_numbers_only)]),
}


def _event_writer(folder: Path, first_iteration: int) -> Any:
    """Open TensorBoard's event file, or return None where TensorBoard is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 (optional)
    except ImportError:
        return None
    return SummaryWriter(str(folder), purge_step=first_iteration)
