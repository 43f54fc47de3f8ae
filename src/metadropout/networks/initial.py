"""Initial values as in the authors' code (METHOD: convolutions truncated normal, linear layers normal, biases zero)."""

from __future__ import annotations

from torch import nn

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def initialise(layer: nn.Module, std: float = 0.02) -> None:
    """Set a layer's weight to noise of a standard deviation (convolutions cut at two of them), its bias to zero."""
    if isinstance(layer, (*CONVOLUTIONS, *TRANSPOSED)):
        nn.init.trunc_normal_(layer.weight, std=std, a=-2 * std, b=2 * std)
    elif isinstance(layer, nn.Linear):
        nn.init.normal_(layer.weight, std=std)
    else:
        raise TypeError(f"no initial values are defined for a {type(layer).__name__}")
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)


class NoHead(nn.Identity):
    """Is where a head would be, in a network that gives features."""


def make_head(features: int, way: int | None) -> nn.Module:
    """Return the layer that turns features into logits, with its initial values; one that does nothing for no way."""
    if way is None:
        return NoHead()
    head = nn.Linear(features, way)
    initialise(head)
    return head
