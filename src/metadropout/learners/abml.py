"""Amortized Bayesian Meta-Learning: a Gaussian over each weight, adapted as such."""

from __future__ import annotations

import math
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from metadropout.data import Episode
from metadropout.learners.base import mean_log_probabilities
from metadropout.learners.gaussian import divergence, drawn, log_stds, total
from metadropout.learners.gradient import STATE
from metadropout.learners.maml import MAML
from metadropout.networks.layers import module_key
from metadropout.noise import NoiseSource
from metadropout.options import Limits, Samples
from metadropout.perturbations import Perturbation
from metadropout.perturbations.base import Weights

Weight = Annotated[float, Limits(0, 1e6)]
RATE = 0.01
"""Of the exponential distribution that is the hyper-prior of 1/σ²."""


class ABML(MAML):
    """Adapts a Gaussian over the weights, which a KL term keeps close to the one it starts from (Ravi & Beatson, 2019).

    Adapted: mean μ and ρ = ln σ of every weight. Meta-learned: their initial values, which are the prior as well, and
    normalisation's offsets, which have no distribution. Every support pass draws weights of its own, and an answer is
    the mean of the probabilities under several draws. With a perturbation, a support pass draws weights and then noise
    given these (the combined bound of an older draft of Meta Dropout): the posterior stands for what is not known of
    the weights, the noise for what is not known of an image. Losses are means over images; so the KL, which is that of
    all weights for all images, is divided by the number of images.

    Args:
        network: maps images to logits; any module.
        perturbation: what perturbs it on support images; nothing by default.
        kl_weight: weight of the KL in the outer loss, before it is divided by the number of images.
        inner_kl_weight: the same in the inner steps; as in the outer loss by default.
        prior_weight: weight of the hyper-prior relative to the KL in the outer loss: about 1 / training.iterations.
        log_std: where all ρ start.
        support_term: whether the outer loss is that of support and query images, as in the paper, or of query images
            alone.
        test_samples: most draws of weights in testing, in each inner step and for the answers.
    """

    title = "ABML"
    citation = "Ravi and Beatson, 2019"
    is_random = True

    def __init__(
        self,
        network: nn.Module,
        perturbation: Perturbation | None = None,
        *,
        kl_weight: Weight = 0.1,
        inner_kl_weight: Weight | None = None,
        prior_weight: Weight = 2e-5,
        log_std: Annotated[float, Limits(-100, 10)] = -4.0,
        support_term: bool = True,
        test_samples: Samples = 10,
        **options: Any,
    ) -> None:
        super().__init__(network, perturbation, **options)
        self.kl_weight, self.prior_weight = kl_weight, prior_weight
        self.inner_kl_weight = kl_weight if inner_kl_weight is None else inner_kl_weight
        self.support_term, self.test_samples = support_term, test_samples
        means = {name: t for name, t in self.adapted_tensors().items() if name.startswith("network.")}
        self.log_std = log_stds(means, log_std)
        self.std_names = {name: f"log_std.{module_key(name)}" for name in means}
        self.adapted_names = [*self.adapted_names, *self.std_names.values()]

    @property
    def samples_share_a_pass(self) -> bool:
        return False  # each has weights of its own

    def samples_used(self, asked: int | None = None) -> int:
        return min(super().samples_used(asked), self.test_samples)

    def inner_init(self, weights: Weights, noise: NoiseSource | None) -> Weights:
        return {f"prior.{name}": weights[name] for pair in self.std_names.items() for name in pair}

    def support_loss(
        self, weights: Weights, x: Tensor, y: Tensor, *, noise: NoiseSource | None, step: int, samples: range
    ) -> Tensor:
        model = self.draw(weights, noise, step, samples[0])
        loss = super().support_loss(model, x, y, noise=noise, step=step, samples=samples)
        return loss + self.inner_kl_weight / len(x) * self.kl(weights)

    def query_loss(self, weights: Weights, episode: Episode, noise: NoiseSource | None) -> tuple[Tensor, Tensor]:
        x, y, n, q = episode.support_x, episode.support_y, len(episode.support_y), len(episode.query_y)
        losses, logits = [], []
        for sample in range(self.train_samples):
            model, only = self.draw(weights, noise, self.steps, sample), range(sample, sample + 1)
            loss, answers = super().query_loss(model, episode, noise)
            if self.support_term:
                on_support = super().support_loss(model, x, y, noise=noise, step=self.steps, samples=only)
                loss = (q * loss + n * on_support) / (n + q)
            losses.append(loss)
            logits.append(answers)
        regularisers = self.kl(weights) + self.prior_weight * self.hyper_prior(weights)
        return torch.stack(losses).mean() + self.kl_weight / (n + q) * regularisers, mean_log_probabilities(logits)

    def adapted_models(self, x: Tensor, y: Tensor, samples: int, noise: NoiseSource | None) -> list[Weights]:
        weights = self.adapted_weights(x, y, mc_samples=samples, generator=noise)
        steps = self.steps if self.test_steps is None else self.test_steps
        return [self.draw(weights, noise, steps, sample) for sample in range(samples)]

    def draw(self, weights: Weights, noise: NoiseSource | None, step: int, sample: int) -> Weights:
        """Return all tensors of a task, with the network's weights drawn from their distribution."""
        assert noise is not None
        return weights | drawn(*self.means_and_stds(weights), noise.fork().stream(step, sample))

    def kl(self, weights: Weights) -> Tensor:
        """Return KL(posterior ‖ prior)."""
        return divergence(*self.means_and_stds(weights), *self.means_and_stds(weights, f"{STATE}prior."))

    def hyper_prior(self, weights: Weights) -> Tensor:
        """Return −log p(μ, σ) of the prior, where μ ~ N(0, 1) and 1/σ² ~ Gamma(1, RATE) for each weight."""
        means, stds = self.means_and_stds(weights, f"{STATE}prior.")
        constant = math.log(2 * math.pi) / 2 - math.log(RATE)
        return total(mean.square() / 2 + RATE * (-2 * stds[name]).exp() + constant for name, mean in means.items())

    def means_and_stds(self, weights: Weights, prefix: str = "") -> tuple[Weights, Weights]:
        """Return the weights' means and the logarithms of their standard deviations, both by the names of the means."""
        return (
            {name: weights[prefix + name] for name in self.std_names},
            {name: weights[prefix + std] for name, std in self.std_names.items()},
        )
