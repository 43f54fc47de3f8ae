"""What noise on the outputs of layers has in common: finding the layers, twins of them, and noise on the logits."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor, nn
from torch.nn import functional as F

from metadropout.networks.initial import initialise
from metadropout.networks.layers import apply_layer, find_layers, module_key, own_weight
from metadropout.perturbations.base import Pass, Perturbation, Target

NOISE_NEEDS_SECOND_ORDER = (
    "the noise acts only through the inner steps, so without their derivative its parameters are not trained "
    "on what the noise does"
)


class LayerPerturbation(Perturbation):
    """Acts on the outputs of convolutions and hidden linear layers (`hidden`), and of the head (`on_head`).

    Args:
        network: any module.
        layers: names of the layers to perturb; by default all convolutions and hidden linear layers.
        head: name of the linear layer that gives the logits; by default the last one.
    """

    changes: ClassVar[Target] = "features"

    def __init__(self, network: nn.Module, *, layers: Sequence[str] | None = None, head: str | None = None) -> None:
        super().__init__(network)
        found = find_layers(network, layers, head)
        self.hidden_names, self.head_name = found.hidden, found.head
        # Linear layers have their features last, also where they see many tokens of an image.
        self.channel_axis = {
            name: -1 if isinstance(network.get_submodule(name), nn.Linear) else 1 for name in found.hidden
        }
        self.generators = nn.ModuleDict()

    @property
    def sites(self) -> Sequence[str]:
        return (*self.hidden_names, self.head_name)

    def check_calls(self, outputs: Sequence[str], inputs: Sequence[str]) -> None:
        super().check_calls(outputs, inputs)
        if self.head_name in outputs and outputs[-1] != self.head_name:
            raise ValueError(
                f"'{self.head_name}' is taken for the head, but '{outputs[-1]}' runs after it; "
                f"name the layer that gives the logits: head='{outputs[-1]}'"
            )

    def after(self, name: str, h: Tensor, f: Tensor, this: Pass) -> Tensor:
        return self.on_head(h, f, this) if name == self.head_name else self.hidden(name, h, f, this)

    @abstractmethod
    def hidden(self, name: str, h: Tensor, f: Tensor, this: Pass) -> Tensor:
        """Return what the network goes on with after a hidden layer with input h and output f."""

    def on_head(self, h: Tensor, logits: Tensor, this: Pass) -> Tensor:
        """Return the logits to learn from; by default as they are."""
        return logits

    def add_twins(self, network: nn.Module, prefix: str = "") -> None:
        """Give each hidden layer a twin: a layer of the same shape with weights of its own."""
        for name in self.hidden_names:
            own_weight(network, name)  # refuses what a twin could not be made of
            twin = copy.deepcopy(network.get_submodule(name))
            initialise(twin)
            self.generators[prefix + module_key(name)] = twin.requires_grad_()  # also where the layer itself is frozen

    def add_head_twin(self, network: nn.Module) -> None:
        """Give the head a generator with one output, shared by all classes."""
        weight = own_weight(network, self.head_name)
        generator = nn.Linear(weight.shape[1], 1, device=weight.device, dtype=weight.dtype)
        initialise(generator)
        self.generators[module_key(self.head_name)] = generator

    def twin(self, name: str, h: Tensor, this: Pass, prefix: str = "") -> Tensor:
        """Return the output of a layer's twin for the layer's own input."""
        key = prefix + module_key(name)
        weights = (this.weights[f"generators.{key}.weight"], this.weights.get(f"generators.{key}.bias"))
        return apply_layer(self.generators[key], h, *weights, this.precision)

    def head_sigma(self, h: Tensor, this: Pass) -> Tensor:
        """Return one standard deviation per image for the noise on its logits, shape (n, 1)."""
        return F.softplus(self.twin(self.head_name, h, this))
