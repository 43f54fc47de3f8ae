"""Input-independent multiplicative noise with a learned mean per channel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from metadropout.networks.layers import channels_of, module_key, parameter_of
from metadropout.ops.kernels import noisy_product
from metadropout.ops.normalisation import per_channel
from metadropout.perturbations.base import Pass
from metadropout.perturbations.layers import NOISE_NEEDS_SECOND_ORDER
from metadropout.perturbations.multiplicative import MultiplicativePerturbation, Start


class IndependentGaussian(MultiplicativePerturbation):
    """Multiplies by softplus(m + e), m learned per channel and the same for all inputs (Lee et al., 2020, table 3).

    On query images the factor is softplus(m). The logits of support images get noise of one learned
    σ = softplus(m_head).
    """

    title = "input-independent Gaussian noise"
    citation = "Lee et al., 2020, table 3"
    traits = replace(MultiplicativePerturbation.traits, random=True, needs_second_order=NOISE_NEEDS_SECOND_ORDER)
    head_noise = True

    def __init__(
        self,
        network: nn.Module,
        *,
        start: Start = "zero",
        layers: Sequence[str] | None = None,
        head: str | None = None,
    ) -> None:
        super().__init__(network, start=start, layers=layers, head=head)
        self.means = nn.ParameterDict()
        for name in self.hidden_names:
            channels = channels_of(network.get_submodule(name))
            self.means[module_key(name)] = parameter_of(network, name).new_full((channels,), self.initial_mean)
        if self.head_noise:
            self.means[module_key(self.head_name)] = parameter_of(network, self.head_name).new_zeros(1)

    def hidden(self, name: str, h: Tensor, f: Tensor, context: Pass) -> Tensor:
        mean = context.weights[f"means.{module_key(name)}"]
        if self.channel_axis[name] == 1:
            mean = per_channel(mean, f)
        if not context.support:
            return f * F.softplus(mean)
        return noisy_product(f, mean + torch.zeros_like(f), context.noise_for_product(f))

    def on_head(self, h: Tensor, logits: Tensor, context: Pass) -> Tensor:
        sigma = F.softplus(context.weights[f"means.{module_key(self.head_name)}"])
        return logits + sigma * context.normal(logits)
