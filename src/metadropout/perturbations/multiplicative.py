"""What multiplicative noise has in common: the factor at the start."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import nn

from metadropout.networks.layers import channels_of, module_key
from metadropout.perturbations.layers import LayerPerturbation

Start = Literal["zero", "one"]
"""What starts at which value: the mean inside of the softplus at zero, or the factor at one."""

UNIT_SOFTPLUS = math.log(math.expm1(1))
"""softplus of this is 1."""


class MultiplicativePerturbation(LayerPerturbation):
    """Multiplies the outputs of hidden layers by a positive factor.

    Args:
        network: any module.
        start: "zero" starts the mean inside of the softplus around zero as the authors do, and so the factor around
            0.69, which a normalisation after the layer undoes; "one" starts the factor at 1 for every input, so that
            query images see a pretrained network as it is.
        layers: names of the layers to perturb; by default all convolutions and hidden linear layers.
        head: name of the module that gives the logits; by default the last linear layer, if there is one.
    """

    traits = replace(LayerPerturbation.traits, multiplicative=True)

    def __init__(
        self,
        network: nn.Module,
        *,
        start: Start = "zero",
        layers: Sequence[str] | None = None,
        head: str | None = None,
    ) -> None:
        super().__init__(network, layers=layers, head=head)
        if start not in ("zero", "one"):
            raise ValueError(f"start is '{start}', but only 'zero' and 'one' are known")
        self.start = start

    @property
    def initial_mean(self) -> float:
        """Where the mean starts whose softplus is the factor."""
        return UNIT_SOFTPLUS if self.start == "one" else 0.0

    def add_mean_twins(self, network: nn.Module) -> None:
        """Give each hidden layer a twin that gives the mean of its noise."""
        self.add_twins(network)
        if self.start == "one":
            for name in self.hidden_names:
                twin = self.generators[module_key(name)]
                nn.init.zeros_(twin.get_parameter("weight"))  # random ones would spread the factors of wide layers
                start_bias(twin, self.initial_mean)


def start_bias(twin: nn.Module, value: float) -> None:
    """Let all biases of a twin start at a value, also where the layer, and so the twin, has none."""
    weight = twin.get_parameter("weight")
    bias = torch.full((channels_of(twin),), value, dtype=weight.dtype, device=weight.device)
    twin.register_parameter("bias", nn.Parameter(bias))
