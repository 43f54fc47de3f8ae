"""Batch normalisation by choice, and the running averages of those that have them."""

from __future__ import annotations

from typing import Annotated, Literal

from torch import Tensor, nn

from metadropout.ops.normalisation import OffsetNorm, Statistics
from metadropout.options import Limits

Norm = Literal["offset", "batch", "running"]
NormEps = Annotated[float, Limits(0, 1, above=True)]

BATCH_NORMS = (OffsetNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)

LayerStatistics = dict[str, Statistics]
"""Mean and variance per channel of each batch normalisation, by the layer's name."""


def make_norm(kind: Norm, channels: int, eps: float | None = None) -> nn.Module:
    """Return a batch normalisation of images.

    Args:
        kind: "offset" has a learned offset, "batch" a scale as well, "running" also running averages.
        channels: number of channels.
        eps: added to the variance; by default 1e-3 for "offset", as in MAML, and 1e-5 for the others, as in PyTorch.
    """
    if kind == "offset":
        return OffsetNorm(channels, 1e-3 if eps is None else eps)
    if kind not in ("batch", "running"):
        raise ValueError(f"norm is '{kind}', but only 'offset', 'batch' and 'running' are known")
    return nn.BatchNorm2d(channels, 1e-5 if eps is None else eps, track_running_stats=kind == "running")


def averaging_norms(network: nn.Module) -> dict[str, nn.Module]:
    """Find the batch normalisations of a network by name, if all of them have running averages; none otherwise."""
    norms: dict[str, nn.Module] = {name: m for name, m in network.named_modules() if isinstance(m, BATCH_NORMS)}
    if any(getattr(norm, "running_mean", None) is None for norm in norms.values()):
        return {}
    for name, norm in norms.items():
        if not isinstance(norm.momentum, float):
            raise ValueError(f"'{name}' has momentum {norm.momentum}: its running averages need a number, such as 0.1")
    return norms


def average_names(network: nn.Module) -> list[str]:
    """List the names of a network's running averages, which are buffers."""
    return [f"{name}.{part}" for name in averaging_norms(network) for part in ("running_mean", "running_var")]


def averages(network: nn.Module) -> LayerStatistics:
    """Return a copy of a network's running averages, for normalising with them."""
    return {
        name: Statistics(norm.get_buffer("running_mean").clone(), norm.get_buffer("running_var").clone())
        for name, norm in averaging_norms(network).items()
    }


def averages_after(network: nn.Module, seen: LayerStatistics) -> dict[str, Tensor]:
    """Return what a batch makes of the running averages, by their names; the network is left as it is.

    Args:
        network: whose averages they are.
        seen: the statistics of the batch.
    """
    after = {}
    for name, norm in averaging_norms(network).items():
        mean, variance, size = seen[name]
        # As in PyTorch: the average is of the unbiased variance.
        new = {"running_mean": mean, "running_var": variance * (size / max(1, size - 1))}
        for part, value in new.items():
            after[f"{name}.{part}"] = norm.get_buffer(part).lerp(value.detach(), norm.momentum)  # type: ignore[arg-type]
    return after
