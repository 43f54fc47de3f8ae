"""Any network as a pure function of its weights, with a say at each layer: nothing of the user's is touched."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn
from torch.func import functional_call

from metadropout.networks.normalisation import (
    OffsetNorm,
    batch_normalise,
    batch_statistics,
    normalise_with,
)

LayerHook = Callable[[str, Tensor, Tensor], Tensor]
"""Called with a layer's name, input and output; what it returns takes the place of the output."""

BATCH_NORMS = (OffsetNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
NORMS = (*BATCH_NORMS, nn.LayerNorm, nn.GroupNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)

LayerStatistics = dict[str, tuple[Tensor, Tensor]]
"""Mean and variance per channel of each batch normalisation, by the layer's name."""


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
    hook: LayerHook | None = None


class FunctionalNetwork:
    """A network as a function (weights, images) → logits, whose listed layers report to a hook.

    It runs on a private copy of the network's structure that holds no weights of its own. In the copy, batch
    normalisations use the statistics of the batch (running averages are neither used nor changed) and other
    layers are in evaluation mode: `nn.Dropout` does nothing, because randomness has to come from a perturbation.

    Args:
        network: any module that maps images to logits.
        hooked: names of the layers whose outputs a hook may replace.
    """

    def __init__(self, network: nn.Module, hooked: Iterable[str]) -> None:
        self._network = network
        self._current = _Call()
        self._structure = self._copy_of(network)
        for name in hooked:
            self._structure.get_submodule(name).register_forward_hook(self._reporting(name))

    def __call__(
        self,
        weights: Mapping[str, Tensor],
        x: Tensor,
        hook: LayerHook | None = None,
        normalisation: Normalisation | None = None,
    ) -> Tensor:
        """Return the logits of images `x` under the given weights.

        Args:
            weights: all parameters of the network by name.
            x: images, shape (n, channels, height, width).
            hook: called at each listed layer.
            normalisation: whose statistics to use; the batch's own by default.
        """
        self._current = _Call(normalisation or Normalisation(), hook)
        try:
            tensors = {**weights, **dict(self._network.named_buffers())}
            return functional_call(self._structure, tensors, (x,))  # type: ignore[no-any-return]
        finally:
            self._current = _Call()  # keeps no graph alive

    def _copy_of(self, network: nn.Module) -> nn.Module:
        structure = copy.deepcopy(network).to("meta").eval()
        replaced: dict[int, nn.Module] = {}
        for name, module in list(structure.named_modules(remove_duplicate=False)):
            if isinstance(module, BATCH_NORMS):
                parent, _, child = name.rpartition(".")
                new = replaced.setdefault(id(module), _BatchStatisticsNorm(name, module, self))
                setattr(structure.get_submodule(parent), child, new)
        return structure

    def _reporting(self, name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], Tensor]:
        def report(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            hook = self._current.hook
            return output if hook is None else hook(name, inputs[0], output)

        return report


class _BatchStatisticsNorm(nn.Module):
    """Stands in the copy for a batch normalisation, under the same parameter names."""

    def __init__(self, name: str, original: nn.Module, owner: FunctionalNetwork) -> None:
        super().__init__()
        self.name, self.eps = name, float(original.eps)  # type: ignore[arg-type]
        self.register_parameter("weight", original.weight)  # type: ignore[arg-type]
        self.register_parameter("bias", original.bias)  # type: ignore[arg-type]
        self._owner = [owner]  # in a list, so that nothing takes it for a part of this module

    def forward(self, x: Tensor) -> Tensor:
        how = self._owner[0]._current.normalisation
        if how.given is not None:
            mean, variance = how.given[self.name]
            return normalise_with(x, mean, variance, self.weight, self.bias, self.eps)
        if how.collected is not None:
            how.collected[self.name] = batch_statistics(x)
        return batch_normalise(x, self.weight, self.bias, self.eps, how.groups)
