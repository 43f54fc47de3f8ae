"""Meta-dropout without noise: what the extra weights do by themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor, nn

from metadropout.ops.kernels import noisy_product
from metadropout.perturbations.base import Pass
from metadropout.perturbations.multiplicative import MultiplicativePerturbation, Start


class Deterministic(MultiplicativePerturbation):
    """Multiplies by softplus(μ(h)) on support and query images alike (Lee et al., 2020, table 3). The head is clean."""

    title = "deterministic Meta-dropout"
    citation = "Lee et al., 2020, table 3"

    def __init__(
        self,
        network: nn.Module,
        *,
        start: Start = "zero",
        layers: Sequence[str] | None = None,
        head: str | None = None,
    ) -> None:
        super().__init__(network, start=start, layers=layers, head=head)
        self.add_mean_twins(network)

    def hidden(self, name: str, h: Tensor, f: Tensor, context: Pass) -> Tensor:
        return noisy_product(f, self.twin(name, h, context))


class MoreParameters(Deterministic):
    """As deterministic, but its weights are adapted with the rest: MAML with more parameters (table 3)."""

    title = "more parameters"
    citation = "Lee et al., 2020, table 3"
    traits = replace(Deterministic.traits, adapts=True)
