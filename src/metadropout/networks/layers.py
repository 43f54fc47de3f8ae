"""Finding the layers of any network that perturbations act on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from metadropout.networks.initial import CONVOLUTIONS, TRANSPOSED, NoHead
from metadropout.ops.kernels import convolution, convolution_to_bf16
from metadropout.ops.precision import Precision, in_bf16


@dataclass(frozen=True)
class PerturbableLayers:
    """The names of a network's layers that a perturbation acts on."""

    hidden: tuple[str, ...]
    """Convolutions and hidden linear layers, in the order of the network's modules."""
    head: str
    """The module that gives the logits."""
    hidden_named: bool = False
    """Whether the hidden layers are the ones that the user or the network named, and not just all there are."""
    head_named: bool = False
    """Whether the user named the head."""
    gives_features: bool = False
    """Whether the head is an `nn.Identity`: the network gives features, and there are no logits."""


def find_layers(network: nn.Module, hidden: Sequence[str] | None = None, head: str | None = None) -> PerturbableLayers:
    """Find a network's convolutions, hidden linear layers and head, or check the ones that are named.

    A network can name its own by an attribute `perturbable` (hidden layers only). Without names, every
    convolution and linear layer counts, and the last linear layer is the head, or where there is none the last module
    with parameters. A network that gives features has an `nn.Identity` in the head's place, which has to be named, but
    not in networks of this library.

    Args:
        network: any module.
        hidden: names of the hidden layers, as in `network.named_modules()`.
        head: name of the module that gives the logits.
    """
    known = find_weighted(network)
    named = getattr(network, "perturbable", None) if hidden is None else hidden
    chosen = _guess_head(network, known, named or ()) if head is None else head
    if not chosen or chosen not in dict(network.named_modules()):
        raise ValueError(f"the head '{chosen}' is not a module of {type(network).__name__}; it has {list(known)}")
    others = [name for name in known if name != chosen and not name.startswith(f"{chosen}.")]
    for name in named or ():
        if name not in others:
            raise ValueError(
                f"'{name}' is not a convolution or hidden linear layer of {type(network).__name__}; it has {others}"
            )
    return PerturbableLayers(
        tuple(others if named is None else named),
        chosen,
        hidden_named=named is not None,
        head_named=head is not None,
        gives_features=isinstance(network.get_submodule(chosen), nn.Identity),
    )


def _guess_head(network: nn.Module, known: Mapping[str, nn.Module], hidden: Sequence[str]) -> str:
    """Guess which module gives the logits, other than the hidden ones."""
    if absent := [str(name) for name, module in network.named_modules() if isinstance(module, NoHead)]:
        return absent[0]
    linear = [name for name, layer in known.items() if isinstance(layer, nn.Linear) and name not in hidden]
    if linear:
        return linear[-1]
    owners: list[str] = [name for name, m in network.named_modules() if name and [*m.parameters(recurse=False)]]
    for owner in owners[-1:]:
        # A convolution, or a module with a matrix of its own, as cosine classifiers are. A network whose last
        # parameters are those of a normalisation gives features rather than logits.
        name = owner.partition(".parametrizations.")[0]
        if name not in hidden and any(p.dim() > 1 for p in network.get_submodule(name).parameters()):
            return name
    raise ValueError(
        f"{type(network).__name__} has no layer that is known to be its head; name it: head=... . Logits that forward "
        "computes from a matrix of the network's own need a module for that: an nn.Module with the matrix as parameter"
    )


def own_weight(network: nn.Module, name: str) -> Tensor:
    """Return the weight of a layer, which has to be a parameter of its own."""
    layer = network.get_submodule(name)
    if parametrize.is_parametrized(layer):
        raise ValueError(
            f"the weight of '{name}' is computed from others (by a parametrization, such as weight_norm), for which "
            "this perturbation has no form; use a plain layer, or leave it out: layers=[...]"
        )
    return layer.get_parameter("weight")


def parameter_of(network: nn.Module, name: str) -> nn.Parameter:
    """Return a parameter of a module, or of the network where the module has none, to make others like it."""
    return next(chain(network.get_submodule(name).parameters(), network.parameters()))


def find_weighted(network: nn.Module) -> dict[str, nn.Module]:
    """Find all convolutions, transposed ones among them, and linear layers of a network by name."""
    kinds = (*CONVOLUTIONS, *TRANSPOSED, nn.Linear)
    found: dict[str, nn.Module] = {
        name: module for name, module in network.named_modules() if isinstance(module, kinds)
    }
    for name, module in found.items():
        if "weight" not in module._parameters and not parametrize.is_parametrized(module):
            raise ValueError(
                f"the weight of '{name}' is no parameter but set by a hook, as weight_norm and spectral_norm of "
                "torch.nn.utils do; use their newer forms in torch.nn.utils.parametrizations, and name the layers to "
                "perturb without this one: layers=[...]"
            )
    return found


def channels_of(layer: nn.Module) -> int:
    """Return how many channels a convolution gives, or features a linear layer."""
    return int(layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels)  # type: ignore[arg-type]


def find_activations(network: nn.Module) -> tuple[str, ...]:
    """Find a network's ReLU modules; calls of `functional.relu` cannot be found."""
    return tuple(name for name, module in network.named_modules() if isinstance(module, nn.ReLU))


def apply_layer(
    layer: nn.Module, x: Tensor, weight: Tensor, bias: Tensor | None, precision: Precision = "full"
) -> Tensor:
    """Apply a convolution or linear layer with other weights than its own.

    The precision is that of convolutions. In "bf16" the result may be stored in bfloat16.
    """
    if isinstance(layer, nn.Linear):
        return F.linear(x, weight, bias)
    if isinstance(layer, TRANSPOSED):
        convolve_transposed = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[weight.dim() - 3]
        where = (layer.stride, layer.padding, layer.output_padding, layer.groups, layer.dilation)
        return convolve_transposed(x, weight, bias, *where)  # type: ignore[arg-type]
    if not isinstance(layer, CONVOLUTIONS):
        raise TypeError(f"a {type(layer).__name__} cannot be applied with other weights")
    # The one function that knows the layer's stride, padding mode and groups but takes any weights.
    convolve = convolution if is_plain_3x3(layer) else layer._conv_forward
    if precision == "bf16":
        if convolve is convolution and (out := convolution_to_bf16(x, weight, bias)) is not None:
            return out
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
