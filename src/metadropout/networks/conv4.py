"""The four-block convolutional network of MAML and of the paper's experiments."""

from __future__ import annotations

from collections import OrderedDict
from typing import Annotated

from torch import Tensor, nn

from metadropout.networks.film import FiLM
from metadropout.networks.initial import initialise, make_head
from metadropout.networks.norms import Norm, NormEps, make_norm
from metadropout.ops.memory_format import ChannelsLast, channels_last
from metadropout.options import Channels, Limits


class Conv4(nn.Module, ChannelsLast):
    """Four blocks of convolution, normalisation, ReLU and pooling, then one linear layer (Finn et al., 2017).

    Args:
        way: number of classes in a task; None for a network that gives features and has no head.
        in_channels: 1 for grey images, 3 for colour.
        image_size: height and width of the images.
        channels: width of the network: 64 for Omniglot, 32 for miniImageNet and CIFAR.
        norm: batch normalisation with an offset ("offset", as in MAML), with a scale as well ("batch"), or also with
            running averages, which metric-based learners use in the inductive protocol ("running").
        norm_eps: what normalisation adds to the variance; by default 1e-3 for "offset" and 1e-5 for the others.
        context: size of a vector that scales and shifts the features of the third block (FiLM), for CAVIA; 0 for none.
    """

    title = "Conv4"
    citation = "Finn et al., 2017"
    first_layer = "blocks.0.conv"
    """The layer that images go into, and no other; perturbations need not compute it again for every noise sample."""

    def __init__(
        self,
        way: int | None,
        *,
        in_channels: int = 1,
        image_size: int = 28,
        channels: Channels = 64,
        norm: Norm = "offset",
        norm_eps: NormEps | None = None,
        context: Annotated[int, Limits(0, 10_000)] = 0,
    ) -> None:
        super().__init__()
        if image_size < 16:
            raise ValueError(f"image_size is {image_size}, but four 2x2 poolings need at least 16")
        if channels < 1:
            raise ValueError(f"channels is {channels}; it must be at least 1")
        widths = [in_channels, channels, channels, channels]
        blocks = [_block(w, channels, make_norm(norm, channels, norm_eps)) for w in widths]
        if context:
            blocks[2] = _with_film(blocks[2], FiLM(channels, context))
        self.blocks = nn.Sequential(*blocks)
        side = image_size // 16  # four valid poolings
        self.features = channels * side * side
        self.head = make_head(self.features, way)

    def forward(self, x: Tensor) -> Tensor:
        features = self.blocks(channels_last(x))  # (n, channels, side, side)
        return self.head(features.flatten(1))  # type: ignore[no-any-return]


def _block(in_channels: int, out_channels: int, norm: nn.Module) -> nn.Sequential:
    conv = nn.Conv2d(in_channels, out_channels, kernel_size=3, padding=1)
    initialise(conv)
    return nn.Sequential(OrderedDict(conv=conv, norm=norm, relu=nn.ReLU(), pool=nn.MaxPool2d(kernel_size=2)))


def _with_film(block: nn.Sequential, film: FiLM) -> nn.Sequential:
    """Put FiLM into a block in CAVIA's order, pooling, FiLM, ReLU: as a scale may be negative, the order matters."""
    parts = OrderedDict(block.named_children(), film=film)
    parts.move_to_end("relu")
    return nn.Sequential(parts)
