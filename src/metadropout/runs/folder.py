"""A run's folder: what is in it, and how to make and open one."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import yaml

from metadropout.config import Config, load_config
from metadropout.data.locks import exclusive
from metadropout.errors import CheckpointError, ConfigError, MetadropoutError
from metadropout.files import write_atomically
from metadropout.training.checkpoints import latest_checkpoint

CONTENTS = """\
# {title}

{description}

| file | what it is |
|---|---|
| `config.yaml` | every option of this run, defaults included |
| `environment.json` | versions, machine and command of each start |
| `metrics.jsonl` | loss, accuracy and speed over time, one JSON object per line |
| `events/` | the same for TensorBoard: `tensorboard --logdir .` |
| `curves.png` | the learning curves |
| `checkpoints/` | the latest states, and the best one by validation where there are validation classes |
| `evaluation-*.json` | accuracies on unseen classes, episode by episode |

    metadropout train --resume {folder}      # go on where it stopped
    metadropout evaluate {folder}            # accuracy on unseen classes
"""


@dataclass(frozen=True)
class Run:
    """A run's folder and its configuration."""

    folder: Path
    config: Config

    @property
    def checkpoints(self) -> Path:
        """Where the states are kept."""
        return self.folder / "checkpoints"

    @property
    def metrics(self) -> Path:
        """Loss, accuracy and speed over time, as JSON lines."""
        return self.folder / "metrics.jsonl"

    def latest(self) -> Path:
        """Return the newest checkpoint."""
        path = latest_checkpoint(self.checkpoints)
        if path is None:
            raise CheckpointError(f"{self.checkpoints}: there is no checkpoint yet; train the run first")
        return path

    def state(self, which: str) -> Path:
        """Return the checkpoint that is called "last" or "best"."""
        if which == "last":
            return self.latest()
        best = self.checkpoints / "best.safetensors"
        if not best.exists():
            raise CheckpointError(
                f"{best}: this run has kept no best state (it had no validation classes, or no validation yet); "
                "use --state last"
            )
        return best


def create_run(folder: Path, config: Config) -> Run:
    """Make a run's folder, with its configuration and environment in it."""
    if (folder / "config.yaml").exists():
        raise ConfigError(
            f"{folder}: holds a run already; go on with 'metadropout train --resume {folder}' or choose another --out"
        )
    # What a start that was killed at once leaves behind does not count.
    harmless = {"environment.json", "README.md", ".lock"}
    if folder.exists() and (not folder.is_dir() or {path.name for path in folder.iterdir()} - harmless):
        raise ConfigError(f"{folder}: is there already and is not an empty folder; choose another --out")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        text = CONTENTS.format(title=folder.name, description=config.description, folder=folder)
        write_atomically(folder / "README.md", text)
        write_config(folder, config)
    except OSError as error:
        raise ConfigError(f"{folder}: the run's folder cannot be written: {error.strerror}") from None
    return Run(folder, config)


def open_run(folder: Path) -> Run:
    """Open a run's folder and check its configuration."""
    if not (folder / "config.yaml").is_file():
        raise ConfigError(f"{folder}: is not a run's folder: it has no config.yaml")
    try:
        return Run(folder, load_config(folder / "config.yaml"))
    except ConfigError as error:
        raise ConfigError(
            f"{error}; if another version of metadropout wrote this run, use the one that its environment.json names"
        ) from None


def write_config(folder: Path, config: Config) -> None:
    """Write a run's `config.yaml`."""
    write_atomically(folder / "config.yaml", yaml.safe_dump(config.to_dict(), sort_keys=False, allow_unicode=True))


@contextmanager
def locked(run: Run) -> Iterator[None]:
    """Keep a second process from training the same run at the same time."""
    try:
        with exclusive(run.folder / ".lock", wait=False):
            yield
    except BlockingIOError:
        raise MetadropoutError(f"{run.folder}: another process is training this run; stop it first") from None


def record_start(folder: Path, *, processes: int, threads: int) -> None:
    """Add to `environment.json` with which versions, machine and command the run starts or goes on.

    Args:
        folder: the run's folder.
        processes: how many train it together.
        threads: of each of them.
    """
    path = folder / "environment.json"
    starts = json.loads(path.read_text(encoding="utf-8"))["starts"] if path.exists() else []
    start = {**environment(), "processes": processes, "threads": threads}
    write_atomically(path, json.dumps({"starts": [*starts, start]}, indent=1) + "\n")


def environment() -> dict[str, Any]:
    """Describe versions, machine and command, for the record."""
    packages = ("metadropout", "torch", "numpy", "Pillow", "safetensors", "pydantic", "matplotlib", "tensorboard")
    return {
        "command": " ".join(["metadropout", *sys.argv[1:]]),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "versions": {name: _version(name) for name in packages},
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
