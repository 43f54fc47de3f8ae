"""Additive Meta-dropout, the paper's appendix B."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

from torch import Tensor, nn
from torch.nn import functional as F

from metadropout.options import Limits
from metadropout.perturbations.base import Pass
from metadropout.perturbations.layers import NOISE_NEEDS_SECOND_ORDER, LayerPerturbation


class Additive(LayerPerturbation):
    """Adds noise to each layer's pre-activation, its size meta-learned and input-dependent (Lee et al., 2020, app. B).

    On support images the network goes on with f + c·σ(h)·e, σ = softplus of a twin of the layer, c the noise scale,
    and the logits get c·softplus(φ_head(h))·e; on query images nothing is added.

    Args:
        network: any module.
        noise_scale: how far the noise may spread; the paper's λ.
        layers: names of the layers to perturb; by default all convolutions and hidden linear layers.
        head: name of the module that gives the logits; by default the last linear layer, if there is one.
    """

    title = "additive noise"
    citation = "Lee et al., 2020, app. B"
    traits = replace(
        LayerPerturbation.traits, random=True, support_only=True, needs_second_order=NOISE_NEEDS_SECOND_ORDER
    )
    head_noise = True

    def __init__(
        self,
        network: nn.Module,
        *,
        noise_scale: Annotated[float, Limits(0, 1000)] = 0.1,
        layers: Sequence[str] | None = None,
        head: str | None = None,
    ) -> None:
        super().__init__(network, layers=layers, head=head)
        self.noise_scale = noise_scale
        self.add_twins(network)
        if self.head_noise:
            self.add_head_twin(network)

    def hidden(self, name: str, h: Tensor, f: Tensor, context: Pass) -> Tensor:
        if not context.support:
            return f
        return f + self.noise_scale * F.softplus(self.twin(name, h, context)) * context.normal(f)

    def on_head(self, h: Tensor, logits: Tensor, context: Pass) -> Tensor:
        return logits + self.noise_scale * self.head_sigma(h, context) * context.normal(logits)
