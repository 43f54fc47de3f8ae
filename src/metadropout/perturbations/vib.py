"""The variational information bottleneck as a regulariser of the inner loop."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from metadropout.perturbations.base import Pass
from metadropout.perturbations.bottleneck import InformationBottleneck


class VariationalBottleneck(InformationBottleneck):
    """Adds learned noise to each pre-activation and penalises what it still tells of the input (Alemi et al., 2017).

    On support images f + σ(h)·e, σ = softplus(twin(h) − 5), and the inner loss gets kl_weight · KL[N(f, σ²) ‖ N(0, 1)].
    Query images get f.
    """

    title = "variational information bottleneck"
    citation = "Alemi et al., 2017"

    def hidden(self, name: str, h: Tensor, f: Tensor, context: Pass) -> Tensor:
        if not context.support:
            return f
        sigma = F.softplus(self.twin(name, h, context) - 5)
        # Summed term by term: what comes back is then laid out as the features are.
        kl = 0.5 * (f.square().sum() + sigma.square().sum() - f.numel()) - torch.log(sigma).sum()
        self.add_kl(name, kl, f, context)
        return f + sigma * context.normal(f)
