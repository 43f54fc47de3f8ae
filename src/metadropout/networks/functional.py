"""Any network as a pure function of its weights, with a say at each layer: nothing of the user's is touched."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.parameter import UninitializedParameter

from metadropout.networks.initial import CONVOLUTIONS
from metadropout.networks.layers import apply_layer, find_weighted
from metadropout.networks.norms import BATCH_NORMS, LayerStatistics
from metadropout.ops.attention import twice_differentiable_attention
from metadropout.ops.kernels import norm_relu_pool
from metadropout.ops.normalisation import batch_normalise, batch_statistics, held_gradient, normalise_with
from metadropout.ops.precision import Precision

OutputHook = Callable[[str, Tensor, Tensor], Tensor]
"""Called with a layer's name, input and output; what it returns takes the place of the output."""

InputHook = Callable[[str, Tensor], Tensor]
"""Called with a layer's name and input; what it returns takes the place of the input."""

NORMS = (*BATCH_NORMS, nn.LayerNorm, nn.GroupNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


def weight_names(network: nn.Module) -> list[str]:
    """List a network's parameters but frozen ones and those of normalisation layers: what θ means by default."""
    norms = {name for name, module in network.named_modules() if isinstance(module, NORMS)}
    return [name for name in trainable_names(network) if name.rpartition(".")[0] not in norms]


def trainable_names(network: nn.Module) -> list[str]:
    """List a network's parameters but frozen ones."""
    return [name for name, p in network.named_parameters() if p.requires_grad]


def cancelled_biases(network: nn.Module) -> dict[str, str]:
    """Find biases whose gradient is zero, because the batch normalisation right after their layer takes them away.

    Found where the two follow each other in an `nn.Sequential`.

    Returns:
        The biases' names, and their layers'.
    """
    found = {}
    for name, module in network.named_modules():
        if type(module) is nn.Sequential:  # a subclass may run its parts in another way
            for (child, layer), (_, norm) in pairwise(module.named_children()):
                if isinstance(layer, (*CONVOLUTIONS, nn.Linear)) and isinstance(norm, BATCH_NORMS):
                    path = f"{name}.{child}".removeprefix(".")
                    found[f"{path}.bias"] = path
    return found


@dataclass
class Normalisation:
    """Whose statistics the batch normalisations of one pass use: by default the batch's own."""

    groups: int = 1
    """How many batches stand one after the other, each normalised by its own statistics."""
    given: LayerStatistics | None = None
    """Statistics to use in place of the batch's."""
    collected: LayerStatistics | None = None
    """Filled with the batch's statistics, where a dictionary is given."""


@dataclass
class _Call:
    """What the modules of the copy need to know of the pass under way."""

    normalisation: Normalisation = field(default_factory=Normalisation)
    on_output: OutputHook | None = None
    on_input: InputHook | None = None


class FunctionalNetwork:
    """A network as a function (weights, images) → logits, whose listed layers report to a hook.

    It runs on a private copy of the network's structure that holds no weights of its own. In the copy, batch
    normalisations use the statistics of the batch (running averages are neither used nor changed) and other
    layers are in evaluation mode: `nn.Dropout` does nothing, because randomness has to come from a perturbation.
    Attention is computed in the way that has second derivatives.
    One pass at a time: threads need a learner each (`copy.deepcopy` gives one).
    Where normalisation, ReLU and 2x2 pooling follow each other in an `nn.Sequential`, one module does the work of all.

    Args:
        network: any module that maps images to logits.
        outputs: names of the layers whose outputs a hook may replace.
        inputs: names of the layers whose inputs a hook may replace.
        precision: of the convolutions.
        norm_second_order: how much of the derivative of gradients that come back through batch normalisations is kept.
    """

    def __init__(
        self,
        network: nn.Module,
        outputs: Iterable[str] = (),
        inputs: Iterable[str] = (),
        precision: Precision = "full",
        norm_second_order: float = True,
    ) -> None:
        lazy = [name for name, p in network.named_parameters() if isinstance(p, UninitializedParameter)]
        if lazy:
            raise ValueError(f"'{lazy[0]}' has no shape yet: run one batch of images through the network first")
        find_weighted(network)  # refuses what cannot be copied
        self._network, self._precision, self._norm_second_order = network, precision, norm_second_order
        self._current = _Call()
        self._structure = self._copy_of(network)
        # A parameter that stands under two names must be given under both.
        first_names = {id(p): name for name, p in network.named_parameters()}
        everything = network.named_parameters(remove_duplicate=False)
        self._aliases = {alias: first_names[id(p)] for alias, p in everything}
        for name in outputs:
            self._structure.get_submodule(name).register_forward_hook(_OutputReport(self, name), with_kwargs=True)
        for name in inputs:
            self._structure.get_submodule(name).register_forward_pre_hook(_InputReport(self, name), with_kwargs=True)
        _fuse(self._structure)

    def __call__(
        self,
        weights: Mapping[str, Tensor],
        x: Tensor,
        on_output: OutputHook | None = None,
        normalisation: Normalisation | None = None,
        on_input: InputHook | None = None,
    ) -> Tensor:
        """Return the logits of images `x` under the given weights.

        Args:
            weights: all parameters of the network by name, and buffers that take the place of its own.
            x: images, shape (n, channels, height, width).
            on_output: called after each layer listed for its output.
            normalisation: whose statistics to use; the batch's own by default.
            on_input: called before each layer listed for its input.
        """
        self._current = _Call(normalisation or Normalisation(), on_output, on_input)
        try:
            tensors = {alias: weights[name] for alias, name in self._aliases.items()}
            for name, buffer in self._network.named_buffers(remove_duplicate=False):
                tensors[name] = weights.get(name, buffer)
            with twice_differentiable_attention:
                logits = functional_call(self._structure, tensors, (x,))
        except RuntimeError as error:
            types = [weight.dtype for weight in weights.values() if weight.is_floating_point()]
            if x.dtype in types or not types:
                raise
            conversion = f"x.to({types[0]})" + ("" if x.is_floating_point() else " / 255, if they are bytes")
            raise TypeError(
                f"{type(self._network).__name__} failed on images of type {x.dtype}, which is not that of its weights; "
                f"convert the images first: {conversion}"
            ) from error
        finally:
            self._current = _Call()  # keeps no graph alive
        if isinstance(logits, Tensor) and logits.dtype == torch.bfloat16:
            logits = logits.to(x.dtype)
        if not isinstance(logits, Tensor) or logits.dim() != 2:
            shape = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            raise TypeError(f"{type(self._network).__name__} must return logits of shape (n, way), not {shape}")
        return logits

    def _copy_of(self, network: nn.Module) -> nn.Module:
        structure = copy.deepcopy(network).to("meta").eval()
        for module in structure.modules():
            if type(module) in CONVOLUTIONS:
                module._conv_forward = _Convolve(copy.copy(module), self._precision)  # type: ignore[assignment]
        replaced: dict[int, nn.Module] = {}
        for name, module in list(structure.named_modules(remove_duplicate=False)):
            if isinstance(module, BATCH_NORMS):
                if type(module) not in BATCH_NORMS:
                    raise ValueError(
                        f"'{name}' is a {type(module).__name__}: what it does beyond batch normalisation is not known; "
                        "use a plain BatchNorm layer and a module of its own for the rest"
                    )
                new: nn.Module = _BatchStatisticsNorm(name, module, self)
            elif type(module) is nn.Hardsigmoid:
                new = _Hardsigmoid()
            else:
                continue
            parent, _, child = name.rpartition(".")
            setattr(structure.get_submodule(parent), child, replaced.setdefault(id(module), new))
        return structure


@dataclass(frozen=True)
class _OutputReport:
    """Reports a layer's output to the hook of the pass under way; a class, so that a copied learner copies it, too."""

    owner: FunctionalNetwork
    name: str

    def __call__(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor:
        hook = self.owner._current.on_output
        return output if hook is None else hook(self.name, [*args, *kwargs.values()][0], output)


@dataclass(frozen=True)
class _InputReport:
    """Reports a layer's input to the hook of the pass under way."""

    owner: FunctionalNetwork
    name: str

    def __call__(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        hook = self.owner._current.on_input
        if hook is None:
            return args, kwargs
        if args:
            return (hook(self.name, args[0]), *args[1:]), kwargs
        first = next(iter(kwargs))
        return args, {**kwargs, first: hook(self.name, kwargs[first])}


@dataclass
class _Convolve:
    """Does in the copy the arithmetic of a convolution, which otherwise stays as it is: models read its stride, say."""

    layer: nn.Module
    precision: Precision
    may_store_bf16: bool = False
    """Whether what comes next can take images in bfloat16."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        out = apply_layer(self.layer, x, weight, bias, self.precision)
        return out if self.may_store_bf16 else out.to(weight.dtype)


class _Hardsigmoid(nn.Module):
    """Stands in the copy for `nn.Hardsigmoid`, which PyTorch cannot differentiate twice."""

    def forward(self, input: Tensor) -> Tensor:
        return F.relu6(input + 3) / 6


class _BatchStatisticsNorm(nn.Module):
    """Stands in the copy for a batch normalisation, under the same parameter names."""

    weight: Tensor | None
    bias: Tensor | None

    def __init__(self, name: str, original: nn.Module, owner: FunctionalNetwork) -> None:
        super().__init__()
        self.name, self.eps = name, float(original.eps)  # type: ignore[arg-type]
        self.register_parameter("weight", original.weight)  # type: ignore[arg-type]
        self.register_parameter("bias", original.bias)  # type: ignore[arg-type]
        self._owner = [owner]  # in a list, so that nothing takes it for a part of this module

    def forward(self, input: Tensor) -> Tensor:
        if (share := self._owner[0]._norm_second_order) < 1:
            input = held_gradient(input, float(share))
        return self._normalise(input, self._owner[0]._current.normalisation)

    def _normalise(self, x: Tensor, how: Normalisation) -> Tensor:
        if how.given is not None:
            return normalise_with(x, how.given[self.name], self.weight, self.bias, self.eps)
        if how.collected is not None:
            if self.name in how.collected:
                raise ValueError(
                    f"'{self.name}' is used twice in a pass; its statistics would have to be two (inductive protocol)"
                )
            how.collected[self.name] = batch_statistics(x)
        return batch_normalise(x, self.weight, self.bias, self.eps, how.groups)


class _NormReluPool(_BatchStatisticsNorm):
    """A normalisation that does the work of the ReLU and the pooling after it, too."""

    def __init__(self, norm: _BatchStatisticsNorm) -> None:
        super().__init__(norm.name, norm, norm._owner[0])
        self.may_store_bf16 = False  # whether what comes next can take images in bfloat16

    def _normalise(self, x: Tensor, how: Normalisation) -> Tensor:
        if how.given is not None or how.collected is not None:
            x = x.float() if x.dtype == torch.bfloat16 else x
            return F.max_pool2d(F.relu(super()._normalise(x, how)), kernel_size=2)
        out = norm_relu_pool(x, self.bias, self.eps, how.groups)
        return out.float() if out.dtype == torch.bfloat16 and not self.may_store_bf16 else out


def _fuse(structure: nn.Module) -> None:
    """Let one module do the work of each normalisation, ReLU and 2x2 pooling that follow each other.

    It takes the place of the normalisation, so that parameters keep their names; the other two do nothing from then on.
    """
    for module in structure.modules():
        if type(module) is nn.Sequential:  # a subclass may run its parts in another way
            names = list(module._modules)
            for norm, relu, pool in zip(names, names[1:], names[2:], strict=False):
                if _can_be_fused(*(module.get_submodule(name) for name in (norm, relu, pool))):
                    setattr(module, norm, _NormReluPool(module.get_submodule(norm)))  # type: ignore[arg-type]
                    setattr(module, relu, nn.Identity())
                    setattr(module, pool, nn.Identity())
    _store_bf16(structure)


def _store_bf16(structure: nn.Module) -> None:
    """Let images stay in bfloat16 between modules that take them so: convolutions, and what `_fuse` puts together."""
    for module in structure.modules():
        if type(module) is nn.Sequential:
            for before, after in pairwise(module):
                if isinstance(after, _NormReluPool) and (convolve := _convolve_of(before)):
                    convolve.may_store_bf16 = True
    for module in structure.modules():
        if type(module) is nn.Sequential:
            for before, after in pairwise(module):
                last, first = _ends_in(before), _convolve_of(_begins_with(after))
                if isinstance(last, _NormReluPool) and first is not None and first.may_store_bf16:
                    last.may_store_bf16 = True


def _convolve_of(module: nn.Module | None) -> _Convolve | None:
    found = getattr(module, "_conv_forward", None)
    return found if isinstance(found, _Convolve) else None


def _begins_with(module: nn.Module) -> nn.Module:
    return _begins_with(module[0]) if type(module) is nn.Sequential and len(module) else module


def _ends_in(module: nn.Module) -> nn.Module:
    """Return the last module of a sequence that does anything."""
    if type(module) is not nn.Sequential:
        return module
    parts = [part for part in module if type(part) is not nn.Identity]
    return _ends_in(parts[-1]) if parts else module


def _can_be_fused(norm: nn.Module, relu: nn.Module, pool: nn.Module) -> bool:
    return (
        # Pooling may come first only where the order of values is kept: a learned scale could be negative.
        type(norm) is _BatchStatisticsNorm
        and norm.weight is None
        and type(relu) is nn.ReLU
        and type(pool) is nn.MaxPool2d
        and pool.kernel_size in (2, (2, 2))
        and pool.stride in (2, (2, 2))
        and pool.padding in (0, (0, 0))
        and pool.dilation in (1, (1, 1))
        and not (pool.ceil_mode or pool.return_indices)
        and not any(m._forward_hooks or m._forward_pre_hooks for m in (norm, relu, pool))
    )
