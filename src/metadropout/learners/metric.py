"""Learners that compare query images with support images: what all of them share is how both become features.

The path of one task, top to bottom: `forward` → `compared` (the query pass, deterministic, with the support images in
its batch or with their statistics) → `support_features` (support passes with noise) → `logits`, which is all that such
a learner says itself.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot

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
from metadropout.noise import NoiseSource
from metadropout.ops.precision import Precision
from metadropout.options import Limits
from metadropout.perturbations import Combined, NoPerturbation, Perturbation, PerturbedNetwork

THROUGH_THE_LOSS = ("change_images", "label_loss", "penalty")
"""Methods of perturbations that act through the loss of an inner step."""


class MetricLearner(Learner):
    """Answers by comparing the features of query images with those of support images; nothing is adapted.

    The network, which has no head, is meta-learned from the query loss. A perturbation acts on support images, and is
    meta-learned by the same gradient, of first order. Statistics of batch normalisations are those of the support and
    query images in one deterministic pass; in the inductive protocol those of the support images alone. A network with
    running averages moves them in training, by the statistics of the support and query images in either protocol, and
    they are what the inductive protocol tests with.

    Args:
        network: maps images to features; any module.
        perturbation: what perturbs it on support images; nothing by default.
        images_per_pass: most images in one support pass; more noise samples than fit are run in turn.
        precision: "bf16" rounds what convolutions multiply to bfloat16.
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
        _refuse_inner_losses(self.perturbation, type(self).__name__)
        self.perturbed = PerturbedNetwork(network, self.perturbation, precision=precision)

    @abstractmethod
    def logits(self, weights: Mapping[str, Tensor], support: Tensor, members: Tensor, query: Tensor) -> Tensor:
        """Return the logits of query images, shape (m, way).

        Args:
            weights: all parameters of the learner, to be used in place of its attributes.
            support: features of the support images under each noise sample, shape (samples, n, features).
            members: 1 where a support image is of a class, 0 elsewhere, shape (n, way).
            query: features of the query images, shape (m, features).
        """

    def forward(self, episode: Episode, *, generator: torch.Generator | NoiseSource | None = None) -> Outcome:
        episode = with_class_numbers(episode)
        weights, noise = dict(self.named_parameters()), self.noise_from(generator)
        x, y = self.arranged(episode.support_x, episode.support_y, noise)
        together = self.changed_buffers() or not episode.inductive
        given, seen = None if together else self.perturbed.statistics(weights, x), LayerStatistics()
        logits = self.compared(weights, x, y, noise, 1, given, seen)(episode.query_x)
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
            given = (averages(self.network) or self.perturbed.statistics(weights, x)) if inductive else None
            return self.compared(weights, x, y, noise, samples, given)

    def compared(
        self,
        weights: Mapping[str, Tensor],
        x: Tensor,
        y: Tensor,
        noise: NoiseSource | None,
        samples: int,
        given: LayerStatistics | None,
        seen: LayerStatistics | None = None,
    ) -> Classifier:
        """Return the comparison with support images as a function of query images.

        Args:
            weights: all parameters of the learner.
            x: support images.
            y: their labels.
            noise: source of all randomness.
            samples: noise samples of the support images.
            given: statistics to normalise with; None takes those of support and query images in one batch.
            seen: filled with the statistics of that batch.
        """
        members = memberships(y).to(x)  # (n, way)
        if given is not None:
            support = self.support_features(weights, x, given, noise, samples)
            how = Normalisation(given=given)
            this = self.perturbed.query_pass(weights)
            return lambda query_x: self.logits(
                weights, support, members, self.perturbed.run(weights, query_x, this, how)
            )

        def classify(query_x: Tensor) -> Tensor:
            collected: LayerStatistics = {} if seen is None else seen
            perturbed = not isinstance(self.perturbation, NoPerturbation)
            # Passes whose statistics nobody asks for run faster.
            how = Normalisation(collected=collected if perturbed or self.changed_buffers() else None)
            both = self.perturbed.run(weights, torch.cat([x, query_x]), self.perturbed.query_pass(weights), how)
            support = both[None, : len(x)]
            if perturbed:
                support = self.support_features(weights, x, collected, noise, samples)
            return self.logits(weights, support, members, both[len(x) :])

        return classify

    def support_features(
        self,
        weights: Mapping[str, Tensor],
        x: Tensor,
        given: LayerStatistics,
        noise: NoiseSource | None,
        samples: int,
    ) -> Tensor:
        """Return the features of support images under each noise sample, shape (samples, n, features)."""
        per_pass = max(1, self.images_per_pass // len(x)) if self.perturbation.samples_share_a_batch else 1
        parts = []
        for first in range(0, samples, per_pass):
            numbers = range(first, min(first + per_pass, samples))
            draws = noise is not None and self.perturbation.random
            streams = [noise.stream(0, sample) for sample in numbers] if draws else []  # type: ignore[union-attr]
            repeated = x.repeat(len(numbers), *[1] * (x.dim() - 1))
            this = self.perturbed.support_pass(weights, streams)
            parts.append(self.perturbed.run(weights, repeated, this, Normalisation(given=given)))
        return torch.cat(parts).view(samples, len(x), -1)

    def arranged(self, x: Tensor, y: Tensor, noise: NoiseSource | None) -> tuple[Tensor, Tensor]:
        """Return the support images and labels in the order in which they are compared; by default as they come."""
        return x, y

    def changed_buffers(self) -> list[str]:
        return [f"network.{name}" for name in average_names(self.network)]

    def samples_used(self, asked: int | None = None) -> int:
        asked = check_samples(TEST_SAMPLES if asked is None else asked)
        return asked if self.perturbation.random else 1

    def noise_from(self, generator: torch.Generator | NoiseSource | None) -> NoiseSource | None:
        """Return the source of a task's randomness; None where nothing is drawn."""
        drawer = self.perturbation if self.perturbation.random else self
        return task_noise(generator, drawer) if self.perturbation.random or self.is_random else None

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


def _refuse_inner_losses(perturbation: Perturbation, learner: str) -> None:
    """Refuse perturbations that act through the inner steps: there are none."""
    for part in perturbation.modules():
        if not isinstance(part, Perturbation) or isinstance(part, Combined):
            continue
        overrides = any(getattr(type(part), name) is not getattr(Perturbation, name) for name in THROUGH_THE_LOSS)
        if part.adapts or overrides:
            raise ValueError(
                f"{type(part).__name__} has no meaning with {learner}: it acts through the loss of inner steps, and "
                f"{learner} takes none; use one that acts on features or weights alone, such as metadropout"
            )
