"""ResNet-12, the deeper network that few-shot learning commonly uses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

from torch import Tensor, nn
from torch.nn import functional as F

from metadropout.networks.initial import initialise, make_head
from metadropout.networks.norms import Norm, NormEps, make_norm
from metadropout.ops.memory_format import ChannelsLast, channels_last
from metadropout.options import Channels


class ResNet12(nn.Module, ChannelsLast):
    """Four residual blocks of three convolutions, global average pooling and one linear layer.

    The normalisation is Conv4's; there is no DropBlock, so that perturbations can be compared without it.
    Perturbations act on the 3x3 convolutions: `perturbable` leaves the 1x1 shortcuts out. Mixup mixes the inputs of
    whole blocks: within one, the shortcut would not see it.

    Args:
        way: number of classes in a task; None for a network that gives features and has no head.
        in_channels: 1 for grey images, 3 for colour.
        image_size: height and width of the images, at least 16; the weights do not depend on it.
        channels: output channels of the four blocks.
        norm: batch normalisation with an offset ("offset"), with a scale as well ("batch"), or also with running
            averages, which metric-based learners use in the inductive protocol ("running").
        norm_eps: what normalisation adds to the variance; by default 1e-3 for "offset" and 1e-5 for the others.
    """

    title = "ResNet-12"
    citation = "He et al., 2016; Oreshkin et al., 2018"

    def __init__(
        self,
        way: int | None,
        *,
        in_channels: int = 3,
        image_size: int = 84,
        channels: Sequence[Channels] = (64, 128, 256, 512),
        norm: Norm = "offset",
        norm_eps: NormEps | None = None,
    ) -> None:
        super().__init__()
        if image_size < 2 ** len(channels):
            raise ValueError(f"image_size is {image_size}, but {len(channels)} poolings need {2 ** len(channels)}")
        if not channels or min(channels) < 1:
            raise ValueError(f"channels is {list(channels)}; each block needs at least 1")
        widths = [in_channels, *channels]
        make = partial(make_norm, norm, eps=norm_eps)
        self.blocks = nn.Sequential(*[ResidualBlock(a, b, make) for a, b in pairwise(widths)])
        self.features = channels[-1]
        self.head = make_head(self.features, way)

    @property
    def perturbable(self) -> list[str]:
        """Names of the layers that perturbations act on, the head aside."""
        return [name for name, layer in self.named_modules() if isinstance(layer, nn.Conv2d) and "shortcut" not in name]

    @property
    def mixable(self) -> list[str]:
        """Names of the modules at whose inputs mixup may mix, the head aside."""
        return [f"blocks.{number}" for number in range(len(self.blocks))]

    def forward(self, x: Tensor) -> Tensor:
        features = self.blocks(channels_last(x))  # (n, channels, side, side)
        return self.head(features.mean(dim=(2, 3)))  # type: ignore[no-any-return]


class ResidualBlock(nn.Module):
    """Three 3x3 convolutions beside a 1x1 shortcut, then ReLU and 2x2 pooling."""

    def __init__(self, in_channels: int, out_channels: int, make_norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        widths = [in_channels, out_channels, out_channels]
        self.convs = nn.ModuleList([nn.Conv2d(w, out_channels, kernel_size=3, padding=1) for w in widths])
        self.norms = nn.ModuleList([make_norm(out_channels) for _ in widths])
        self.relus = nn.ModuleList([nn.ReLU() for _ in widths])  # modules, so that perturbations can act after them
        self.shortcut_conv = nn.Conv2d(in_channels, out_channels, kernel_size=1)
        self.shortcut_norm = make_norm(out_channels)
        for layer in [*self.convs, self.shortcut_conv]:
            initialise(layer)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = self.shortcut_norm(self.shortcut_conv(x))
        x = self.relus[0](self.norms[0](self.convs[0](x)))
        x = self.relus[1](self.norms[1](self.convs[1](x)))
        x = self.relus[2](self.norms[2](self.convs[2](x)) + shortcut)
        return F.max_pool2d(x, kernel_size=2)
