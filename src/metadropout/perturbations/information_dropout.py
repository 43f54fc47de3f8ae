"""Information dropout as a regulariser of the inner loop."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from metadropout.networks.layers import find_activations, find_weighted
from metadropout.perturbations.base import Pass
from metadropout.perturbations.bottleneck import InformationBottleneck, KlWeight


class InformationDropout(InformationBottleneck):
    """Multiplies activations by learned log-normal noise and penalises weak noise (Achille and Soatto, 2018).

    The ReLU version: after the ReLU that follows a layer, before pooling, on support images multiply by exp(s(h)·e),
    s = 0.001 + 0.7·sigmoid(twin(h)). The inner loss gets kl_weight · KL, KL = −log s up to a constant, on active units.
    On query images the factor is 1. It acts on layers that are followed by an `nn.ReLU` module of the network; others,
    such as those whose ReLU is a function's, are left alone, unless they are named: then they are refused.
    """

    title = "information dropout"
    citation = "Achille and Soatto, 2018"

    def __init__(
        self,
        network: nn.Module,
        *,
        kl_weight: KlWeight = 1e-4,
        layers: Sequence[str] | None = None,
        head: str | None = None,
    ) -> None:
        super().__init__(network, kl_weight=kl_weight, layers=layers, head=head)
        self.activations, self._named = find_activations(network), layers is not None
        others = dict.fromkeys((*find_weighted(network), self.head_name))
        self._others = [name for name in others if name not in self.hidden_names]
        if not self.activations:
            raise ValueError(
                f"information-dropout acts after ReLUs, but {type(network).__name__} has no nn.ReLU module; "
                "use nn.ReLU() in place of functional.relu"
            )

    @property
    def sites(self) -> Sequence[str]:
        return (*self.hidden_names, *self._others, *self.activations)

    def check_calls(self, outputs: Sequence[str], inputs: Sequence[str], as_wide: Collection[str]) -> None:
        # Of these not all need to run.
        super().check_calls([*self._others, *self.activations, *outputs], inputs, as_wide)
        for name, following in pairwise([*outputs, "nothing"]):
            if self._named and name in self.hidden_names and following not in self.activations:
                raise ValueError(
                    f"'{name}' is followed by '{following}' and not by an nn.ReLU module, so information dropout "
                    "cannot act on it; use nn.ReLU() in place of functional.relu, or leave it out of `layers`"
                )

    def after(self, name: str, h: Tensor, f: Tensor, context: Pass) -> Tensor:
        if not context.support:
            return f
        layer = context.notes.pop("layer", None)  # the one that ran last, if a ReLU may follow
        if name in self.activations:
            return f if layer is None else self.hidden(layer[0], layer[1], f, context)
        if name in self.hidden_names:
            context.notes["layer"] = (name, h)
        return f

    def hidden(self, name: str, h: Tensor, f: Tensor, context: Pass) -> Tensor:
        spread = 0.001 + 0.7 * torch.sigmoid(self.twin(name, h, context))
        if spread.shape != f.shape:
            raise ValueError(
                f"'{name}' gives {tuple(spread.shape)}, but the ReLU after it {tuple(f.shape)}: information dropout "
                "needs the ReLU before pooling and reshaping; change their order, or leave the layer out of `layers`"
            )
        self.add_kl(name, -(torch.log(spread) * (f > 0)).sum(), f, context)
        return f * torch.exp(spread * context.normal(f))
