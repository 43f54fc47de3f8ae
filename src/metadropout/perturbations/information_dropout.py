"""Information dropout as a regulariser of the inner loop."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from metadropout.networks.layers import find_activations
from metadropout.perturbations.base import Pass
from metadropout.perturbations.bottleneck import InformationBottleneck


class InformationDropout(InformationBottleneck):
    """Multiplies activations by learned log-normal noise and penalises weak noise (Achille and Soatto, 2018).

    The ReLU version: after the ReLU that follows a layer, before pooling, on support images multiply by exp(s(h)·e),
    s = 0.001 + 0.7·sigmoid(twin(h)). The inner loss gets kl_weight · KL, KL = −log s up to a constant, on active units.
    On query images the factor is 1. The network's ReLUs have to be `nn.ReLU` modules.
    """

    def __init__(
        self,
        network: nn.Module,
        *,
        kl_weight: float = 1e-4,
        layers: Sequence[str] | None = None,
        head: str | None = None,
    ) -> None:
        super().__init__(network, kl_weight=kl_weight, layers=layers, head=head)
        self.activations = find_activations(network)
        if not self.activations:
            raise ValueError(
                f"information-dropout acts after ReLUs, but {type(network).__name__} has no nn.ReLU module; "
                "use nn.ReLU() in place of functional.relu"
            )

    @property
    def sites(self) -> Sequence[str]:
        return (*self.hidden_names, *self.activations)

    def after(self, name: str, h: Tensor, f: Tensor, this: Pass) -> Tensor:
        if not this.support:
            return f
        if name not in self.activations:
            this.notes["layer"] = (name, h)  # its ReLU comes later
            return f
        if "layer" not in this.notes:
            return f
        layer, layer_input = this.notes.pop("layer")
        return self.hidden(layer, layer_input, f, this)

    def hidden(self, name: str, h: Tensor, f: Tensor, this: Pass) -> Tensor:
        spread = 0.001 + 0.7 * torch.sigmoid(self.twin(name, h, this))
        self.add_kl(-torch.log(spread) * (f > 0).to(f), this)
        return f * torch.exp(spread * this.normal(f))
