"""MT-Net: T-Net that also learns which channels a task may change."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from metadropout.learners.gradient import GradientLearner
from metadropout.learners.tnet import TNet
from metadropout.networks.layers import module_key
from metadropout.noise import NoiseSource, NoiseStream
from metadropout.perturbations.base import Weights


class MTNet(TNet):
    """T-Net that adapts only some output channels of each layer, drawn for each task (Lee and Choi, 2018).

    Adapted: W and b of the channels whose mask is 1. Meta-learned: what T-Net learns, and for each channel ζ, the
    logarithm of the odds that a task adapts it, which starts at 0.

    A mask is drawn once for a task, in testing, too, and holds for all its steps and for W and b alike: 1 where
    σ(ζ + G1 − G2) ≥ ½, with Gumbel noise G. Its derivative is taken to be that of σ(ζ + G1 − G2) (straight-through).
    It multiplies gradients, never weights.
    """

    title = "MT-Net"
    citation = "Lee and Choi, 2018"

    is_random = True

    def add_meta_parameters(self) -> None:
        super().add_meta_parameters()
        layers = self.warped_layers().items()
        weights = {module_key(name): layer.get_parameter("weight") for name, layer in layers}
        self.mask_logits = nn.ParameterDict({key: weight.new_zeros(len(weight)) for key, weight in weights.items()})

    def inner_init(self, weights: Weights, noise: NoiseSource | None) -> Weights:
        assert noise is not None
        stream = noise.fork().stream(0, 0)
        return {key: draw_mask(weights[f"mask_logits.{key}"], stream) for key in self.mask_logits}

    def inner_step(
        self, weights: Weights, gradients: Weights, *, loss: Tensor, state: Weights, step: int
    ) -> tuple[Weights, Weights]:
        masked = dict(gradients)
        for name, gradient in gradients.items():
            layer = name.removeprefix("network.").rpartition(".")[0]
            if (mask := state.get(module_key(layer))) is not None:
                masked[name] = gradient * mask.view(-1, *[1] * (gradient.dim() - 1))
        return super().inner_step(weights, masked, loss=loss, state=state, step=step)

    def samples_used(self, asked: int | None = None) -> int:
        # A task has one mask, whatever is averaged: only a perturbation's noise gives samples that differ.
        return super().samples_used(asked if self.perturbation.traits.random else 1)

    def with_head_rows(self, change: Callable[[Tensor], Tensor]) -> GradientLearner:
        changed = super().with_head_rows(change)
        assert isinstance(changed, MTNet)
        key = module_key(self.layers().head)
        if key in self.mask_logits:
            changed.mask_logits[key] = change(self.mask_logits[key].detach())
        return changed


def draw_mask(logits: Tensor, stream: NoiseStream) -> Tensor:
    """Draw a 0 or 1 for each logit; the derivative is that of the relaxed draw (hard Gumbel-softmax, temperature 1)."""
    scaled = stream.normal(logits.shape, logits) / math.sqrt(2)
    # The difference of two Gumbel draws is logistic: here ln(Φ/(1 − Φ)), by its quantiles from those of a normal draw.
    logistic = torch.log(torch.erfc(-scaled) / torch.erfc(scaled))
    soft = torch.sigmoid(logits + logistic)
    return (soft >= 0.5).to(soft) + (soft - soft.detach())
