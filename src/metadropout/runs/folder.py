"""A run's folder: what is in it, and how to make, claim and open one."""

from __future__ import annotations

import json
import platform
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import yaml
from pydantic import TypeAdapter

from metadropout.config import MAY_CHANGE, Config, as_text, load_config
from metadropout.data import Identity
from metadropout.data.class_lists import listed
from metadropout.data.locks import exclusive
from metadropout.errors import CheckpointError, ConfigError, DataError, MetadropoutError, RunFileError
from metadropout.files import write_atomically
from metadropout.runs.reading import read_checked, set_aside
from metadropout.training.checkpoints import (
    DATA,
    checkpoint_path,
    checkpoints_in,
    data_of,
    iteration_of,
    latest_checkpoint,
)

CONTENTS = """\
# {title}

{description}

| file | what it is |
|---|---|
| `config.yaml` | every option of this run, defaults included |
| `data.json` | the classes of each split, and a digest of their images |
| `environment.json` | versions, machine and command of each start |
| `metrics.jsonl` | loss, accuracy and speed over time, one JSON object per line |
| `events/` | the same for TensorBoard: `tensorboard --logdir .` |
| `curves.png` | the learning curves |
| `checkpoints/` | the latest states, and the best one by validation where there are validation classes |
| `evaluation-*.json` | accuracies on unseen classes, episode by episode |

    {resume}      # go on where it stopped
    {evaluate}            # accuracy on unseen classes
"""

BEFORE_THERE_WAS_A_CHOICE = {"training": {"noise": "generator", "convolutions": {}}}
"""What a run's configuration means that does not say how noise and convolutions are computed."""

IDENTITY_FIX = "restore it, or delete it if the data set has not changed since the run began"

HARMLESS = {"README.md", "data.json", "environment.json", ".lock", "checkpoints"}
"""What a start that was killed before its `config.yaml` was there leaves behind."""


@dataclass(frozen=True)
class _Identity(Identity):
    """As it stands in a file, which may lack something."""

    def __post_init__(self) -> None:
        if self.classes.keys() != {"train", "validation", "test"}:
            raise ValueError("classes must be those of train, validation and test")
        if self.images and {part: len(names) for part, names in self.classes.items()} != {
            part: len(digests) for part, digests in self.images.items()
        }:
            raise ValueError("images must have a digest for each class")


@dataclass(frozen=True)
class Run:
    """A run's folder and its configuration."""

    folder: Path
    config: Config

    @property
    def resume_call(self) -> str:
        """What goes on with this run: a command, or for parts of a Python program a call there."""
        if self.config.custom_parts():
            return f'md.fit(learner, splits, "{self.folder}", ...), with the same learner, images and options'
        return f"metadropout train --resume {self.folder}"

    @property
    def evaluate_call(self) -> str:
        """What tests this run on unseen classes: a command, or for parts of a Python program a call there."""
        if self.config.custom_parts():
            return f'md.evaluate(md.load_run("{self.folder}", learner=learner).learner, splits.test, ...)'
        return f"metadropout evaluate {self.folder}"

    @property
    def checkpoints(self) -> Path:
        """Where the states are kept."""
        return self.folder / "checkpoints"

    @property
    def metrics(self) -> Path:
        """Loss, accuracy and speed over time, as JSON lines."""
        return self.folder / "metrics.jsonl"

    @property
    def data(self) -> Path:
        """Which classes the run was trained and is tested on."""
        return self.folder / "data.json"

    def fingerprint(self, identity: Identity | None) -> dict[str, Any]:
        """Return what a checkpoint of this run says of itself, so that it is not taken for another run's.

        Args:
            identity: of the run's data set; None where it is not known.
        """
        data = {} if identity is None else {DATA: identity.digest}
        return {**self.config.computed_options(), **data}

    def latest(self) -> Path:
        """Return the newest checkpoint."""
        path = latest_checkpoint(self.checkpoints)
        if path is None:
            raise CheckpointError(
                f"{self.checkpoints}: there is no checkpoint: they have been deleted or moved. Put them back, or start "
                "again in another folder"
            )
        return path

    def state(self, which: str) -> Path:
        """Return the checkpoint that is called "last" or "best", or the one after a number of iterations, as a text."""
        if which == "last":
            return self.latest()
        if which.isdecimal():
            path, there = checkpoint_path(self.checkpoints, int(which)), checkpoints_in(self.checkpoints)
            if path not in there:
                known = listed((str(iteration_of(each)) for each in there), 8) or "none"
                raise CheckpointError(
                    f"{path}: is not there; this run has the states after these iterations: {known}. "
                    "--training.checkpoint_keep N keeps one every N iterations"
                )
            return path
        best = self.checkpoints / "best.safetensors"
        if not best.exists():
            raise CheckpointError(
                f"{best}: this run has kept no best state (it had no validation classes, or no validation yet); "
                "use --state last"
            )
        return best

    def states(self) -> list[str]:
        """Return the names of all states that are there in order, the last one's as "last"."""
        return [*(str(iteration_of(path)) for path in checkpoints_in(self.checkpoints)[:-1]), "last"]

    def identity(self) -> Identity | None:
        """Return what identifies the data that the run was trained on; None where that was not recorded."""
        if not self.data.exists():
            return None
        return read_checked(self.data, TypeAdapter(_Identity), IDENTITY_FIX)

    def check_data(self, now: Identity) -> None:
        """Refuse a data set that is not the one with which the run began."""
        before = self.identity()
        if before is None:
            self._check_digest(now)
        elif changes := before.changes(now):
            raise DataError(
                f"{self.folder}: the data set is not the one that this run began with: {'; '.join(changes)}. Bring the "
                "data set back as it was (data.json lists its classes), or start a new run"
            )

    def _check_digest(self, now: Identity) -> None:
        """Refuse another data set by what the newest checkpoint says of its own, where there is no `data.json`."""
        try:
            told = data_of(self.latest())
        except CheckpointError:
            return  # which says more of it when it is loaded
        if told is not None and told != now.digest:
            raise DataError(
                f"{self.folder}: the data set is not the one that this run began with, and data.json, which would tell "
                "what is different, is missing. Bring both back as they were, or start a new run"
            )

    def check_tested_data(self, config: Config, now: Identity, split: str) -> None:
        """Refuse to test on classes that the run was trained on, and say where the data set is another one.

        Args:
            config: of the test; its data set may be another than the run's.
            now: what identifies that data set.
            split: which of its classes are tested on.
        """
        before, same_kind = self.identity(), config.data["name"] == self.config.data["name"]
        if before is None and same_kind:
            self._check_digest(now)
        if before is None or not (changes := before.changes(now)):
            return
        overlap = before.trained_on(now, split) if split != "train" else {}
        if overlap and same_kind:
            name, trained = min(overlap.items())
            shown = f"'{name}'" if name == trained else f"'{name}', there called '{trained}'"
            raise DataError(
                f"{self.folder}: {len(overlap)} of the {split} classes are classes that this run was trained on, "
                f"such as {shown}, because the data set has changed: {'; '.join(changes)}. Bring it back as "
                "it was (data.json lists its classes), or name the test classes"
            )
        print(f"{self.folder.name}: is tested on another data set than its own: {'; '.join(changes)}", file=sys.stderr)


@contextmanager
def claimed(folder: Path, patience: float = 0.0) -> Iterator[None]:
    """Hold a run's folder for one process: to start it, or to go on with it.

    Args:
        folder: the run's folder.
        patience: seconds to wait for another process that holds it, and is about to end.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder}: the run's folder cannot be made: {error.strerror}") from None
    end = time.monotonic() + patience
    with ExitStack() as stack:
        while True:
            try:
                stack.enter_context(exclusive(folder / ".lock", wait=False))
                break
            except BlockingIOError:
                if time.monotonic() >= end:
                    said = f"{folder}: another process is training this run; stop it first"
                    raise MetadropoutError(said) from None
                time.sleep(0.2)
        yield


def check_free(folder: Path) -> None:
    """Refuse a folder for a new run that holds one already, or something else."""
    if (folder / "config.yaml").exists():
        raise ConfigError(
            f"{folder}: holds a run already; go on with 'metadropout train --resume {folder}' or choose another --out"
        )
    if folder.exists() and (not folder.is_dir() or {path.name for path in folder.iterdir()} - HARMLESS):
        raise ConfigError(f"{folder}: is there already and is not an empty folder; choose another --out")


def describe_run(run: Run, identity: Identity) -> None:
    """Write the files that say what a run is; its `config.yaml`, which makes it one, comes last."""
    text = CONTENTS.format(
        title=run.folder.name,
        description=run.config.description,
        resume=run.resume_call,
        evaluate=run.evaluate_call,
    )
    write_atomically(run.folder / "README.md", text)
    write_identity(run, identity)
    write_config(run.folder, run.config)


def write_identity(run: Run, identity: Identity) -> None:
    """Write a run's `data.json`: what identifies its data set."""
    write_atomically(run.data, json.dumps(vars(identity)) + "\n")


def open_run(folder: Path) -> Run:
    """Open a run's folder and check its configuration."""
    if not (folder / "config.yaml").is_file():
        raise ConfigError(f"{folder}: is not a run's folder: it has no config.yaml")
    try:
        # Runs of versions that had no choice in these go on as they began.
        return Run(folder, load_config(folder / "config.yaml", defaults=BEFORE_THERE_WAS_A_CHOICE))
    except ConfigError as error:
        raise ConfigError(
            f"{error}; correct it in that file, or if another version of metadropout wrote this run, use the one "
            "that its environment.json names"
        ) from None


def check_same_run(run: Run, config: Config) -> None:
    """Refuse a configuration that cannot go on with a run, and say in what it differs."""
    found, wanted = run.config.options(), config.options()
    for name in sorted(found.keys() | wanted.keys()):
        if found.get(name) != wanted.get(name) and not name.startswith(MAY_CHANGE):
            raise ConfigError(
                f"{run.folder}: holds a run with {name} {as_text(found.get(name))}, not {as_text(wanted.get(name))}; "
                "choose another folder, or give the run's own options"
            )
    before, now = run.config.training, config.training
    if before.schedule in ("linear", "cosine") and before.iterations != now.iterations:
        raise ConfigError(
            f"training.iterations cannot change from {before.iterations} to {now.iterations}: the rate's "
            f"{before.schedule} schedule depends on it, so it would be another run"
        )
    latest = latest_checkpoint(run.checkpoints)
    if latest is not None and now.iterations < (done := iteration_of(latest)):
        raise ConfigError(f"training.iterations is {now.iterations}, but {done} are done already")


def write_config(folder: Path, config: Config) -> None:
    """Write a run's `config.yaml`."""
    write_atomically(folder / "config.yaml", yaml.safe_dump(config.to_dict(), sort_keys=False, allow_unicode=True))


def add_start(folder: Path, *, processes: int, threads: int) -> None:
    """Add to `environment.json` with which versions, machine and command the run starts or goes on.

    A damaged file is kept beside the new one, because a run needs none of it to go on.

    Args:
        folder: the run's folder.
        processes: how many train it together.
        threads: of each of them.
    """
    path = folder / "environment.json"
    starts: list[dict[str, Any]] = []
    if path.exists():
        try:
            starts = read_checked(path, TypeAdapter(_Starts), "").starts
        except RunFileError:
            set_aside(path)
    start = {**environment(), "processes": processes, "threads": threads}
    write_atomically(path, json.dumps({"starts": [*starts, start]}, indent=1) + "\n")


@dataclass(frozen=True)
class _Starts:
    starts: list[dict[str, Any]]


def environment() -> dict[str, Any]:
    """Describe versions, machine and command."""
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
