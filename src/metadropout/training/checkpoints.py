"""Checkpoints: plain tensors with a checksum, written atomically, refused when anything is wrong with them."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import safetensors
import safetensors.torch
import torch
from pydantic import Field, FiniteFloat, TypeAdapter, ValidationError
from torch import Tensor

from metadropout.errors import CheckpointError, TrainingError
from metadropout.files import check_regular, write_atomically
from metadropout.learners import Learner

FORMAT = "metadropout-checkpoint"
VERSION = 1
MAX_BYTES = 16 * 2**30
KEPT = 2
"""How many of the latest checkpoints a run keeps; the older one is there in case the newer is damaged."""

DATA = "the data set's digest"
"""What tells a run's data set, among what a checkpoint says of its run."""

_NAME = re.compile(r"iteration-([0-9]{8})\.safetensors")


@dataclass(frozen=True)
class Progress:
    """Where a run stands."""

    iteration: Annotated[int, Field(ge=0, lt=10**8)]
    """Outer steps done."""
    seconds: Annotated[FiniteFloat, Field(ge=0)]
    """Time spent training so far."""
    best_accuracy: Annotated[float, Field(ge=0, le=1)] | None = None
    """Validation accuracy of the best state so far."""
    best_iteration: Annotated[int, Field(ge=0)] | None = None


def save_checkpoint(
    path: Path,
    learner: Learner,
    optimizer: torch.optim.Optimizer | None,
    progress: Progress,
    run: Mapping[str, Any] | None = None,
) -> None:
    """Write a run's whole state to one safetensors file, atomically; without an optimiser only what testing needs.

    Args:
        path: the file.
        learner: whose parameters and buffers are saved.
        optimizer: whose state is saved, too.
        progress: where the run stands.
        run: what the run computes, by name, so that the file cannot be taken for another run's.

    Raises:
        TrainingError: if the file cannot be written, or the state is not worth keeping because a number in it is not
            finite; an earlier file of that name is left as it was.
    """
    tensors = {f"learner.{name}": p.detach() for name, p in learner.named_parameters()}
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise TrainingError(
                f"'{name.removeprefix('learner.')}' is not finite after iteration {progress.iteration}: lower "
                "training.meta_lr. This state is not saved; the checkpoint before it is kept"
            )
    tensors |= {f"buffer.{name}": b.detach() for name, b in learner.state_dict().items() if name in _buffers(learner)}
    for name, parameter in learner.named_parameters():
        for key, value in (optimizer.state.get(parameter, {}) if optimizer is not None else {}).items():
            if value is not None:  # as for a momentum that is not used
                tensors[f"optimizer.{key}.{name}"] = value
    tensors = {name: t.cpu().contiguous() for name, t in tensors.items()}
    metadata = {"format": FORMAT, "version": str(VERSION), "progress": json.dumps(vars(progress))}
    if run is not None:
        metadata["run"] = json.dumps(dict(run))
    metadata["sha256"] = tensors_digest(tensors, metadata)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, safetensors.torch.save(tensors, metadata))
    except OSError as error:
        raise TrainingError(
            f"{path}: the checkpoint cannot be written: {error.strerror}; the one before it is kept. "
            f"Make room or fix the folder, then go on with: metadropout train --resume {path.parent.parent}"
        ) from None


def load_checkpoint(
    path: Path,
    learner: Learner,
    optimizer: torch.optim.Optimizer | None = None,
    run: Mapping[str, Any] | None = None,
) -> Progress:
    """Read a checkpoint into a learner and, if given, its optimiser; check everything before changing either.

    Args:
        path: the file.
        learner: gets the parameters and buffers.
        optimizer: gets its state.
        run: what the run computes that the checkpoint has to belong to; what the file does not name is not compared.

    Raises:
        CheckpointError: if the file is missing, damaged, or of another program, network or run.
    """
    tensors, metadata = read_checkpoint(path)
    _check_run(path, metadata, run or {})
    parameters = dict(learner.named_parameters())
    stored = _part(tensors, "learner.")
    if stored.keys() != parameters.keys():
        odd = sorted(stored.keys() ^ parameters.keys())
        raise CheckpointError(f"{path}: is of another model: '{odd[0]}' is in one but not in the other")
    buffers = {name: b for name, b in learner.named_buffers() if name in _part(tensors, "buffer.")}
    for name, own in {**parameters, **buffers}.items():
        check_tensor(path, name, stored[name] if name in stored else tensors[f"buffer.{name}"], own)
    states = {name: _optimizer_state(tensors, name) for name in parameters} if optimizer is not None else {}
    progress = progress_of(path, metadata)
    if _NAME.fullmatch(path.name) and iteration_of(path) != progress.iteration:
        raise CheckpointError(
            f"{path}: is the state after {progress.iteration} iterations, and not what its name says; give it its own "
            f"name, {checkpoint_path(path.parent, progress.iteration).name}, or delete it"
        )
    if progress.iteration and optimizer is not None and not any(states.values()):
        sgd = isinstance(optimizer, torch.optim.SGD)  # has no state without momentum
        if not sgd:
            raise CheckpointError(
                f"{path}: was exported without the optimiser's state: it can be tested, not trained on"
            )
    for name, state in states.items():
        _check_state(path, name, state, parameters[name], optimizer)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(stored[name])
        for name, buffer in buffers.items():
            buffer.copy_(tensors[f"buffer.{name}"])
    if optimizer is not None:
        for name, parameter in parameters.items():
            optimizer.state[parameter] = {
                key: value.to(parameter.device if value.dim() else "cpu") for key, value in states[name].items()
            }
    return progress


def read_checkpoint(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read a checkpoint's tensors and metadata, and verify its format and checksum."""
    try:
        check_regular(path, MAX_BYTES)
        with safetensors.safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: there is no such checkpoint") from None
    except (OSError, safetensors.SafetensorError, ValueError) as error:
        raise CheckpointError(
            f"{path}: is damaged or not a checkpoint ({getattr(error, 'strerror', None) or error}){_fix(path)}"
        ) from None
    if metadata.get("format") != FORMAT:
        raise CheckpointError(f"{path}: was not written by metadropout")
    if metadata.get("version") != str(VERSION):
        raise CheckpointError(
            f"{path}: has checkpoint version {metadata.get('version')}, but this program reads version {VERSION}; "
            "use the metadropout version named in the run's environment.json"
        )
    if metadata.get("sha256") != tensors_digest(tensors, metadata):
        raise CheckpointError(f"{path}: is damaged: its contents do not match their checksum{_fix(path)}")
    return tensors, metadata


def data_of(path: Path) -> str | None:
    """Return the digest of the data set that a checkpoint's run was trained on; None where it does not say."""
    _, metadata = read_checkpoint(path)
    return _told_of_run(path, metadata).get(DATA)


def weights_digest(learner: Learner) -> str:
    """Return a short digest of a learner's parameters and buffers: equal for equal weights, wherever they lie."""
    tensors = {name: t.detach().cpu() for name, t in learner.state_dict().items()}
    return tensors_digest(tensors, {})[:16]


def progress_of(path: Path, metadata: Mapping[str, str]) -> Progress:
    """Read from a checkpoint's metadata where its run stood."""
    try:
        return TypeAdapter(Progress).validate_json(metadata.get("progress", ""))
    except ValidationError:
        raise CheckpointError(f"{path}: does not say where its run stood{_fix(path)}") from None


def checkpoint_path(folder: Path, iteration: int) -> Path:
    """Return the name of the checkpoint after that many outer steps."""
    return folder / f"iteration-{iteration:08d}.safetensors"


def iteration_of(path: Path) -> int:
    """Return after how many outer steps a checkpoint was written, by its name."""
    return int(path.stem.rpartition("-")[2])


def checkpoints_in(folder: Path) -> list[Path]:
    """List the checkpoints of a run, oldest first; folders and files of other names do not count."""
    found = (path for path in folder.glob("iteration-*.safetensors") if _NAME.fullmatch(path.name))
    return sorted(path for path in found if not path.is_dir())


def latest_checkpoint(folder: Path) -> Path | None:
    """Return the newest checkpoint of a run, None where there is none."""
    return max(checkpoints_in(folder), default=None)


def drop_old_checkpoints(folder: Path, keep_every: int = 0) -> None:
    """Delete all but the newest checkpoints; what only has the name of one is left alone.

    Args:
        folder: where they are.
        keep_every: those after each that many outer steps are kept for good; 0 for none of them.
    """
    for path in [path for path in checkpoints_in(folder) if path.is_file()][:-KEPT]:
        if not is_kept(iteration_of(path), keep_every):
            path.unlink(missing_ok=True)


def is_kept(iteration: int, keep_every: int) -> bool:
    """Say whether the checkpoint after that many outer steps is kept for good."""
    return keep_every > 0 and iteration > 0 and iteration % keep_every == 0


def _buffers(learner: Learner) -> set[str]:
    return {name for name, _ in learner.named_buffers()}


def _part(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}


def _optimizer_state(tensors: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    pattern = re.compile(rf"optimizer\.([a-z_]+)\.{re.escape(name)}")
    return {match[1]: value for key, value in tensors.items() if (match := pattern.fullmatch(key))}


def check_tensor(path: Path, name: str, stored: Tensor, own: Tensor) -> None:
    """Refuse a stored tensor that cannot take the place of a learner's own."""
    if stored.shape != own.shape:
        raise CheckpointError(
            f"{path}: is of another model: '{name}' has shape {tuple(stored.shape)}, not {tuple(own.shape)}"
        )
    if stored.dtype.is_floating_point != own.dtype.is_floating_point or stored.dtype.is_complex:
        raise CheckpointError(f"{path}: '{name}' holds {stored.dtype} numbers, not {own.dtype}{_fix(path)}")
    if stored.dtype.is_floating_point and not stored.isfinite().all():
        raise CheckpointError(f"{path}: '{name}' has values that are not finite numbers{_fix(path)}")


def _check_state(
    path: Path, name: str, state: Mapping[str, Tensor], own: Tensor, optimizer: torch.optim.Optimizer | None
) -> None:
    """Refuse a parameter's state with which the optimiser could not go on as it would have."""
    adam = isinstance(optimizer, torch.optim.Adam)
    known = {"step", "exp_avg", "exp_avg_sq"} if adam else {"momentum_buffer"}
    if state and state.keys() != known and (adam or not state.keys() <= known):
        odd = sorted(state.keys() ^ known)[0]
        raise CheckpointError(f"{path}: the optimiser's {odd} of '{name}' is missing or not its own{_fix(path)}")
    for key, value in state.items():
        if value.shape != (() if key == "step" else own.shape):
            raise CheckpointError(f"{path}: the optimiser's {key} of '{name}' has shape {tuple(value.shape)}")
        kind = torch.float32 if key == "step" else own.dtype
        if value.dtype != kind or not value.isfinite().all() or (key in ("step", "exp_avg_sq") and value.min() < 0):
            raise CheckpointError(
                f"{path}: the optimiser's {key} of '{name}' has values that it cannot have{_fix(path)}"
            )


def _told_of_run(path: Path, metadata: Mapping[str, str]) -> dict[str, Any]:
    try:
        stored = json.loads(metadata.get("run", "{}"))
    except (ValueError, RecursionError):
        stored = None
    if not isinstance(stored, dict):
        raise CheckpointError(f"{path}: does not say which run it belongs to{_fix(path)}")
    return stored


def _check_run(path: Path, metadata: Mapping[str, str], run: Mapping[str, Any]) -> None:
    stored = _told_of_run(path, metadata)
    wanted = json.loads(json.dumps(dict(run)))
    for name in stored.keys() & wanted.keys():
        if stored[name] != wanted[name]:
            raise CheckpointError(
                f"{path}: belongs to another run: there {name} is {_shown(stored[name])}, here it is "
                f"{_shown(wanted[name])}; put this run's own checkpoint in its place, or delete it"
            )


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def tensors_digest(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    """Return a checksum of tensors, with their names and types, and of what is said of them."""
    digest = hashlib.sha256()
    for key in sorted(metadata.keys() - {"sha256"}):
        digest.update(f"{key}={metadata[key]};".encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)};".encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _fix(path: Path) -> str:
    others = [p for p in checkpoints_in(path.parent) if p.name < path.name]
    if not path.name.startswith("iteration-") or not others:
        return ""
    return f"; delete it to go on from {max(others).name}"
