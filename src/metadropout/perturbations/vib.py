"""The variational information bottleneck as a regulariser of the inner loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from metadropout.perturbations.base import Pass
from metadropout.perturbations.layers import NOISE_NEEDS_SECOND_ORDER, LayerPerturbation


class VariationalBottleneck(LayerPerturbation):
    """Adds learned noise to each pre-activation and penalises what it still tells of the input (Alemi et al., 2017).

    On support images f + σ(h)·e, σ = softplus(twin(h) − 5), and the inner loss gets kl_weight · KL[N(f, σ²) ‖ N(0, 1)],
    summed over channels and layers, averaged over positions and images (our choice: a sum over positions diverges).
    Query images get f. The twins are adapted in the inner steps, as the paper does for its baselines; the head is
    clean.

    Args:
        network: any module.
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
        self.kl_weight = kl_weight
        self.add_twins(network)

    def hidden(self, name: str, h: Tensor, f: Tensor, this: Pass) -> Tensor:
        if not this.support:
            return f
        sigma = F.softplus(self.twin(name, h, this) - 5)
        kl = 0.5 * (f.square() + sigma.square() - 1) - torch.log(sigma)
        this.notes.setdefault("kl", []).append(sum_channels_mean_rest(kl))
        return f + sigma * this.normal(f)

    def penalty(self, this: Pass) -> Tensor | None:
        return self.kl_weight * torch.stack(this.notes["kl"]).sum()


def sum_channels_mean_rest(values: Tensor) -> Tensor:
    """Sum over channels, average over images and positions: (n, channels, ...) → a single number."""
    return values.transpose(0, 1).flatten(1).mean(dim=1).sum()
