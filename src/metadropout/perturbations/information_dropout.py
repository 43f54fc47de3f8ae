"""Information dropout as a regulariser of the inner loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from metadropout.networks.layers import find_activations
from metadropout.perturbations.base import Pass
from metadropout.perturbations.layers import NOISE_NEEDS_SECOND_ORDER, LayerPerturbation
from metadropout.perturbations.vib import sum_channels_mean_rest


class InformationDropout(LayerPerturbation):
    """Multiplies activations by learned log-normal noise and penalises weak noise (Achille and Soatto, 2018).

    The ReLU version: after the ReLU that follows a layer, before pooling, on support images multiply by exp(s(h)·e),
    s = 0.001 + 0.7·sigmoid(twin(h)). The inner loss gets kl_weight · KL, KL = −log s up to a constant on active units,
    summed over channels and layers, averaged over positions and images. On query images the factor is 1. The twins are
    adapted in the inner steps, as the paper does for its baselines; the head is clean.

    Args:
        network: any module whose ReLUs are `nn.ReLU` modules.
        kl_weight: weight of the KL term; the paper tries 1e-5, 1e-4 and 1e-3.
        layers: names of the layers to perturb; by default all convolutions and hidden linear layers.
        head: name of the linear layer that gives the logits; by default the last one.
    """

    random: ClassVar[bool] = True
    adapts: ClassVar[bool] = True
    needs_second_order: ClassVar[str | None] = NOISE_NEEDS_SECOND_ORDER

    def __init__(
        self,
        network: nn.Module,
        *,
        kl_weight: float = 1e-4,
        layers: Sequence[str] | None = None,
        head: str | None = None,
    ) -> None:
        super().__init__(network, layers=layers, head=head)
        self.activations = find_activations(network)
        if not self.activations:
            raise ValueError(
                f"information-dropout acts after ReLUs, but {type(network).__name__} has no nn.ReLU module; "
                "use nn.ReLU() in place of functional.relu"
            )
        self.kl_weight = kl_weight
        self.add_twins(network)

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
        active = (f > 0).to(f)
        this.notes.setdefault("kl", []).append(sum_channels_mean_rest(-torch.log(spread) * active))
        return f * torch.exp(spread * this.normal(f))

    def penalty(self, this: Pass) -> Tensor | None:
        return self.kl_weight * torch.stack(this.notes["kl"]).sum()
