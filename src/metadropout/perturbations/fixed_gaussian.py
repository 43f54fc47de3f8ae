"""Fixed multiplicative noise: Meta-dropout with nothing to learn."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from metadropout.ops.kernels import noisy_product
from metadropout.perturbations.base import Pass
from metadropout.perturbations.multiplicative import MultiplicativePerturbation


class FixedGaussian(MultiplicativePerturbation):
    """Multiplies by softplus(e), e ~ N(0, I), the same for all inputs and tasks (Lee et al., 2020, table 3).

    On query images the factor is softplus(0). The logits of support images get noise of σ = softplus(0). There being
    nothing to learn, `start` is where the mean stays: "one" multiplies by softplus(0.54 + e), and query images by 1.
    """

    title = "fixed Gaussian noise"
    citation = "Lee et al., 2020, table 3"
    traits = replace(MultiplicativePerturbation.traits, random=True)
    head_noise = True

    def hidden(self, name: str, h: Tensor, f: Tensor, context: Pass) -> Tensor:
        if not context.support:
            return f * F.softplus(f.new_full((), self.initial_mean))
        return noisy_product(f, torch.full_like(f, self.initial_mean), context.noise_for_product(f))

    def on_head(self, h: Tensor, logits: Tensor, context: Pass) -> Tensor:
        return logits + F.softplus(logits.new_zeros(())) * context.normal(logits)
