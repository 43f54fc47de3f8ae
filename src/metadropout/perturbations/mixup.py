"""Mixup of images or hidden features, and of their labels."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Annotated

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from metadropout.networks.layers import find_layers
from metadropout.options import Limits
from metadropout.perturbations.base import Pass, Perturbation, Traits


class Mixup(Perturbation):
    """Learns from mixtures of support images, mixed at a random layer (Zhang et al., 2018; Verma et al., 2019).

    Each pass picks uniformly the input of one of the layers (the images themselves are the first layer's), one
    λ ~ Beta(γ, γ) and one permutation of the batch. There h becomes λ·h + (1 − λ)·h[permutation], and the loss is mixed
    in the same way, which is the cross-entropy against mixed one-hot labels. Query images are not mixed.

    Everything has to pass through the mixed input. So where branches run side by side, as with skip connections, name
    whole blocks; a network can name its own by an attribute `mixable`, as ResNet-12 does.

    Args:
        network: any module.
        gamma: both parameters of the Beta distribution; the paper tries 0.2, 1 and 2.
        layers: names of the modules at whose inputs to mix; by default all convolutions and hidden linear layers, or
            what the network names.
        head: name of the module that gives the logits, whose input is mixed as well; by default the last linear layer,
            if there is one.
    """

    title = "mixup"
    citation = "Zhang et al., 2018; Verma et al., 2019"
    traits = Traits(
        changes=("labels",), random=True, support_only=True, samples_share_a_batch=False, tasks_share_a_batch=False
    )

    def __init__(
        self,
        network: nn.Module,
        *,
        gamma: Annotated[float, Limits(0, 1000, above=True)] = 0.2,
        layers: Sequence[str] | None = None,
        head: str | None = None,
    ) -> None:
        super().__init__(network)
        if gamma <= 0:
            raise ValueError(f"gamma is {gamma}; it must be above 0")
        found = find_layers(network, head=head)
        named = getattr(network, "mixable", None) if layers is None else layers
        layers = found.hidden if named is None else named
        modules = [name for name, _ in network.named_modules() if name]
        if unknown := sorted(set(layers) - set(modules)):
            raise ValueError(f"'{unknown[0]}' is not a module of {type(network).__name__}; it has {modules}")
        self.gamma, self._sites = gamma, (*layers, found.head)
        self._named = (*(named or ()), *([] if head is None else [head]))

    @property
    def input_sites(self) -> Sequence[str]:
        return self._sites

    def check_calls(self, outputs: Sequence[str], inputs: Sequence[str], as_wide: Collection[str]) -> None:
        unused = [name for name in self._sites if name not in inputs and name not in self._named]
        self.leave_alone(unused)
        self._sites = tuple(name for name in self._sites if name not in unused)  # a draw of them would mix nothing
        super().check_calls(outputs, inputs, as_wide)

    def before(self, name: str, h: Tensor, context: Pass) -> Tensor:
        if not context.support:
            return h
        if "layer" not in context.notes:
            self._draw(len(h), context)
        if name != context.notes["layer"] or context.notes["mixed"]:
            return h
        context.notes["mixed"] = True  # a layer that is used twice in a pass is mixed once
        ratio, partner = self._mixture(context, h)
        return ratio * h + (1 - ratio) * h[partner]

    def label_loss(self, logits: Tensor, y: Tensor, context: Pass) -> Tensor:
        ratio, partner = self._mixture(context, y)
        return ratio * F.cross_entropy(logits, y) + (1 - ratio) * F.cross_entropy(logits, y[partner])

    @staticmethod
    def _mixture(context: Pass, like: Tensor) -> tuple[float, Tensor]:
        return context.notes["ratio"], context.notes["partner"].to(like.device)

    def _draw(self, n: int, context: Pass) -> None:
        numbers = context.numbers()
        context.notes["layer"] = self._sites[int(numbers.integers(len(self._sites)))]
        context.notes["ratio"] = float(numbers.beta(self.gamma, self.gamma))
        context.notes["partner"] = torch.from_numpy(numbers.permutation(n))
        context.notes["mixed"] = False
