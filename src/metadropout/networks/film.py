"""FiLM: features that a context vector scales and shifts."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from metadropout.ops.normalisation import scale_and_offset


class FiLM(nn.Module):
    """Multiplies each channel by a scale and adds an offset, both linear in a context vector (Perez et al., 2018).

    (γ, β) = A c + a. The context c is a buffer of zeros: something to adapt to a task, and not meta-learned (CAVIA).
    The initial values are those of CAVIA's authors: at c = 0, γ is not 1 but between ±1/√(size of c).

    Args:
        channels: number of channels.
        context: size of the context vector.
    """

    context: Tensor

    def __init__(self, channels: int, context: int) -> None:
        super().__init__()
        self.register_buffer("context", torch.zeros(context))
        self.weight = nn.Parameter(torch.empty(2 * channels, context))
        self.bias = nn.Parameter(torch.empty(2 * channels))
        nn.init.kaiming_uniform_(self.weight, nonlinearity="linear")
        nn.init.uniform_(self.bias, -(context**-0.5), context**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        scale, offset = F.linear(self.context, self.weight, self.bias).chunk(2)
        return scale_and_offset(x, scale, offset)
