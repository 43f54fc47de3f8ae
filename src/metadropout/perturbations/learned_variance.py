"""Meta-dropout that learns the noise's variance, too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor, nn
from torch.nn import functional as F

from metadropout.ops.kernels import noisy_product
from metadropout.perturbations.base import Pass
from metadropout.perturbations.metadropout import MetaDropout
from metadropout.perturbations.multiplicative import Start, start_bias

INITIAL_SPREAD = 0.5413
"""softplus of this is 1 to four digits: the learned standard deviation starts as Meta-dropout's fixed one."""


class LearnedVariance(MetaDropout):
    """Meta-dropout with noise of a learned, input-dependent standard deviation (Lee et al., 2020, table 3).

    The factor is softplus(μ(h) + s(h)·e), s = softplus of a second twin whose bias starts where s is about 1.
    Query images and the head are as in Meta-dropout.
    """

    title = "Meta-dropout with learned variance"
    citation = "Lee et al., 2020, table 3"
    SPREAD: ClassVar[str] = "spread:"

    def __init__(
        self,
        network: nn.Module,
        *,
        start: Start = "zero",
        layers: Sequence[str] | None = None,
        head: str | None = None,
    ) -> None:
        super().__init__(network, start=start, layers=layers, head=head)
        self.add_twins(network, self.SPREAD)
        for key, twin in self.generators.items():
            if key.startswith(self.SPREAD):
                start_bias(twin, INITIAL_SPREAD)

    def hidden(self, name: str, h: Tensor, f: Tensor, context: Pass) -> Tensor:
        mean = self.twin(name, h, context)
        if context.support:
            mean = mean + F.softplus(self.twin(name, h, context, self.SPREAD)) * context.normal(mean)
        return noisy_product(f, mean)
