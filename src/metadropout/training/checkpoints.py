"""Checkpoints: plain tensors with a checksum, written whole or not at all, refused when anything is wrong with them."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from metadropout.errors import CheckpointError, TrainingError
from metadropout.files import write_atomically
from metadropout.learners import Learner

FORMAT = "metadropout-checkpoint"
VERSION = 1
KEPT = 2
"""How many of the latest checkpoints a run keeps; the older one is there in case the newer is damaged."""


@dataclass(frozen=True)
class Progress:
    """Where a run stands."""

    iteration: int
    """Outer steps done."""
    seconds: float
    """Time spent training so far."""
    best_accuracy: float | None = None
    """Validation accuracy of the best state so far."""
    best_iteration: int | None = None


def save_checkpoint(path: Path, learner: Learner, optimizer: torch.optim.Optimizer | None, progress: Progress) -> None:
    """Write a run's whole state to one safetensors file, atomically; without an optimiser only what testing needs.

    Raises:
        TrainingError: if the file cannot be written; an earlier file of that name is left as it was.
    """
    tensors = {f"learner.{name}": p.detach() for name, p in learner.named_parameters()}
    for name, parameter in learner.named_parameters():
        for key, value in (optimizer.state.get(parameter, {}) if optimizer is not None else {}).items():
            tensors[f"optimizer.{key}.{name}"] = value
    tensors = {name: t.cpu().contiguous() for name, t in tensors.items()}
    metadata = {"format": FORMAT, "version": str(VERSION), "progress": json.dumps(vars(progress))}
    metadata["sha256"] = _digest(tensors, metadata)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, safetensors.torch.save(tensors, metadata))
    except OSError as error:
        raise TrainingError(
            f"{path}: the checkpoint cannot be written: {error.strerror}; the one before it is kept. "
            f"Make room or mend the folder, then go on with: metadropout train --resume {path.parent.parent}"
        ) from None


def load_checkpoint(path: Path, learner: Learner, optimizer: torch.optim.Optimizer | None = None) -> Progress:
    """Read a checkpoint into a learner and, if given, its optimiser; check everything before changing either.

    Raises:
        CheckpointError: if the file is missing, damaged, foreign, or of another network.
    """
    tensors, metadata = read_checkpoint(path)
    parameters = dict(learner.named_parameters())
    stored = {name.removeprefix("learner."): t for name, t in tensors.items() if name.startswith("learner.")}
    if stored.keys() != parameters.keys():
        odd = sorted(stored.keys() ^ parameters.keys())
        raise CheckpointError(f"{path}: is of another model: '{odd[0]}' is in one but not in the other")
    for name, parameter in parameters.items():
        if stored[name].shape != parameter.shape:
            raise CheckpointError(
                f"{path}: is of another model: '{name}' has shape {tuple(stored[name].shape)}, "
                f"not {tuple(parameter.shape)}"
            )
    progress = Progress(**json.loads(metadata["progress"]))
    if optimizer is not None and progress.iteration > 0 and not any(n.startswith("optimizer.") for n in tensors):
        raise CheckpointError(f"{path}: was exported without the optimiser's state: it can be tested, not trained on")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(stored[name])
    if optimizer is not None:
        for name, parameter in parameters.items():
            optimizer.state[parameter] = {
                key.split(".")[1]: value.to(parameter.device if value.dim() else "cpu")
                for key, value in tensors.items()
                if re.fullmatch(rf"optimizer\.[a-z_]+\.{re.escape(name)}", key)
            }
    return progress


def read_checkpoint(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read a checkpoint's tensors and metadata, and verify its format and checksum."""
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: there is no such checkpoint") from None
    except (OSError, safetensors.SafetensorError, ValueError) as error:
        raise CheckpointError(f"{path}: is damaged or not a checkpoint ({error}){_fix(path)}") from None
    if metadata.get("format") != FORMAT:
        raise CheckpointError(f"{path}: was not written by metadropout")
    if metadata.get("version") != str(VERSION):
        raise CheckpointError(
            f"{path}: has checkpoint version {metadata.get('version')}, but this program reads version {VERSION}; "
            "use the metadropout version named in the run's environment.json"
        )
    if metadata.get("sha256") != _digest(tensors, metadata):
        raise CheckpointError(f"{path}: is damaged: its contents do not match their checksum{_fix(path)}")
    return tensors, metadata


def checkpoint_path(folder: Path, iteration: int) -> Path:
    """Return the name of the checkpoint after that many outer steps."""
    return folder / f"iteration-{iteration:08d}.safetensors"


def iteration_of(path: Path) -> int:
    """Return after how many outer steps a checkpoint was written, by its name."""
    return int(path.stem.rpartition("-")[2])


def latest_checkpoint(folder: Path) -> Path | None:
    """Return the newest checkpoint of a run, None where there is none."""
    return max(folder.glob("iteration-*.safetensors"), default=None)


def drop_old_checkpoints(folder: Path) -> None:
    """Delete all but the newest checkpoints."""
    for path in sorted(folder.glob("iteration-*.safetensors"))[:-KEPT]:
        path.unlink(missing_ok=True)


def _digest(tensors: dict[str, Tensor], metadata: dict[str, str]) -> str:
    digest = hashlib.sha256()
    for key in sorted(metadata.keys() - {"sha256"}):
        digest.update(f"{key}={metadata[key]};".encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)};".encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _fix(path: Path) -> str:
    others = [p for p in path.parent.glob("iteration-*.safetensors") if p.name < path.name]
    if not path.name.startswith("iteration-") or not others:
        return ""
    return f"; delete it to go on from {max(others).name}"
