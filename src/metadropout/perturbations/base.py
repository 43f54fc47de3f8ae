"""What a perturbation is: something that acts on a network while it learns from support images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from metadropout.noise import NoiseStream


@dataclass(frozen=True)
class Pass:
    """What a perturbation is given in one forward pass."""

    weights: Mapping[str, Tensor]
    """The perturbation's own parameters by name; not its attributes, because a learner may have adapted them."""
    streams: Sequence[NoiseStream] = ()
    """One noise stream per Monte-Carlo sample that stands in the batch; none in the deterministic query pass."""

    @property
    def sampled(self) -> bool:
        """Whether this is a support pass, with noise."""
        return len(self.streams) > 0

    def normal(self, like: Tensor) -> Tensor:
        """Draw standard normal noise of the shape of `like`, whose batch holds the samples one after the other."""
        shape = (like.shape[0] // len(self.streams), *like.shape[1:])
        draws = [stream.normal(shape, like) for stream in self.streams]
        return draws[0] if len(draws) == 1 else torch.cat(draws)


class Perturbation(nn.Module):
    """Acts on the outputs of named layers; the network does not know of it.

    A subclass has its own meta-learned parameters, if any, and says by its class attributes how learners must treat it.
    The keyword-only arguments of its constructor are its options on the command line.
    """

    random: ClassVar[bool] = False
    """Whether support passes draw noise, so that averaging Monte-Carlo samples has a meaning."""
    adapts: ClassVar[bool] = False
    """Whether its own parameters take part in the inner steps."""
    needs_second_order: ClassVar[str | None] = None
    """Why a first-order learner could not train it; None if one can."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()

    @property
    def sites(self) -> Sequence[str]:
        """Names of the network's layers whose outputs it may replace."""
        return ()

    def perturb(self, name: str, h: Tensor, f: Tensor, this: Pass) -> Tensor:
        """Return what the network goes on with after a layer.

        Args:
            name: the layer's name.
            h: the layer's input.
            f: its output, before normalisation.
            this: noise and weights of the pass.
        """
        raise NotImplementedError(f"{type(self).__name__} lists sites but does not say what it does there")
