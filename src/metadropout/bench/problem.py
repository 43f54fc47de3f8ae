"""What every implementation is given: the size of the work, the same weights, the same tasks and the same noise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from metadropout.data import Episode
from metadropout.learners import MAML
from metadropout.networks import Conv4
from metadropout.noise import SeededNoise, mix_seed
from metadropout.ops.precision import Precision
from metadropout.perturbations import MetaDropout, NoPerturbation

Method = Literal["maml", "metadropout"]

Work = Callable[[], dict[str, Tensor]]
"""One meta-iteration: returns the gradient, averaged over tasks, by the names of the learner's parameters."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The size of a meta-iteration."""

    way: int = 20
    shot: int = 1
    query: int = 15
    image_size: int = 28
    in_channels: int = 1
    channels: int = 64
    steps: int = 5
    inner_lr: float = 0.1
    meta_batch: int = 4

    def __str__(self) -> str:
        return (
            f"{self.way}-way {self.shot}-shot, {self.query} queries per class, "
            f"{self.image_size}x{self.image_size}x{self.in_channels}, {self.channels} channels, "
            f"{self.steps} inner steps, {self.meta_batch} tasks"
        )


SETTINGS = {
    "omniglot-20way": Setting(),
    "omniglot-5way": Setting(way=5),
    "miniimagenet": Setting(way=5, image_size=84, in_channels=3, channels=32, inner_lr=0.01),
}


@dataclass(frozen=True)
class Problem:
    """A meta-iteration to compute; a function of its fields, so that every process can build it for itself."""

    setting: Setting
    method: Method
    dtype: torch.dtype = torch.float32
    seed: int = 0

    def learner(self, precision: Precision = "full") -> MAML:
        """Return the learner, with the weights that all implementations start from."""
        size = self.setting
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            network = Conv4(size.way, in_channels=size.in_channels, image_size=size.image_size, channels=size.channels)
            perturbation = MetaDropout(network) if self.method == "metadropout" else NoPerturbation(network)
            learner = MAML(network, perturbation, inner_lr=size.inner_lr, steps=size.steps, precision=precision)
            with torch.no_grad():  # biases and offsets start at zero, where leaving one out would not be noticed
                for parameter in learner.parameters():
                    parameter.add_(0.02 * torch.randn_like(parameter))
        return learner.to(self.dtype)

    def module(self) -> tuple[nn.Module, dict[str, nn.Parameter]]:
        """Return the network as a module in PyTorch's default layout, and its parameters by the learner's names."""
        network = self.learner().network
        assert isinstance(network, Conv4)
        parameters = {f"network.{name}": parameter for name, parameter in network.named_parameters()}
        return nn.Sequential(network.blocks, nn.Flatten(), network.head), parameters

    def episodes(self) -> list[Episode]:
        """Return the tasks of the meta-batch: random images, which cost what others cost."""
        size, labels = self.setting, torch.arange(self.setting.way)
        g = torch.Generator().manual_seed(mix_seed(self.seed, 1))

        def images(per_class: int) -> Tensor:
            shape = (size.way * per_class, size.in_channels, size.image_size, size.image_size)
            return torch.rand(shape, generator=g, dtype=self.dtype)

        return [
            Episode(
                images(size.shot),
                labels.repeat_interleave(size.shot),
                images(size.query),
                labels.repeat_interleave(size.query),
            )
            for _ in range(size.meta_batch)
        ]

    def noise(self, task: int) -> SeededNoise:
        """Return the source of a task's noise; drawing from it is part of the work."""
        return SeededNoise(self.seed, task)
