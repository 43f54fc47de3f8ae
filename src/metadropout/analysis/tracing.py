"""Looking into a learner's passes: what each layer gets and gives, and how strongly it is perturbed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from metadropout.learners import GradientLearner, Learner
from metadropout.networks.functional import Normalisation
from metadropout.networks.layers import find_activations
from metadropout.noise import NoiseSource, NoiseStream
from metadropout.perturbations import Perturbation, PerturbedNetwork
from metadropout.perturbations.combined import parts_of

Weights = Mapping[str, Tensor]


@dataclass(frozen=True)
class LayerTrace:
    """What happened at one layer in one pass; all but `input` have the shape of the layer's output."""

    input: Tensor
    output: Tensor
    """What the layer gave, before any perturbation."""
    perturbed: Tensor
    """What the network went on with, after the layer or, if the perturbation acts there, after its ReLU."""
    undisturbed: Tensor
    """What it would have gone on with in a deterministic pass, from the same input."""
    multiplier: Tensor | None
    """The deterministic pass's factor, where the perturbation is multiplicative."""
    activation: Tensor
    """What the `nn.ReLU` after the layer gave; where there is none, the same as `perturbed`."""


@dataclass(frozen=True)
class Trace:
    """One pass, layer by layer."""

    hidden: dict[str, LayerTrace]
    """The hidden layers in the order in which they ran."""
    head: LayerTrace

    @property
    def features(self) -> Tensor:
        """What the head gets, shape (n, features)."""
        return self.head.input

    @property
    def logits(self) -> Tensor:
        """What the head gives, before any noise on the logits, shape (n, way)."""
        return self.head.output

    def after(self, number: int) -> Tensor:
        """Return the features that hidden layer `number`, counted from 1, hands to the next layer."""
        return [*self.hidden.values(), self.head][number].input


class Probe:
    """Runs the passes of a learner and keeps what happens at each layer, as plain values without a graph.

    Works on any network, because it hooks on the layers that perturbations act on (those of the learner's perturbation,
    or the ones that a perturbation would find).
    """

    def __init__(self, learner: GradientLearner) -> None:
        self.learner, self.found = learner, learner.layers()
        self._activations = find_activations(learner.network)
        watched = (*self.found.hidden, self.found.head, *self._activations)
        self._perturbed = PerturbedNetwork(
            learner.network,
            learner.perturbation,
            precision=learner.precision,
            watched=watched,
            compose=learner.network_weights,
        )

    @torch.no_grad()
    def __call__(
        self,
        weights: Weights,
        x: Tensor,
        *,
        stream: NoiseStream | None = None,
        normalisation: Normalisation | None = None,
    ) -> Trace:
        """Run images through the network.

        Args:
            weights: all parameters of the learner by name.
            x: images.
            stream: noise, which makes this a support pass; without it the pass is deterministic, as for query images.
            normalisation: whose statistics to use; the batch's own by default.
        """
        perturbation = self.learner.perturbation
        deterministic = self._perturbed.query_pass(weights)
        context = deterministic if stream is None else self._perturbed.support_pass(weights, (stream,))
        listed = {*self.found.hidden, self.found.head}
        layers: dict[str, LayerTrace] = {}
        newest: list[str] = []  # the layer whose ReLU has not run yet

        def watch(name: str, h: Tensor, f: Tensor, result: Tensor) -> None:
            acts = name in perturbation.sites
            if name in listed:
                factor, undisturbed = None, result
                if acts and perturbation.traits.multiplicative and name != self.found.head:
                    factor = perturbation.after(name, h, torch.ones_like(f), deterministic)
                    undisturbed = f * factor
                elif acts and context.support:
                    undisturbed = perturbation.after(name, h, f, deterministic)
                layers[name] = LayerTrace(h, f, result, undisturbed, factor, activation=result)
                newest[:] = [name]
            elif newest and name in self._activations:
                layer = replace(layers[newest[0]], activation=result)
                if acts:
                    undisturbed = perturbation.after(name, h, f, deterministic)
                    layer = replace(layer, perturbed=result, undisturbed=undisturbed)
                layers[newest.pop()] = layer

        self._perturbed.run(weights, x, context, normalisation, watch)
        if self.found.head not in layers:
            raise ValueError(f"'{self.found.head}' did not run as a module, so the last features cannot be seen")
        head = layers.pop(self.found.head)
        return Trace(layers, head)

    def for_queries(self, weights: Weights, support_x: Tensor, *, inductive: bool) -> Normalisation:
        """Return the normalisation of query images: in the inductive protocol by the support images' statistics."""
        if not inductive:
            return Normalisation()
        return Normalisation(given=self._perturbed.statistics(weights, support_x))


def initial_weights(learner: Learner) -> dict[str, Tensor]:
    """Return a learner's parameters as they are before any inner step."""
    return {name: p.detach() for name, p in learner.named_parameters()}


def draws_features(perturbation: Perturbation) -> bool:
    """Say whether support passes perturb features at random: not so where nothing is drawn, or images are mixed."""
    parts = [part.traits for part in parts_of(perturbation)]
    noisy = any(part.random and {"features", "weights"} & {*part.changes} for part in parts)
    return noisy and all("labels" not in part.changes for part in parts)


def noise_strengths(learner: Learner, x: Tensor, noise: NoiseSource) -> dict[str, float]:
    """Measure how strong the noise on each hidden layer is, at the weights before any inner step.

    "strength/LAYER" is the noise's root mean square over that of the undisturbed output, and "multiplier/LAYER" the
    mean of the deterministic factor, where there is one. Empty for learners that put no noise on the outputs of layers.
    """
    if not isinstance(learner, GradientLearner) or not draws_features(learner.perturbation):
        return {}
    trace = Probe(learner)(initial_weights(learner), x, stream=noise.stream(0, 0))
    values = {}
    for name, layer in trace.hidden.items():
        if torch.equal(layer.perturbed, layer.undisturbed):
            continue  # this layer is left alone, or its weights are perturbed and not its output
        signal = layer.undisturbed.square().mean().sqrt().clamp_min(1e-12)
        values[f"strength/{name}"] = float((layer.perturbed - layer.undisturbed).square().mean().sqrt() / signal)
        if layer.multiplier is not None:
            values[f"multiplier/{name}"] = float(layer.multiplier.mean())
    return values
