"""Finding the layers of any network that perturbations act on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.utils import parametrize

from metadropout.networks.initial import CONVOLUTIONS
from metadropout.ops.kernels import convolution
from metadropout.ops.precision import Precision, in_bf16


@dataclass(frozen=True)
class PerturbableLayers:
    """The names of a network's layers that a perturbation acts on."""

    hidden: tuple[str, ...]
    """Convolutions and hidden linear layers, in the order of the network's modules."""
    head: str
    """The last linear layer, which gives the logits."""


def find_layers(network: nn.Module, hidden: Sequence[str] | None = None, head: str | None = None) -> PerturbableLayers:
    """Find a network's convolutions, hidden linear layers and head, or check the ones that are named.

    A network can name its own by an attribute `perturbable` (hidden layers only). Without names, every
    convolution and linear layer counts, and the last linear layer is the head.

    Args:
        network: any module.
        hidden: names of the hidden layers, as in `network.named_modules()`.
        head: name of the linear layer that gives the logits.
    """
    known = find_weighted(network)
    linear = [name for name, m in known.items() if isinstance(m, nn.Linear)]
    if head is None:
        if not linear:
            raise ValueError(f"{type(network).__name__} has no nn.Linear layer, which its head has to be")
        head = linear[-1]
    elif head not in linear:
        raise ValueError(f"the head '{head}' is not a linear layer of {type(network).__name__}; it has {linear}")
    if hidden is None:
        hidden = getattr(network, "perturbable", [name for name in known if name != head])
    for name in hidden:
        if name not in known or name == head:
            raise ValueError(
                f"'{name}' is not a convolution or hidden linear layer of {type(network).__name__}; "
                f"it has {[n for n in known if n != head]}"
            )
    return PerturbableLayers(tuple(hidden), head)


def own_weight(network: nn.Module, name: str) -> Tensor:
    """Return the weight of a layer, which has to be a parameter of its own."""
    layer = network.get_submodule(name)
    if parametrize.is_parametrized(layer):
        raise ValueError(
            f"the weight of '{name}' is computed from others (by a parametrization, such as weight_norm), for which "
            "this perturbation has no form; use a plain layer, or leave it out: layers=[...]"
        )
    return layer.get_parameter("weight")


def find_weighted(network: nn.Module) -> dict[str, nn.Module]:
    """Find all convolutions and linear layers of a network by name."""
    return {name: m for name, m in network.named_modules() if isinstance(m, (*CONVOLUTIONS, nn.Linear))}


def find_activations(network: nn.Module) -> tuple[str, ...]:
    """Find a network's ReLU modules; calls of `functional.relu` cannot be found."""
    return tuple(name for name, module in network.named_modules() if isinstance(module, nn.ReLU))


def apply_layer(
    layer: nn.Module, x: Tensor, weight: Tensor, bias: Tensor | None, precision: Precision = "full"
) -> Tensor:
    """Apply a convolution or linear layer with other weights than its own; the precision is that of convolutions."""
    if isinstance(layer, nn.Linear):
        return nn.functional.linear(x, weight, bias)
    if not isinstance(layer, CONVOLUTIONS):
        raise TypeError(f"a {type(layer).__name__} cannot be applied with other weights")
    # The one function that knows the layer's stride, padding mode and groups but takes any weights.
    convolve = convolution if is_plain_3x3(layer) else layer._conv_forward
    if precision == "bf16":
        return in_bf16(lambda x, weight: convolve(x, weight, None), x, weight, bias)
    return convolve(x, weight, bias)


def is_plain_3x3(layer: nn.Module) -> bool:
    """Say whether a layer is a 3x3 convolution of stride 1 that keeps its images' size."""
    return (
        type(layer) is nn.Conv2d
        and layer.kernel_size == (3, 3)
        and layer.stride == layer.dilation == (1, 1)
        and layer.padding in ((1, 1), "same")
        and layer.padding_mode == "zeros"
        and layer.groups == 1
    )


def module_key(name: str) -> str:
    """Turn a layer's name into one for a dictionary of modules or parameters, which may not contain dots."""
    return name.replace(".", "/")
