"""A run's configuration: one section per axis, each checked against the part that it names."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import FiniteFloat
from torch import nn

from metadropout.data import DATASETS, ImageShape
from metadropout.errors import ConfigError, shortened
from metadropout.learners import LEARNERS, Learner
from metadropout.networks import NETWORKS
from metadropout.noise import NoiseName, mix_seed
from metadropout.options import (
    Episodes,
    Iterations,
    Limits,
    Samples,
    Seed,
    Share,
    Shot,
    Threads,
    Way,
    check_options,
    check_value,
    options_of,
)
from metadropout.perturbations import PERTURBATIONS
from metadropout.registry import title_of
from metadropout.safe_yaml import read_yaml

AXES: dict[str, Mapping[str, Callable[..., Any]]] = {
    "data": DATASETS,
    "network": NETWORKS,
    "perturbation": PERTURBATIONS,
    "learner": LEARNERS,
}
"""The sections that name a part, and the parts they can name."""

DEFAULT_PARTS = {"data": "glyphs", "network": "conv4", "perturbation": "metadropout", "learner": "maml"}

CUSTOM = "custom"
"""Name of a part that is an object of a Python program and not a part of a recipe."""

FROM_DATA = {"network": ("in_channels", "image_size")}
"""Options that follow from the data set, so that nobody has to repeat them."""


@dataclass(frozen=True, kw_only=True)
class EpisodeOptions:
    """The shape of a task.

    Args:
        way: classes in a task.
        shot: support images per class.
        query: query images per class.
        protocol: how query images are normalised: together, with the statistics of their batch ("transductive", as
            MAML and the paper do), or one by one, with those of the support images ("inductive").
        train_way: classes in a task of meta-training; as many as in testing by default.
        train_shot: support images per class in meta-training; as many as in testing by default.
        train_query: query images per class in meta-training; as many as in testing by default.
        train_protocol: how query images are normalised in meta-training; as in testing by default.
    """

    way: Way = 5
    shot: Shot = 1
    query: Shot = 15
    protocol: Literal["transductive", "inductive"] = "transductive"
    train_way: Way | None = None
    train_shot: Shot | None = None
    train_query: Shot | None = None
    train_protocol: Literal["transductive", "inductive"] | None = None


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """Meta-training: the outer loop.

    Args:
        iterations: outer steps in all.
        meta_batch: tasks per outer step.
        meta_lr: learning rate of the outer steps.
        optimizer: "adam", or "sgd", which without momentum is plain interpolation, as in Reptile.
        momentum: of "sgd".
        schedule: how the rate changes: not at all ("constant"), by `schedule_factor` every `schedule_every` outer steps
            ("step"), or down to 0 at the last one, along a line ("linear") or half a cosine ("cosine").
        schedule_every: outer steps between changes of the rate, for "step".
        schedule_factor: what the rate is multiplied by, for "step".
        warmup: outer steps over which the rate rises to its full value.
        perturbation_rate: what the rate is multiplied by for the perturbation's parameters, such as the noise
            generator's.
        clip: largest absolute value, or norm, of the averaged gradient.
        clip_by: "value" clips the averaged gradient to [-clip, clip], element by element, "norm" scales all of it to
            the norm `clip`, "none" leaves it as it is.
        noise: how noise is computed: "counter" where it is used, or "generator", by PyTorch's own generators, as in
            runs of earlier versions.
        convolutions: by which algorithm convolutions of each shape are computed on the CPU; measured when the run
            begins, and kept to.
        checkpoint_every: outer steps between checkpoints.
        checkpoint_minutes: a checkpoint is also written after this many minutes.
        checkpoint_keep: outer steps between checkpoints that are kept for good, for `evaluate --state`; 0 for none.
            Of all others only the two newest are kept.
        log_every: outer steps between lines in metrics.jsonl.
        validate_every: outer steps between validations; needs a data set with validation classes.
        validation_episodes: tasks in a validation, the same ones each time.
        validation_samples: noise samples per inner step in a validation.
    """

    iterations: Iterations = 40_000
    meta_batch: Annotated[int, Limits(1, 1000)] = 4
    meta_lr: Annotated[float, Limits(0, 10, above=True)] = 1e-3
    optimizer: Literal["adam", "sgd"] = "adam"
    momentum: Share = 0.0
    schedule: Literal["constant", "step", "linear", "cosine"] = "constant"
    schedule_every: Iterations = 2000
    schedule_factor: Annotated[float, Limits(0, 1000)] = 0.5
    warmup: Annotated[int, Limits(0, 99_999_999)] = 0
    perturbation_rate: Annotated[float, Limits(0, 1000)] = 1.0
    clip: Annotated[float, Limits(0, 1e9, above=True)] = 3.0
    clip_by: Literal["value", "norm", "none"] = "value"
    noise: NoiseName = "counter"
    convolutions: dict[str, str] | None = None
    checkpoint_every: Iterations = 500
    checkpoint_minutes: Annotated[float, Limits(0, 1e6, above=True)] = 5.0
    checkpoint_keep: Annotated[int, Limits(0, 99_999_999)] = 0
    log_every: Iterations = 10
    validate_every: Iterations = 1000
    validation_episodes: Episodes = 100
    validation_samples: Samples = 5


@dataclass(frozen=True, kw_only=True)
class MachineOptions:
    """Where a run computes; of no influence on what it computes, rounding aside.

    Args:
        device: "auto" takes a GPU where there is one.
        threads: CPU threads of each process: that many tasks run side by side, but no more than the machine has CPUs;
            0 takes as many as PyTorch would.
        tasks: how a process computes its tasks of a meta-batch: each by itself ("loop"), or all as one batched pass
            ("batched"); "auto" is batched on a GPU.
    """

    device: str = "auto"
    threads: Threads = 0
    tasks: Literal["auto", "loop", "batched"] = "auto"

    def __post_init__(self) -> None:
        if not re.fullmatch(r"auto|cpu|cuda(:(0|[1-9][0-9]?))?", self.device):
            raise ConfigError(f"machine.device is '{shortened(self.device)}'; use auto, cpu, cuda or cuda:N")


PLAIN_SECTIONS: dict[str, type] = {
    "episode": EpisodeOptions,
    "training": TrainingOptions,
    "machine": MachineOptions,
}


MAY_CHANGE = (
    "training.iterations",
    "training.checkpoint_",
    "training.log_every",
    "machine.",
    "learner.gradient_checkpointing",
    "data.directory",
    "data.download",
)
"""How the names of options begin that may be changed on resuming: the others would make it another run."""


@dataclass(frozen=True)
class Config:
    """Everything that defines a run, checked and with all defaults filled in."""

    description: str
    seed: int
    data: dict[str, Any]
    episode: EpisodeOptions
    network: dict[str, Any]
    perturbation: dict[str, Any]
    learner: dict[str, Any]
    training: TrainingOptions
    machine: MachineOptions
    reported: dict[str, float] = field(default_factory=dict)
    """What the paper or its authors' code reached here, in %: {"accuracy": 96.63, "interval": 0.13}."""

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration as plain dictionaries, as it stands in `config.yaml`."""
        plain = {name: dict(vars(getattr(self, name))) for name in PLAIN_SECTIONS}
        return {name: plain.get(name, getattr(self, name)) for name in Config.__dataclass_fields__}

    def options(self) -> dict[str, Any]:
        """Return all options by dotted name, as on the command line."""
        sections = {name: self.to_dict()[name] for name in (*AXES, *PLAIN_SECTIONS)}
        dotted = {f"{section}.{name}": value for section, own in sections.items() for name, value in own.items()}
        return {"seed": self.seed, **dotted}

    def custom_parts(self) -> list[str]:
        """Return the axes whose part is an object of a Python program, so that it cannot be built from here."""
        return [axis for axis in AXES if getattr(self, axis)["name"] == CUSTOM]

    def computed_options(self) -> dict[str, Any]:
        """Return those options that say what a run computes, its number of iterations aside."""
        # Validating changes no weights. How noise and convolutions are computed is the run's own affair: two ways of
        # it are the same method.
        own = ("training.validate_", "training.validation_", "training.noise", "training.convolutions")
        others = (*MAY_CHANGE, *own)
        return {name: value for name, value in self.options().items() if not name.startswith(others)}


def as_text(value: Any) -> str:
    """Write an option's value as on the command line."""
    return value if isinstance(value, str) else json.dumps(value)


def parse_config(raw: Mapping[str, Any], overrides: Mapping[str, Any] | None = None) -> Config:
    """Check a recipe and fill in the defaults.

    Args:
        raw: a recipe's contents.
        overrides: values by dotted name, such as {"learner.inner_lr": 0.4}, that take precedence. Where one names
            another part, the recipe's options of the part before it do not count.
    """
    if not isinstance(raw, Mapping):
        raise ConfigError("a recipe is a YAML file of sections such as 'learner:'; this one is not")
    merged = {key: dict(value) if isinstance(value, Mapping) else value for key, value in raw.items()}
    _rename_old_options(merged)
    overrides = overrides or {}
    for axis in AXES:
        if f"{axis}.name" in overrides:
            _exchange_part(axis, merged, overrides[f"{axis}.name"])
    for dotted, value in overrides.items():
        _override(merged, dotted, value)
    if unknown := [name for name in merged if name not in Config.__dataclass_fields__]:
        known = ", ".join(Config.__dataclass_fields__)
        raise ConfigError(f"'{shortened(unknown[0])}' is not a section; the sections are: {known}")
    if not isinstance(description := merged.get("description", ""), str):
        raise ConfigError(f"description must be a text, not {shortened(description)}")
    for name in (*AXES, *PLAIN_SECTIONS, "reported"):
        section = merged.setdefault(name, {})
        if not isinstance(section, Mapping) or not all(isinstance(key, str) for key in section):
            raise ConfigError(f"{name} must be a section of options, not {shortened(section)}")
    sections: dict[str, Any] = {name: _axis_section(name, merged[name]) for name in AXES}
    for name, part in PLAIN_SECTIONS.items():
        sections[name] = part(**check_options(part, merged[name], name))
    return Config(
        description=description,
        seed=check_value("seed", Seed, merged.get("seed", 0)),
        reported={name: _reported(name, value) for name, value in merged["reported"].items()},
        **sections,
    )


def load_config(
    path: Path,
    overrides: Mapping[str, Any] | None = None,
    defaults: Mapping[str, Mapping[str, Any]] | None = None,
) -> Config:
    """Read and check a recipe or a run's `config.yaml`.

    Args:
        path: the file.
        overrides: values by dotted name that take precedence.
        defaults: values by section for options that the file does not have, in place of the usual ones.
    """
    raw = read_yaml(path)
    try:
        for section, values in (defaults or {}).items():
            if isinstance(raw, dict) and isinstance(raw.get(section), dict):
                raw[section] = {**values, **raw[section]}
        return parse_config(raw, overrides)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def method_name(config: Config) -> str:
    """Return what a run's method is called: its learner and its perturbation."""
    if "learner" in config.custom_parts():
        parts = (config.learner["class"], config.perturbation["class"])
        names = [part.rpartition(".")[2] for part in parts]
        return " + ".join(name for name in names if name not in ("", "NoPerturbation"))
    learner, perturbation = config.learner["name"], config.perturbation["name"]
    titles = [
        title_of("learner", learner),
        *([] if perturbation == "none" else [title_of("perturbation", perturbation)]),
    ]
    return " + ".join(titles)


def task_options(config: Config) -> dict[str, Any]:
    """Return the options on which a run's test tasks depend, by dotted name: the same in runs that are compared."""
    data = {f"data.{k}": v for k, v in config.data.items() if k not in ("directory", "download")}
    episode = {f"episode.{k}": getattr(config.episode, k) for k in ("way", "shot", "query", "protocol")}
    return {**data, **episode}


def custom_part(part: object | None) -> dict[str, Any]:
    """Describe a part that is an object of a Python program."""
    return {"name": CUSTOM, "class": "" if part is None else f"{type(part).__module__}.{type(part).__qualname__}"}


def refuse_custom_parts(config: Config) -> None:
    """Refuse to build a run whose parts are objects of a Python program."""
    if custom := config.custom_parts():
        raise ConfigError(
            f"this run was trained from Python, and its {', '.join(custom)} cannot be built from here: load it there, "
            "with md.load_run(folder, learner=...), or register your parts and train a recipe (--import)"
        )


def build_learner(config: Config, image_shape: ImageShape) -> Learner:
    """Build the learner that a configuration describes, with initial values from its seed."""
    refuse_custom_parts(config)
    if image_shape.height != image_shape.width:
        raise ConfigError(f"images must be square, not {image_shape.height}x{image_shape.width}; set data.image_size")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(mix_seed(config.seed))
        try:
            way = config.episode.train_way or config.episode.way
            learner_class = _build("learner", config.learner)
            network: nn.Module = _build("network", config.network)(
                {"logits": way, "a logit": 1, "features": None}[learner_class.network_gives],
                in_channels=image_shape.channels,
                image_size=image_shape.height,
                **_options(config.network),
            )
            perturbation = _build("perturbation", config.perturbation)(network, **_options(config.perturbation))
            learner: Learner = learner_class(network, perturbation, **_options(config.learner))
        except (ValueError, RuntimeError) as error:  # a combination that the parts themselves refuse, with their reason
            raise ConfigError(str(error)) from None
    return learner


def resolve_device(machine: MachineOptions, local_rank: int = 0) -> torch.device:
    """Return the device to compute on.

    Args:
        machine: the options.
        local_rank: number of this process on its machine; each has a GPU of its own.
    """
    if machine.device == "cpu" or (machine.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    device = torch.device(machine.device if ":" in machine.device else f"cuda:{local_rank}")
    if local_rank not in (0, device.index):
        raise ConfigError(f"machine.device is '{machine.device}', but each process needs a GPU of its own; use cuda")
    if device.index >= (found := torch.cuda.device_count()):
        fix = "start at most that many processes" if local_rank else "use --machine.device auto"
        raise ConfigError(f"machine.device is '{machine.device}', but PyTorch finds {found} GPUs here; {fix}")
    return device


def batches_tasks(machine: MachineOptions, device: torch.device) -> bool:
    """Return whether the tasks of a meta-batch are to be computed as one batched pass."""
    return machine.tasks == "batched" or (machine.tasks == "auto" and device.type == "cuda")


def _build(axis: str, section: Mapping[str, Any]) -> Any:
    return AXES[axis][section["name"]]


def _options(section: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in section.items() if key != "name"}


def _axis_section(axis: str, given: Mapping[str, Any]) -> dict[str, Any]:
    name = given.get("name", DEFAULT_PARTS[axis])
    if name == CUSTOM:
        return {"name": CUSTOM, "class": str(given.get("class", ""))}
    if not isinstance(name, str) or name not in AXES[axis]:
        raise ConfigError(
            f"{axis}.name is '{shortened(name)}'; known are: {', '.join(AXES[axis])}. If it is a {axis} of your own, "
            "name the module that registers it: --import MODULE"
        )
    checked = check_options(AXES[axis][name], _options(given), axis, skip=FROM_DATA.get(axis, ()))
    return {"name": name, **checked}


def _reported(name: str, value: Any) -> float:
    try:
        number: float = check_value(f"reported.{shortened(name)}", FiniteFloat, value)
    except ConfigError as error:
        raise ConfigError(f"{error}; give it in %") from None
    return number


def _rename_old_options(merged: dict[str, Any]) -> None:
    """Read what runs of earlier versions wrote under other names."""
    learner = merged.get("learner")
    if not isinstance(learner, dict):
        return
    if "checkpoint_steps" in learner:
        learner["gradient_checkpointing"] = learner.pop("checkpoint_steps")
    if "inductive" in learner:
        inductive = learner.pop("inductive")
        merged["episode"] = {"protocol": "inductive" if inductive else "transductive", **merged.get("episode", {})}


def _exchange_part(axis: str, merged: dict[str, Any], name: Any) -> None:
    """Drop the options of the part that a recipe names where another takes its place, unless both have the same."""
    section = merged.get(axis, {})
    if not isinstance(section, Mapping):
        return  # a mistake that is named later
    # Learners inherit options, so that an inner_lr means the same to all that do not declare one of their own.
    before, after = _owners(axis, section.get("name", DEFAULT_PARTS[axis])), _owners(axis, name)
    if before != after:
        merged[axis] = {k: v for k, v in section.items() if k in before and before[k] is after.get(k)}


def _owners(axis: str, name: Any) -> dict[str, Callable[..., Any]]:
    """Return which function declares each option of a part."""
    part = AXES[axis].get(str(name))
    return {} if part is None else {option.name: option.owner for option in options_of(part)}


def _override(merged: dict[str, Any], dotted: str, value: Any) -> None:
    section, _, option = dotted.partition(".")
    if not option:
        merged[section] = value
    elif section in ("description", "seed") or not isinstance(merged.setdefault(section, {}), dict):
        raise ConfigError(f"--{dotted} cannot be set: {section} is not a section of options")
    else:
        merged[section][option] = value
