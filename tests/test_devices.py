"""Everything runs on another device than the CPU: what is made on the wrong one, or needs the CPU, is found.

There is no GPU here. PyTorch's `meta` device, whose tensors have shapes and no values, takes its place: whole training
iterations, an evaluation and an attack run on it, and no operation may mix its tensors with those of the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import metadropout as md
from metadropout.config import Config
from metadropout.data import Episode
from metadropout.ops import kernels
from metadropout.recipes import load_recipe
from metadropout.robustness.attacks import NORMS
from metadropout.robustness.curves import Attack
from metadropout.training.loop import TESTING, Result, episode_sampler, open_parts, train
from metadropout.training.recording import Watcher
from metadropout.training.workers import Workers

DEVICE = torch.device("meta")
aten = torch.ops.aten


class WrongDeviceError(AssertionError):
    """An operation has tensors of the CPU and of the device."""


class StandIn(TorchDispatchMode):
    """Lets `meta` stand for an accelerator: copying to the CPU gives ones, and mixing it with the CPU is an error."""

    operations = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        there = [tensor.device == DEVICE for tensor in tensors]
        StandIn.operations += any(there)
        if function is aten._local_scalar_dense.default and there[0]:
            return torch.ones((), dtype=tensors[0].dtype).item()
        if function is aten.equal.default and any(there):
            return False
        if function is aten._to_copy.default and there[0] and kwargs.get("device") == torch.device("cpu"):
            return torch.ones(tensors[0].shape, dtype=kwargs.get("dtype") or tensors[0].dtype)
        if function is aten.copy_.default and there == [False, True]:
            return args[0].fill_(1)
        moves = function in (aten._to_copy.default, aten.copy_.default)
        # Numbers on the CPU may go with tensors of any device, as PyTorch has it.
        if not moves and any(there) and any(not on and t.dim() for on, t in zip(there, tensors, strict=True)):
            raise WrongDeviceError(f"{function} has tensors of {DEVICE} and of the CPU")
        return function(*args, **kwargs)


class Silent(Watcher):
    def on_iteration(self, iteration: int, loss: float, accuracy: float) -> None: ...

    def on_message(self, text: str) -> None: ...


@pytest.fixture
def on_the_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compute there, in the threads of the workers, too."""
    do_here = Workers._do_here

    def do_there(self: Workers, do: Any, item: Any) -> Any:
        with StandIn():
            return do_here(self, do, item)

    monkeypatch.setattr(Workers, "_do_here", do_there)
    monkeypatch.setattr("metadropout.training.loop.resolve_device", lambda *_: DEVICE)
    StandIn.operations = 0
    with StandIn():
        yield


def small(**overrides: Any) -> Config:
    sizes = {"data.train_classes": 6, "data.validation_classes": 6, "data.test_classes": 6, "network.channels": 2}
    shape = {"episode.way": 3, "episode.query": 2, "learner.steps": 2, "training.validation_episodes": 2}
    training = {"training.iterations": 2, "training.meta_batch": 2, "machine.threads": 1}
    return load_recipe("glyphs-5way-1shot-metadropout", {**sizes, **shape, **training, **overrides})


def train_there(folder: Path, **overrides: Any) -> Result:
    """Train two iterations, with checkpoints and a validation, which is an evaluation."""
    config = small(**overrides)
    splits, learner = open_parts(config)
    return train(folder, config, learner, splits, Silent())


PARTS = [
    {"machine.tasks": tasks, "learner.name": learner, "perturbation.name": perturbation}
    for tasks in ("loop", "batched")
    for learner, perturbation in (("maml", "metadropout"), ("metasgd", "none"))
]


@pytest.mark.usefixtures("on_the_device")
@pytest.mark.parametrize("parts", PARTS, ids=lambda parts: "-".join(parts.values()))
def test_training_and_validation_stay_on_the_device(parts: dict[str, str], tmp_path: Path) -> None:
    assert train_there(tmp_path / "run", **parts).iteration == 2
    assert StandIn.operations > 1000  # it was there


def attack_there() -> None:
    config = small()
    splits, learner = open_parts(config)
    learner = learner.to(DEVICE)
    episode = episode_sampler(config, splits, "test", TESTING)(0, 0).to(DEVICE)
    noise = md.CounterNoise(0)
    classify = learner.adapt(episode.support_x, episode.support_y, mc_samples=2, generator=noise)
    attack = Attack(dict.fromkeys(NORMS, (0.1,)), steps=2)
    for norm in NORMS:
        for jointly in (True, False):
            attack.on(classify, episode, 0, norm, (0.1, 0.2), jointly=jointly)


@pytest.mark.usefixtures("on_the_device")
def test_an_attack_stays_on_the_device() -> None:
    attack_there()
    assert StandIn.operations > 1000


@pytest.mark.parametrize("tasks", ["loop", "batched"])
@pytest.mark.usefixtures("on_the_device")
def test_noise_that_is_drawn_on_the_cpu_is_found(tasks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = kernels.plain_values
    monkeypatch.setattr(kernels, "plain_values", lambda draws, like: torch.randn(there(draws, like).shape))
    with pytest.raises((WrongDeviceError, md.TrainingError), match=r"cpu|CPU"):
        train_there(tmp_path / "run", **{"machine.tasks": tasks, "training.noise": "counter"})


@pytest.mark.usefixtures("on_the_device")
def test_images_that_stay_on_the_cpu_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    to = Episode.to
    monkeypatch.setattr(Episode, "to", lambda self, device: to(self, torch.device("cpu")))
    with pytest.raises((WrongDeviceError, RuntimeError), match=r"CPU|cpu"):
        train_there(tmp_path / "run")


@pytest.mark.usefixtures("on_the_device")
def test_an_attack_from_a_start_on_the_cpu_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "metadropout.robustness.curves.random_movement", lambda x, *_: torch.zeros(x.shape, dtype=x.dtype)
    )
    with pytest.raises((WrongDeviceError, RuntimeError), match=r"CPU|cpu"):
        attack_there()
