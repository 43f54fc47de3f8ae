"""Metrics of a run, as JSON lines and as TensorBoard events."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from metadropout.errors import TrainingError
from metadropout.files import errors_naming, write_atomically

_LONGEST = 2**16
"""Bytes at the end of a file in which its last lines are sure to lie."""


class MetricsLog:
    """Averages training metrics between flushes and writes them, validations at once.

    What a killed run wrote after its last checkpoint is dropped on resuming, because those iterations are done again.

    Args:
        folder: the run's folder.
        from_iteration: outer steps done so far; later lines are dropped.
    """

    def __init__(self, folder: Path, from_iteration: int) -> None:
        self.path = folder / "metrics.jsonl"
        kept = [line for line in read_metrics(self.path) if line["iteration"] <= from_iteration]
        write_atomically(self.path, "".join(json.dumps(line) + "\n" for line in kept))
        self._file = self.path.open("a", encoding="utf-8")
        self._events = _event_writer(folder / "events", from_iteration + 1)
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


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read a run's metrics; what is not a line of metrics, such as one that a crash cut short, is left out."""
    return list(_lines_of(path.read_text(encoding="utf-8", errors="replace").splitlines())) if path.exists() else []


def newest_iteration(path: Path) -> int:
    """Return the iteration of the last whole line of a run's metrics, 0 if there is none; quick for long files, too."""
    if not path.exists():
        return 0
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _LONGEST))
        texts = file.read().decode("utf-8", errors="replace").splitlines()
    return max((line["iteration"] for line in _lines_of(texts)), default=0)


def _lines_of(texts: Iterable[str]) -> Iterator[dict[str, Any]]:
    for text in texts:
        with suppress(json.JSONDecodeError):
            if isinstance(line := json.loads(text), dict) and {"kind", "iteration"} <= line.keys():
                yield line


def _event_writer(folder: Path, first_iteration: int) -> Any:
    """Open TensorBoard's event file, or return None where TensorBoard is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 (optional)
    except ImportError:
        return None
    return SummaryWriter(str(folder), purge_step=first_iteration)
