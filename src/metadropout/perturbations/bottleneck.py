"""What the information-theoretic regularisers have in common: adapted twins and a weighted KL term per layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import torch
from torch import Tensor, nn

from metadropout.options import Limits
from metadropout.perturbations.base import Pass
from metadropout.perturbations.layers import NOISE_NEEDS_SECOND_ORDER, LayerPerturbation

KlWeight = Annotated[float, Limits(0, 1000)]


class InformationBottleneck(LayerPerturbation):
    """Noise from twins that are adapted in the inner steps, as the paper does for its baselines, and a KL term.

    The KL of each layer is summed over channels and averaged over positions and images (our choice: a sum over
    positions diverges). The head is clean.

    Args:
        network: any module.
        kl_weight: weight of the KL term; the paper tries 1e-5, 1e-4 and 1e-3.
        layers: names of the layers to perturb; by default all convolutions and hidden linear layers.
        head: name of the module that gives the logits; by default the last linear layer, if there is one.
    """

    traits = replace(
        LayerPerturbation.traits,
        random=True,
        support_only=True,
        adapts=True,
        needs_second_order=NOISE_NEEDS_SECOND_ORDER,
    )

    def __init__(
        self,
        network: nn.Module,
        *,
        kl_weight: KlWeight = 1e-4,
        layers: Sequence[str] | None = None,
        head: str | None = None,
    ) -> None:
        super().__init__(network, layers=layers, head=head)
        self.kl_weight = kl_weight
        self.add_twins(network)

    def add_kl(self, name: str, kl: Tensor, f: Tensor, context: Pass) -> None:
        """Take note of a layer's KL, the sum over all units of its output f."""
        context.notes.setdefault("kl", []).append(kl * (f.shape[self.channel_axis[name]] / f.numel()))

    def penalty(self, context: Pass) -> Tensor | None:
        terms = context.notes.get("kl")
        return self.kl_weight * torch.stack(terms).sum() if terms else None
