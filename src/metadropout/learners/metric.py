"""Learners that compare query images with support images: what all of them share is how both become features.

The path of one task, top to bottom: `forward` → `together` (support images with noise and query images without, in one
batch) or `apart` (a support pass with noise, then a query pass) → `logits`, which is all that such a learner says
itself.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot
from torch.utils.checkpoint import checkpoint

from metadropout.data import Episode
from metadropout.learners.base import (
    TEST_SAMPLES,
    Classifier,
    Learner,
    Outcome,
    check_samples,
    class_numbers,
    task_noise,
    with_class_numbers,
)
from metadropout.networks.functional import Normalisation
from metadropout.networks.norms import LayerStatistics, average_names, averages, averages_after
from metadropout.noise import NoiseSource, NoiseStream
from metadropout.ops.precision import Precision
from metadropout.options import Limits
from metadropout.perturbations import NoPerturbation, Perturbation, PerturbedNetwork
from metadropout.perturbations.combined import parts_of
from metadropout.perturbations.layers import LayerPerturbation

Features = tuple[Tensor, Tensor]
"""Features of support and of query images, shapes (samples, n, features) and (samples, m, features)."""

THROUGH_THE_LOSS = ("change_images", "label_loss", "penalty")
"""Methods of perturbations that act through the loss of an inner step."""


class MetricLearner(Learner):
    """Answers by comparing the features of query images with those of support images; nothing is adapted.

    The network, which has no head, is meta-learned from the query loss. A perturbation acts on support images, and is
    meta-learned by the same gradient, of first order. Support and query images go through the network in one batch, and
    so share the statistics of its normalisations. In the inductive protocol these are of the support images alone. A
    network with running averages is trained in one batch in either protocol, which moves the averages, and the
    inductive protocol tests with them.

    Args:
        network: maps images to features; any module.
        perturbation: what perturbs it on support images; nothing by default.
        images_per_pass: most images in one support pass; more noise samples than fit are run in turn.
        precision: "bf16" rounds what convolutions multiply to bfloat16, and on CPUs with AVX512-BF16 also stores images
            so between layers.
    """

    network_gives: ClassVar[Literal["logits", "features"]] = "features"
    is_random: bool = False
    """Whether it draws numbers itself, beside the perturbation's."""

    def __init__(
        self,
        network: nn.Module,
        perturbation: Perturbation | None = None,
        *,
        images_per_pass: Annotated[int, Limits(1, 1_000_000)] = 256,
        precision: Precision = "full",
    ) -> None:
        super().__init__()
        self.network, self.images_per_pass = network, images_per_pass
        self.perturbation = perturbation or NoPerturbation(network)
        _check_perturbation(self.perturbation, network, type(self).__name__)
        self.perturbed = PerturbedNetwork(network, self.perturbation, precision=precision)

    @abstractmethod
    def logits(self, weights: Mapping[str, Tensor], support: Tensor, members: Tensor, query: Tensor) -> Tensor:
        """Return the logits of query images, shape (m, way).

        Args:
            weights: all parameters of the learner, to be used in place of its attributes.
            support: features of the support images under each noise sample, shape (samples, n, features).
            members: 1 where a support image is of a class, 0 elsewhere, shape (n, way).
            query: features of the query images beside each of these, shape (samples, m, features).
        """

    def forward(self, episode: Episode, *, generator: torch.Generator | NoiseSource | None = None) -> Outcome:
        episode = with_class_numbers(episode)
        weights, noise = dict(self.named_parameters()), self.noise_from(generator)
        x, y = self.arranged(episode.support_x, episode.support_y, noise)
        members, seen = memberships(y).to(x), LayerStatistics()
        if episode.inductive and not self.changed_buffers():
            features = self.apart(weights, x, noise, 1)(episode.query_x)
        else:
            features = self.together(weights, x, episode.query_x, noise, 1, seen if self.changed_buffers() else None)
        support, query = features
        logits = self.logits(weights, support, members, query)
        after = averages_after(self.network, seen)
        return Outcome(
            cross_entropy(logits, episode.query_y), logits, {f"network.{name}": value for name, value in after.items()}
        )

    def adapt(
        self,
        x: Tensor,
        y: Tensor,
        *,
        inductive: bool = False,
        mc_samples: int | None = None,
        generator: torch.Generator | NoiseSource | None = None,
    ) -> Classifier:
        with torch.inference_mode(False), torch.no_grad():
            x, y = (t.clone() if t.is_inference() else t for t in (x, class_numbers(y, x)))
            samples, noise = self.samples_used(mc_samples), self.noise_from(generator)
            # Copies, so that the classifier stays what it is when training goes on.
            weights = {name: p.detach().clone() for name, p in self.named_parameters()}
            x, y = self.arranged(x, y, noise)
            members = memberships(y).to(x)
            apart = self.apart(weights, x, noise, samples, averages(self.network)) if inductive else None

        def classify(query_x: Tensor) -> Tensor:
            support, query = apart(query_x) if apart else self.together(weights, x, query_x, noise, samples)
            return self.logits(weights, support, members, query)

        return classify

    # Two ways from images to features.

    def together(
        self,
        weights: Mapping[str, Tensor],
        x: Tensor,
        query_x: Tensor,
        noise: NoiseSource | None,
        samples: int,
        seen: LayerStatistics | None = None,
    ) -> Features:
        """Return the features of support and query images, which share a batch, one for each noise sample.

        Args:
            weights: all parameters of the learner.
            x: support images.
            query_x: query images.
            noise: source of all randomness.
            samples: noise samples.
            seen: filled with the statistics of the batch, of which there is one then; None saves their computation.
        """

        def run(query_x: Tensor, sample: int) -> Features:
            streams = self.streams(noise, range(sample, sample + 1))
            return self.perturbed.run_together(weights, x, query_x, streams, Normalisation(collected=seen))

        # Whoever differentiates by images would hold the graphs of all passes: take each again when it is needed.
        again = partial(checkpoint, run, use_reentrant=False) if samples > 1 and torch.is_grad_enabled() else run
        support, query = zip(*[again(query_x, sample) for sample in range(samples)], strict=True)
        return torch.stack(support), torch.stack(query)

    def apart(
        self,
        weights: Mapping[str, Tensor],
        x: Tensor,
        noise: NoiseSource | None,
        samples: int,
        given: LayerStatistics | None = None,
    ) -> Callable[[Tensor], Features]:
        """Return a function from query images to features of support and query images, which do not share a batch.

        Args:
            weights: all parameters of the learner.
            x: support images.
            noise: source of all randomness.
            samples: noise samples.
            given: statistics for all images. Without them support images have the statistics of their own pass, as in
                inner steps, and query images those of a deterministic pass over support images.
        """
        per_pass = max(1, self.images_per_pass // len(x)) if self.perturbation.traits.samples_share_a_batch else 1
        parts = []
        for first in range(0, samples, per_pass):
            numbers = range(first, min(first + per_pass, samples))
            images, context = self.perturbed.support_batch(weights, x, self.streams(noise, numbers))
            how = Normalisation(given=given) if given else Normalisation(len(numbers))
            parts.append(self.perturbed.run(weights, images, context, how))
        support = torch.cat(parts).view(samples, len(x), -1)
        for_queries = Normalisation(given=given or self.perturbed.statistics(weights, x))

        def features(query_x: Tensor) -> Features:
            query = self.perturbed.run(weights, query_x, self.perturbed.query_pass(weights), for_queries)
            return support, query.expand(samples, *query.shape)

        return features

    def streams(self, noise: NoiseSource | None, samples: range) -> list[NoiseStream]:
        """Return the draws of noise samples, none where the perturbation draws nothing."""
        return [noise.stream(0, n) for n in samples] if noise is not None and self.perturbation.traits.random else []

    def arranged(self, x: Tensor, y: Tensor, noise: NoiseSource | None) -> tuple[Tensor, Tensor]:
        """Return the support images and labels in the order in which they are compared; by default as they come."""
        return x, y

    def changed_buffers(self) -> list[str]:
        return [f"network.{name}" for name in average_names(self.network)]

    def samples_used(self, asked: int | None = None) -> int:
        asked = check_samples(TEST_SAMPLES if asked is None else asked)
        return asked if self.perturbation.traits.random else 1

    def noise_from(self, generator: torch.Generator | NoiseSource | None) -> NoiseSource | None:
        """Return the source of a task's randomness; None where nothing is drawn."""
        drawer = self.perturbation if self.perturbation.traits.random else self
        return task_noise(generator, drawer) if self.perturbation.traits.random or self.is_random else None

    def explain_failure(self, episode: Episode, *, generator: torch.Generator | NoiseSource | None = None) -> str:
        """Look for what is not finite before the task, or in its features."""
        for name, parameter in self.named_parameters():
            if not parameter.isfinite().all():
                return f"'{name}' is not finite at the start of the task: lower training.meta_lr"
        if not (episode.support_x.isfinite().all() and episode.query_x.isfinite().all()):
            return "an image has values that are not finite: check the data set"
        return "the query loss or its gradient is not finite although all weights are; lower training.meta_lr"


def memberships(y: Tensor) -> Tensor:
    """Return which support image is of which class, as ones and zeros of shape (n, way); every class has some."""
    members = one_hot(y)
    if missing := (members.sum(dim=0) == 0).nonzero().flatten().tolist():
        raise ValueError(f"no support image has label {missing[0]}, but one has {int(y.max())}; number classes from 0")
    return members


def _check_perturbation(perturbation: Perturbation, network: nn.Module, learner: str) -> None:
    """Refuse perturbations that act through inner steps or on logits: there are none."""
    for part in parts_of(perturbation):
        name = type(part).__name__
        overrides = any(getattr(type(part), name) is not getattr(Perturbation, name) for name in THROUGH_THE_LOSS)
        if part.traits.adapts or overrides:
            raise ValueError(
                f"{name} cannot be used with {learner}: it acts through the loss of inner steps, and {learner} takes "
                "none; use a perturbation that acts on features alone, such as metadropout"
            )
        if "weights" in part.traits.changes:
            raise ValueError(
                f"{name} cannot be used with {learner}: support and query images go through the network in one batch, "
                "which has one set of weights, and those of query images are not to be perturbed"
            )
        if isinstance(part, LayerPerturbation) and not part.found.gives_features:
            raise ValueError(
                f"{learner} compares features, but {name} takes '{part.head_name}' for a head that gives logits: let "
                f"{type(network).__name__} end in an nn.Identity() and name that: head=..."
            )
