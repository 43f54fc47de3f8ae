"""What a perturbation is: something that acts on a network while it learns from support images."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from metadropout.noise import CounterStream, NoiseStream
from metadropout.ops.kernels import Draws, values
from metadropout.ops.memory_format import laid_out_like
from metadropout.ops.precision import Precision

_log = logging.getLogger(__name__)

Weights = dict[str, Tensor]

Target = Literal["features", "weights", "labels", "images"]
"""What a perturbation can act on."""


@dataclass(frozen=True)
class Traits:
    """How learners must treat a perturbation."""

    changes: tuple[Target, ...] = ()
    """What it acts on; two perturbations that act on the same thing cannot be combined."""
    random: bool = False
    """Whether support passes draw noise, so that averaging Monte-Carlo samples has a meaning."""
    samples_share_a_batch: bool = True
    """Whether noise samples may stand in one batch; not where one draw rules a whole pass."""
    shares_first_layer: bool = False
    """Whether `after` may be given the first layer's images once for all samples, to return them once for each."""
    tasks_share_a_batch: bool = True
    """Whether `torch.vmap` can run several tasks at once; not where other numbers than normal ones are drawn
    (`Pass.numbers`), gradients are taken in a pass, or values decide what happens."""
    adapts: bool = False
    """Whether its own parameters take part in the inner steps."""
    support_only: bool = False
    """Whether it changes nothing in the deterministic pass over query images, which then runs faster, without it."""
    multiplicative: bool = False
    """Whether hidden layers' outputs are multiplied by a factor that does not depend on them, on query images, too."""
    needs_second_order: str | None = None
    """Why a first-order learner could not train it; None if one can."""

    def __post_init__(self) -> None:
        if not isinstance(self.changes, tuple) or not set(self.changes) <= set(get_args(Target)):
            known = ", ".join(get_args(Target))
            raise ValueError(f"changes is {self.changes!r}; it lists what is acted on, of {known}: ('features',), say")


def merged(parts: Sequence[Traits]) -> Traits:
    """Return the traits of several perturbations that act one after the other."""
    return Traits(
        changes=tuple(dict.fromkeys(target for part in parts for target in part.changes)),
        random=any(part.random for part in parts),
        samples_share_a_batch=all(part.samples_share_a_batch for part in parts),
        shares_first_layer=False,  # the others would be given the images once for each sample, or once for all
        tasks_share_a_batch=all(part.tasks_share_a_batch for part in parts),
        adapts=any(part.adapts for part in parts),
        support_only=all(part.support_only for part in parts),
        multiplicative=any(part.multiplicative for part in parts),
        needs_second_order=next((part.needs_second_order for part in parts if part.needs_second_order), None),
    )


@dataclass(frozen=True)
class Pass:
    """What a perturbation is given in one forward pass."""

    weights: Mapping[str, Tensor]
    """The perturbation's own parameters by name; not its attributes, because a learner may have adapted them."""
    streams: Sequence[NoiseStream] = ()
    """One noise stream per Monte-Carlo sample that stands in the batch; none where nothing is drawn."""
    support: bool = False
    """Whether this is a support pass of an inner step, and not the deterministic pass over query images."""
    precision: Precision = "full"
    """That of convolutions, for layers that a perturbation runs itself."""
    images: int | None = None
    """Images per sample, where the samples share those that go into the first layer."""
    notes: dict[str, Any] = field(default_factory=dict)
    """What a perturbation wants to remember from one layer to the next, for instance terms of the loss."""

    def normal(self, like: Tensor) -> Tensor:
        """Draw standard normal noise of the shape of `like`, whose batch holds the samples one after the other."""
        noise = self.noise_for_product(like)
        return laid_out_like(noise if isinstance(noise, Tensor) else values(noise, like), like)

    def noise_for_product(self, like: Tensor) -> Tensor | Draws:
        """Draw the same as `noisy_product` takes it: in any memory layout, or not computed yet.

        Where `like` holds images that all samples share, the noise is of the shape of all samples.
        """
        if not self.streams:
            raise ValueError("there is no noise to draw from: say so in its class: traits = Traits(random=True)")
        if all(isinstance(stream, CounterStream) for stream in self.streams):
            total = len(like) if self.images is None else self.images * len(self.streams)
            return Draws(tuple(s.next_key() for s in self.streams), (total, *like.shape[1:]))  # type: ignore[attr-defined]
        shape = (like.shape[0] // len(self.streams), *like.shape[1:])
        draws = [stream.normal(shape, like) for stream in self.streams]
        return draws[0] if len(draws) == 1 else torch.cat(draws)

    def numbers(self) -> np.random.Generator:
        """Return a generator for choices of the whole pass; only where samples do not share a batch."""
        (stream,) = self.streams
        return stream.numbers()


class Perturbation(nn.Module):
    """Acts on a network in the support passes of the inner loop; the network does not know of it.

    The methods below are called in this order: `check_calls` once, `change_images` once per inner step, then in each
    pass `change_weights`, `before` and `after` at each listed layer, and `label_loss` and `penalty` at the end. By
    default they change nothing. A subclass overrides what it needs, has its own meta-learned parameters, if any, and
    says by its `traits` how learners must treat it. The keyword-only arguments of its constructor are its
    options on the command line.
    """

    title: ClassVar[str] = ""
    """What it is called in reports; by default its name in recipes."""
    citation: ClassVar[str] = ""
    """Who described it, as in "Lee et al., 2020"."""
    traits: Traits = Traits()
    """How learners must treat it."""

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        for name in vars(cls).keys() & Traits.__dataclass_fields__.keys():
            raise TypeError(f"{cls.__name__}.{name} has no effect: write traits = Traits({name}=...)")

    def __init__(self, network: nn.Module) -> None:
        super().__init__()

    @property
    def sites(self) -> Sequence[str]:
        """Names of the network's layers whose outputs `after` may replace."""
        return ()

    @property
    def input_sites(self) -> Sequence[str]:
        """Names of the network's layers whose inputs `before` may replace."""
        return ()

    @property
    def adapted_names(self) -> list[str]:
        """Names of its own parameters that the inner steps change."""
        return [name for name, _ in self.named_parameters()] if self.traits.adapts else []

    def check_calls(self, outputs: Sequence[str], inputs: Sequence[str], as_wide: Collection[str]) -> None:
        """Refuse a network whose layers do not run as expected; called before the first pass that is perturbed.

        Args:
            outputs: the layers of `sites` in the order in which they ran.
            inputs: those of `input_sites`.
            as_wide: those of `outputs` that gave as many values, or channels, as the network gives logits.

        Raises:
            ValueError: with the layer's name and what to do.
        """
        if missing := sorted({*self.sites} - {*outputs} | {*self.input_sites} - {*inputs}):
            raise ValueError(
                f"'{missing[0]}' did not run as a module in a forward pass, so {type(self).__name__} cannot act on it; "
                "name the layers to act on: layers=[...]"
            )

    def leave_alone(self, names: Sequence[str]) -> None:
        """Take note, once in a process, that layers which nobody named are not acted on, because they did not run."""
        if names:
            _warn_once(
                f"{type(self).__name__} leaves {', '.join(names)} alone: found by type, but not run as a module "
                "(nn.MultiheadAttention, for one, uses the weights of its out_proj directly)"
            )

    def change_images(self, x: Tensor, y: Tensor, classify: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the images that an inner step learns from.

        Args:
            x: the support images.
            y: their labels.
            classify: the network under the step's weights, deterministic; no gradient reaches the weights.
        """
        return x

    def change_weights(self, theta: Weights, context: Pass) -> Weights:
        """Return the network's weights that a support pass uses."""
        return theta

    def before(self, name: str, h: Tensor, context: Pass) -> Tensor:
        """Return what a layer gets in place of its input h."""
        return h

    def after(self, name: str, h: Tensor, f: Tensor, context: Pass) -> Tensor:
        """Return what the network goes on with after a layer.

        Args:
            name: the layer's name.
            h: the layer's input.
            f: its output, before normalisation.
            context: noise and weights of the pass.
        """
        return f

    def label_loss(self, logits: Tensor, y: Tensor, context: Pass) -> Tensor:
        """Return the loss of a support pass against its labels, averaged over images."""
        return F.cross_entropy(logits, y)

    def penalty(self, context: Pass) -> Tensor | None:
        """Return a term that is added to the loss of a support pass, None for none."""
        return None


@cache
def _warn_once(message: str) -> None:
    _log.warning(message)
