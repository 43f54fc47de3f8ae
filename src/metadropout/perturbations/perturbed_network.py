"""A network under a perturbation: support passes, query passes and their normalisation, for every learner alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from metadropout.networks.functional import FunctionalNetwork, Normalisation
from metadropout.networks.norms import LayerStatistics
from metadropout.noise import CounterStream, NoiseStream
from metadropout.ops.precision import Precision
from metadropout.perturbations.base import Pass, Perturbation, Weights

Composition = Callable[[Weights, Mapping[str, Tensor]], Weights]
"""Called with the network's weights and all of the learner's; what it returns is what the network runs with."""

Watcher = Callable[[str, Tensor, Tensor, Tensor], None]
"""Called with a layer's name, input, output, and what the network went on with."""


class PerturbedNetwork:
    """Runs a network with the perturbation's say at each layer, as a function of the weights of both.

    Weights are a learner's, by name: those that begin with "network." and "perturbation." are used, others are passed
    over. So any learner can run any perturbation on any network, with weights that it has adapted, drawn or averaged.

    Args:
        network: any module.
        perturbation: what acts on it.
        precision: of convolutions.
        norm_second_order: how much of the derivative of gradients that come back through batch normalisations is kept.
        watched: names of further layers that are shown to the watcher of a pass.
        compose: what the network runs with in place of its own weights, after the perturbation has changed those.
    """

    def __init__(
        self,
        network: nn.Module,
        perturbation: Perturbation,
        *,
        precision: Precision = "full",
        norm_second_order: float = True,
        watched: Iterable[str] = (),
        compose: Composition = lambda theta, weights: theta,
    ) -> None:
        self._compose = compose
        self.network, self.perturbation, self.precision = network, perturbation, precision
        self._acts_on = frozenset(perturbation.sites)
        outputs = dict.fromkeys((*watched, *perturbation.sites))
        self._function = FunctionalNetwork(network, outputs, perturbation.input_sites, precision, norm_second_order)
        self._unperturbed = self._function
        if perturbation.traits.support_only:  # layers that nothing acts on can be run together
            self._unperturbed = FunctionalNetwork(network, watched, (), precision, norm_second_order)
        self._calls_checked = False

    def support_pass(self, weights: Mapping[str, Tensor], streams: Sequence[NoiseStream] = ()) -> Pass:
        """Return what the perturbation gets in a support pass with these noise samples side by side."""
        return Pass(with_prefix(weights, "perturbation."), streams, support=True, precision=self.precision)

    def query_pass(self, weights: Mapping[str, Tensor]) -> Pass:
        """Return what the perturbation gets in a deterministic pass."""
        return Pass(with_prefix(weights, "perturbation."), precision=self.precision)

    def run(
        self,
        weights: Mapping[str, Tensor],
        x: Tensor,
        context: Pass,
        normalisation: Normalisation | None = None,
        watcher: Watcher | None = None,
    ) -> Tensor:
        """Run images through the network and return its output, the logits.

        Args:
            weights: all weights of a learner by name.
            x: images.
            context: a support pass or a deterministic one.
            normalisation: whose statistics to use; the batch's own by default.
            watcher: is shown the layers that are perturbed or watched.
        """
        theta = with_prefix(weights, "network.")
        acts = context.support or not self.perturbation.traits.support_only

        def on_output(name: str, h: Tensor, f: Tensor) -> Tensor:
            result = f
            if acts and name in self._acts_on:
                result = self.perturbation.after(name, h, f, context)
            if watcher is not None:
                watcher(name, h, f, result)
            return result

        def on_input(name: str, h: Tensor) -> Tensor:
            return self.perturbation.before(name, h, context)

        if not acts:
            return self._unperturbed(self._compose(theta, weights), x, on_output, normalisation)
        self._check_calls(theta, x)
        theta = self._compose(self.perturbation.change_weights(theta, context), weights)
        return self._function(theta, x, on_output, normalisation, on_input)

    def run_together(
        self,
        weights: Mapping[str, Tensor],
        support_x: Tensor,
        query_x: Tensor,
        streams: Sequence[NoiseStream] = (),
        normalisation: Normalisation | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Run support and query images in one batch, so that they share normalisation's statistics.

        The support images are perturbed as in a support pass, the query images as in a deterministic one. As a batch
        has one set of weights, perturbations of weights cannot act.

        Returns:
            The outputs for the support images, as many times over as there are noise samples, and for the query images.
        """
        support, query = self.support_pass(weights, streams), self.query_pass(weights)
        repeated = support_x.repeat(max(1, len(streams)), *[1] * (support_x.dim() - 1))
        n = len(repeated)
        theta = with_prefix(weights, "network.")
        self._check_calls(theta, query_x)
        theta = self._compose(theta, weights)

        def on_output(name: str, h: Tensor, f: Tensor) -> Tensor:
            noisy = self.perturbation.after(name, h[:n], f[:n], support)
            return torch.cat([noisy, self.perturbation.after(name, h[n:], f[n:], query)])

        def on_input(name: str, h: Tensor) -> Tensor:
            changed = self.perturbation.before(name, h[:n], support)
            return torch.cat([changed, self.perturbation.before(name, h[n:], query)])

        outputs = self._function(theta, torch.cat([repeated, query_x]), on_output, normalisation, on_input)
        return outputs[:n], outputs[n:]

    def support_loss(
        self, weights: Mapping[str, Tensor], x: Tensor, y: Tensor, streams: Sequence[NoiseStream] = ()
    ) -> Tensor:
        """Return the loss of one support pass, averaged over images and the noise samples that share the pass."""
        # Each sample is normalised by its own statistics.
        repeat = max(1, len(streams))
        x, context = self.support_batch(weights, x, streams)
        logits = self.run(weights, x, context, Normalisation(repeat))
        y = y.repeat(repeat)
        with labels_explained(y, logits):
            loss = self.perturbation.label_loss(logits, y, context)
        penalty = self.perturbation.penalty(context)
        return loss if penalty is None else loss + penalty

    def support_batch(
        self, weights: Mapping[str, Tensor], x: Tensor, streams: Sequence[NoiseStream]
    ) -> tuple[Tensor, Pass]:
        """Return the images and the support pass in which the noise samples are one after the other in one batch."""
        context = self.support_pass(weights, streams)
        if self._share_first_layer(streams):
            return x, replace(context, images=len(x))
        return x.repeat(max(1, len(streams)), *[1] * (x.dim() - 1)), context

    def _share_first_layer(self, streams: Sequence[NoiseStream]) -> bool:
        """Say whether the first layer, which does not depend on the noise, can be computed once for all samples."""
        return (
            len(streams) > 1
            and self.perturbation.traits.shares_first_layer
            and getattr(self.network, "first_layer", None) in self._acts_on
            # Sums of gradients are rounded in another way; runs that draw from other sources keep to theirs.
            and all(isinstance(stream, CounterStream) for stream in streams)
        )

    def statistics(self, weights: Mapping[str, Tensor], x: Tensor) -> LayerStatistics:
        """Return each batch normalisation's statistics in a deterministic pass over images."""
        collected: LayerStatistics = {}
        self.run(weights, x, self.query_pass(weights), Normalisation(collected=collected))
        return collected

    def classifier(
        self, weights: Mapping[str, Tensor], support_x: Tensor, *, inductive: bool
    ) -> Callable[[Tensor], Tensor]:
        """Return the network under given weights as a function of query images.

        Args:
            weights: adapted weights.
            support_x: the images that they were adapted to.
            inductive: normalise query images one by one, with the statistics of the support images, and not with
                those of the query batch.
        """
        context = self.query_pass(weights)
        given = self.statistics(weights, support_x) if inductive else None

        def classify(x: Tensor) -> Tensor:
            return self.run(weights, x, context, Normalisation(given=given))

        return classify

    def joint_classifier(
        self, weights: Mapping[str, Tensor], support_x: Tensor, images_per_pass: int
    ) -> Callable[[Tensor], Tensor]:
        """Return the network as a function of query images, each normalised in one batch with the support images.

        Args:
            weights: adapted weights.
            support_x: the images that they were adapted to.
            images_per_pass: most images in one pass, unless it is for a single query image.
        """
        n, context = len(support_x), self.query_pass(weights)

        def classify(x: Tensor) -> Tensor:
            logits = []
            for queries in torch.split(x, max(1, images_per_pass // (n + 1))):
                batches = torch.cat([part for image in queries for part in (support_x, image[None])])
                outputs = self.run(weights, batches, context, Normalisation(groups=len(queries)))
                logits.append(outputs.view(len(queries), n + 1, -1)[:, -1])
            return torch.cat(logits)

        return classify

    def change_images(self, weights: Mapping[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        """Let the perturbation change the images of an inner step; the change is treated as constant."""
        constant = {name: w.detach() for name, w in weights.items()}
        return self.perturbation.change_images(
            x, y, lambda images: self.run(constant, images, self.query_pass(constant))
        )

    def _check_calls(self, theta: Weights, x: Tensor) -> None:
        """Show the perturbation, before it acts for the first time, which layers run, in a pass of its own."""
        if self._calls_checked:  # once: a network runs its layers in the same way every time
            return
        outputs: list[str] = []
        inputs: list[str] = []
        shapes: dict[str, torch.Size] = {}

        def on_output(name: str, h: Tensor, f: Tensor) -> Tensor:
            if name in self._acts_on:
                outputs.append(name)
                shapes[name] = f.shape
            return f

        def on_input(name: str, h: Tensor) -> Tensor:
            inputs.append(name)
            return h

        with torch.no_grad():
            logits = self._function(theta, x, on_output, on_input=on_input)
        as_wide = [name for name, shape in shapes.items() if logits.shape[1] in shape[1:]]
        self.perturbation.check_calls(outputs, inputs, as_wide)
        self._calls_checked = True


@contextmanager
def labels_explained(y: Tensor, logits: Tensor) -> Iterator[None]:
    """Say which label is out of range where PyTorch's loss complains of one."""
    try:
        yield
    except IndexError:
        way = logits.shape[1]
        for label in (int(y.max()), int(y.min())):
            if not 0 <= label < way:
                raise ValueError(f"a label is {label}, but the network has {way} outputs") from None
        raise


def with_prefix(weights: Mapping[str, Tensor], prefix: str) -> Weights:
    """Pick the weights whose names start with a prefix, under their names without it."""
    return {name.removeprefix(prefix): w for name, w in weights.items() if name.startswith(prefix)}
