"""Fixed multiplicative noise: Meta-dropout with nothing to learn."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from metadropout.ops.kernels import noisy_product
from metadropout.perturbations.base import Pass
from metadropout.perturbations.layers import LayerPerturbation


class FixedGaussian(LayerPerturbation):
    """Multiplies by softplus(e), e ~ N(0, I), the same for all inputs and tasks (Lee et al., 2020, table 3).

    On query images the factor is softplus(0). The logits of support images get noise of σ = softplus(0).
    """

    random: ClassVar[bool] = True
    head_noise = True
    multiplicative: ClassVar[bool] = True

    def hidden(self, name: str, h: Tensor, f: Tensor, this: Pass) -> Tensor:
        if not this.support:
            return f * F.softplus(f.new_zeros(()))
        return noisy_product(f, torch.zeros_like(f), this.noise_for_product(f))

    def on_head(self, h: Tensor, logits: Tensor, this: Pass) -> Tensor:
        return logits + F.softplus(logits.new_zeros(())) * this.normal(logits)
