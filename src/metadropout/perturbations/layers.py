"""What noise on the outputs of layers has in common: finding the layers, twins of them, and noise on the logits."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Collection, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from metadropout.networks.initial import CONVOLUTIONS, initialise
from metadropout.networks.layers import apply_layer, find_layers, module_key, own_weight, parameter_of
from metadropout.perturbations.base import Pass, Perturbation, Traits

NOISE_NEEDS_SECOND_ORDER = (
    "the noise acts only through the inner steps, so without their derivative its parameters are not trained "
    "on what the noise does"
)


class LayerPerturbation(Perturbation):
    """Acts on the outputs of convolutions and hidden linear layers (`hidden`), and of the head (`on_head`).

    Where the network gives features and no logits, nothing acts on the head.

    Args:
        network: any module.
        layers: names of the layers to perturb; by default all convolutions and hidden linear layers.
        head: name of the module that gives the logits; by default the last linear layer, if there is one.
    """

    traits = Traits(changes=("features",))
    head_noise: bool = False
    """Whether `on_head` perturbs the logits of support images."""

    def __init__(self, network: nn.Module, *, layers: Sequence[str] | None = None, head: str | None = None) -> None:
        super().__init__(network)
        self.found = found = find_layers(network, layers, head)
        self.hidden_names, self.head_name = found.hidden, found.head
        self.head_noise = self.head_noise and not found.gives_features
        # Linear layers have their features last, also where they see many tokens of an image.
        self.channel_axis = {
            name: -1 if isinstance(network.get_submodule(name), nn.Linear) else 1 for name in found.hidden
        }
        self.generators = nn.ModuleDict()

    @property
    def sites(self) -> Sequence[str]:
        return (*self.hidden_names, self.head_name)

    def check_calls(self, outputs: Sequence[str], inputs: Sequence[str], as_wide: Collection[str]) -> None:
        self._check_head(outputs, as_wide)
        unused = [] if self.found.hidden_named else [name for name in self.hidden_names if name not in outputs]
        super().check_calls([self.head_name, *unused, *outputs], inputs, as_wide)
        self.leave_alone(unused)

    def _check_head(self, outputs: Sequence[str], as_wide: Collection[str]) -> None:
        head, found = self.head_name, self.found
        other = f"'{outputs[-1]}'" if outputs and outputs[-1] != head else "..."
        if head not in outputs:
            # It need not run where it is known not to be one of the hidden layers, and nothing acts on it.
            if self.head_noise or not (found.hidden_named or found.head_named):
                raise ValueError(
                    f"'{head}' is assumed to be the head, but it did not run as a module in a forward pass; "
                    f"name the module that gives the logits: head={other}"
                )
        elif outputs[-1] != head:
            raise ValueError(
                f"'{head}' is assumed to be the head, but {other} runs after it; "
                f"name the module that gives the logits: head={other}"
            )
        elif head not in as_wide and not found.head_named:
            raise ValueError(
                f"'{head}' is assumed to be the head, but it does not give as many values as there are logits; "
                "name the module that gives the logits: head=..."
            )

    def after(self, name: str, h: Tensor, f: Tensor, context: Pass) -> Tensor:
        if name != self.head_name:
            return self.hidden(name, h, f, context)
        return self.on_head(h, f, context) if self.head_noise and context.support else f

    @abstractmethod
    def hidden(self, name: str, h: Tensor, f: Tensor, context: Pass) -> Tensor:
        """Return what the network goes on with after a hidden layer with input h and output f."""

    def on_head(self, h: Tensor, logits: Tensor, context: Pass) -> Tensor:
        """Return the logits of support images to learn from; called only where `head_noise` says so."""
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
        layer = network.get_submodule(self.head_name)
        like = parameter_of(network, self.head_name)
        where: dict[str, Any] = {"device": like.device, "dtype": like.dtype}
        generator: nn.Module
        if isinstance(layer, CONVOLUTIONS):
            kind = next(kind for kind in CONVOLUTIONS if isinstance(layer, kind))
            shape = (layer.kernel_size, layer.stride, layer.padding, layer.dilation)
            generator = kind(layer.in_channels, 1, *shape, padding_mode=layer.padding_mode, **where)  # type: ignore[arg-type]
        else:
            generator = nn.Linear(self._head_features(layer), 1, **where)
        initialise(generator)
        self.generators[module_key(self.head_name)] = generator

    def _head_features(self, layer: nn.Module) -> int:
        features = getattr(layer, "in_features", None)
        if not isinstance(features, int):
            raise ValueError(
                f"the noise on the logits depends on the features that '{self.head_name}' gets, but a "
                f"{type(layer).__name__} does not say how many: give it an attribute in_features, or do without this "
                "noise, by head_noise=False or another perturbation"
            )
        return features

    def twin(self, name: str, h: Tensor, context: Pass, prefix: str = "") -> Tensor:
        """Return the output of a layer's twin for the layer's own input."""
        key = prefix + module_key(name)
        weights = (context.weights[f"generators.{key}.weight"], context.weights.get(f"generators.{key}.bias"))
        return apply_layer(self.generators[key], h, *weights, context.precision)

    def head_sigma(self, h: Tensor, context: Pass) -> Tensor:
        """Return one standard deviation per image for the noise on its logits, shape (n, 1)."""
        return F.softplus(self.twin(self.head_name, h, context))
