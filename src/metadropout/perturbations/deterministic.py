"""Meta-dropout without noise: what the extra weights do by themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor, nn

from metadropout.ops.kernels import noisy_product
from metadropout.perturbations.base import Pass
from metadropout.perturbations.layers import LayerPerturbation


class Deterministic(LayerPerturbation):
    """Multiplies by softplus(μ(h)) on support and query images alike (Lee et al., 2020, table 3). The head is clean.

    Args:
        network: any module.
        layers: names of the layers to perturb; by default all convolutions and hidden linear layers.
        head: name of the linear layer that gives the logits; by default the last one.
    """

    multiplicative: ClassVar[bool] = True

    def __init__(self, network: nn.Module, *, layers: Sequence[str] | None = None, head: str | None = None) -> None:
        super().__init__(network, layers=layers, head=head)
        self.add_twins(network)

    def hidden(self, name: str, h: Tensor, f: Tensor, this: Pass) -> Tensor:
        return noisy_product(f, self.twin(name, h, this))


class MoreParameters(Deterministic):
    """As deterministic, but its weights are adapted with the rest: MAML with more parameters (table 3)."""

    adapts: ClassVar[bool] = True
