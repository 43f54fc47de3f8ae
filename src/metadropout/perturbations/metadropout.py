"""Meta-dropout: multiplicative noise whose distribution depends on the input and is meta-learned."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from metadropout.fused import noisy_product
from metadropout.networks.initial import initialise
from metadropout.networks.layers import apply_layer, find_layers
from metadropout.perturbations.base import Pass, Perturbation


class MetaDropout(Perturbation):
    """Multiplies each layer's pre-activation by noise that a meta-learned twin of the layer shapes (Lee et al., 2020).

    For a layer with input h and output f, the twin gives μ(h) of f's shape. On support images the network goes on
    with f · softplus(μ(h) + e), e ~ N(0, I); on query images with f · softplus(μ(h)) (equations 3 to 5 of the paper).
    The head's logits get additive noise N(0, σ²) on support images only, with one σ = softplus(φ_head(h)) per image,
    as in the authors' code.

    Args:
        network: any module; its convolutions and hidden linear layers each get a twin.
        head_noise: whether the logits of support images are perturbed.
        link: what makes the noise positive; "exp" gives log-normal noise, which the paper found worse.
        layers: names of the layers to perturb; by default all convolutions and hidden linear layers.
        head: name of the linear layer that gives the logits; by default the last one.
    """

    random: ClassVar[bool] = True
    needs_second_order: ClassVar[str | None] = (
        "the noise acts only through the inner steps, so without their derivative its generator is not trained "
        "on what the noise does (the head's generator would get no gradient at all)"
    )

    def __init__(
        self,
        network: nn.Module,
        *,
        head_noise: bool = True,
        link: Literal["softplus", "exp"] = "softplus",
        layers: Sequence[str] | None = None,
        head: str | None = None,
    ) -> None:
        super().__init__(network)
        if link not in ("softplus", "exp"):
            raise ValueError(f"link is '{link}', but only 'softplus' and 'exp' are known")
        found = find_layers(network, layers, head)
        self.link, self.head_noise, self.head = link, head_noise, found.head
        # Module names may not contain dots, so the twin of "blocks.0.conv" is called "blocks/0/conv".
        self.generators = nn.ModuleDict({_key(name): _twin(network.get_submodule(name)) for name in found.hidden})
        if head_noise:
            head_layer = network.get_submodule(found.head)
            self.generators[_key(found.head)] = _head_generator(head_layer)
        self._sites = (*found.hidden, found.head)

    @property
    def sites(self) -> Sequence[str]:
        return self._sites

    def perturb(self, name: str, h: Tensor, f: Tensor, this: Pass) -> Tensor:
        if name == self.head:
            return self._perturb_logits(h, f, this)
        mean = self._generate(name, h, this)
        noise = this.normal(mean) if this.sampled else None
        if self.link == "softplus":
            return noisy_product(f, mean, noise)
        return f * torch.exp(mean if noise is None else mean + noise)

    def _perturb_logits(self, h: Tensor, logits: Tensor, this: Pass) -> Tensor:
        if not (self.head_noise and this.sampled):
            return logits
        sigma = F.softplus(self._generate(self.head, h, this))  # (n, 1): one value per image, shared by all classes
        return logits + sigma * this.normal(logits)

    def _generate(self, name: str, h: Tensor, this: Pass) -> Tensor:
        key = _key(name)
        weights = (this.weights[f"generators.{key}.weight"], this.weights.get(f"generators.{key}.bias"))
        return apply_layer(self.generators[key], h, *weights)


def _key(name: str) -> str:
    return name.replace(".", "/")


def _twin(layer: nn.Module) -> nn.Module:
    """Make a layer of the same shape with initial values of its own."""
    twin = copy.deepcopy(layer)
    initialise(twin)
    return twin


def _head_generator(head: nn.Module) -> nn.Linear:
    assert isinstance(head, nn.Linear)  # find_layers saw to it
    generator = nn.Linear(head.in_features, 1, device=head.weight.device, dtype=head.weight.dtype)
    initialise(generator)
    return generator
