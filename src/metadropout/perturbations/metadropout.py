"""Meta-dropout: multiplicative noise whose distribution depends on the input and is meta-learned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn

from metadropout.ops.kernels import noisy_product
from metadropout.perturbations.base import Pass
from metadropout.perturbations.layers import NOISE_NEEDS_SECOND_ORDER
from metadropout.perturbations.multiplicative import MultiplicativePerturbation, Start


class MetaDropout(MultiplicativePerturbation):
    """Multiplies each layer's pre-activation by noise that a meta-learned twin of the layer shapes (Lee et al., 2020).

    For a layer with input h and output f, the twin gives μ(h) of f's shape. On support images the network goes on
    with f · softplus(μ(h) + e), e ~ N(0, I); on query images with f · softplus(μ(h)) (equations 3 to 5 of the paper).
    The head's logits get additive noise N(0, σ²) on support images only, with one σ = softplus(φ_head(h)) per image,
    as in the authors' code.

    Args:
        network: any module; its convolutions and hidden linear layers each get a twin.
        head_noise: whether the logits of support images are perturbed.
        link: what makes the noise positive; "exp" gives log-normal noise, which the paper found worse.
    """

    title = "Meta-dropout"
    citation = "Lee et al., 2020"
    traits = replace(
        MultiplicativePerturbation.traits,
        random=True,
        needs_second_order=f"{NOISE_NEEDS_SECOND_ORDER} (the head's generator would get no gradient at all)",
    )

    def __init__(
        self,
        network: nn.Module,
        *,
        head_noise: bool = True,
        link: Literal["softplus", "exp"] = "softplus",
        start: Start = "zero",
        layers: Sequence[str] | None = None,
        head: str | None = None,
    ) -> None:
        super().__init__(network, start=start, layers=layers, head=head)
        if link not in ("softplus", "exp"):
            raise ValueError(f"link is '{link}', but only 'softplus' and 'exp' are known")
        self.link, self.head_noise = link, head_noise and not self.found.gives_features
        plain = type(self).hidden is MetaDropout.hidden  # subclasses may do more at a layer than the noisy product
        self.traits = replace(self.traits, shares_first_layer=plain and link == "softplus")
        self.add_mean_twins(network)
        if self.head_noise:
            self.add_head_twin(network)

    @property
    def initial_mean(self) -> float:
        return super().initial_mean if self.link == "softplus" else 0.0  # exp(0) is 1 anyway

    def hidden(self, name: str, h: Tensor, f: Tensor, context: Pass) -> Tensor:
        mean = self.twin(name, h, context)
        if self.link == "softplus":
            return noisy_product(f, mean, context.noise_for_product(mean) if context.support else None)
        return f * torch.exp(mean + context.normal(mean) if context.support else mean)

    def on_head(self, h: Tensor, logits: Tensor, context: Pass) -> Tensor:
        return logits + self.head_sigma(h, context) * context.normal(logits)
