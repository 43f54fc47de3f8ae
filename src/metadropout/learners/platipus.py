"""Probabilistic MAML (PLATIPUS): a Gaussian over the initial weights."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from metadropout.data import Episode
from metadropout.learners.base import Outcome, mean_log_probabilities
from metadropout.learners.batched import OverTasks, one_task
from metadropout.learners.gaussian import divergence, drawn, log_stds
from metadropout.learners.maml import MAML
from metadropout.networks.layers import module_key
from metadropout.noise import NoiseSource, NoiseStream
from metadropout.options import Limits, Samples
from metadropout.perturbations import Perturbation
from metadropout.perturbations.base import Weights

PRIOR = 1000
"""Number of the support pass that moves the prior's mean; inner steps have smaller ones."""


class Platipus(MAML):
    """MAML whose initial weights θ are drawn from a Gaussian that the task itself moves (Finn, Xu & Levine, 2018).

    Adapted: the network's weights, from a draw of θ; many draws give many models, whose probabilities are averaged. In
    testing θ is drawn from the prior given the support images, whose mean is one step from μ on their loss. In training
    it is drawn from a posterior that sees the query images, one step from μ on theirs, and a KL term makes the prior
    predict the posterior. Meta-learned: μ, both standard deviations of every weight, the sizes of both steps, and
    normalisation's offsets, which have no distribution. A perturbation acts wherever support images are used.

    Args:
        network: maps images to logits; any module.
        perturbation: what perturbs it on support images; nothing by default.
        kl_weight: weight of KL(posterior ‖ prior), before it is divided by the number of images.
        log_std: where the logarithms of all standard deviations start.
        test_samples: most draws of initial weights in testing.
    """

    title = "Probabilistic MAML"
    citation = "Finn, Xu and Levine, 2018"
    is_random = True

    def __init__(
        self,
        network: nn.Module,
        perturbation: Perturbation | None = None,
        *,
        kl_weight: Annotated[float, Limits(0, 1e6)] = 0.1,
        log_std: Annotated[float, Limits(-100, 10)] = -4.0,
        test_samples: Samples = 10,
        **options: Any,
    ) -> None:
        super().__init__(network, perturbation, **options)
        self.kl_weight, self.test_samples = kl_weight, test_samples
        means = {name: t for name, t in self.adapted_tensors().items() if name.startswith("network.")}
        self.drawn_names = list(means)
        self.prior_std, self.posterior_std = log_stds(means, log_std), log_stds(means, log_std)
        self.prior_lr, self.posterior_lr = (nn.Parameter(torch.tensor(float(self.inner_lr))) for _ in range(2))

    def samples_used(self, asked: int | None = None) -> int:
        return min(super().samples_used(asked), self.test_samples)

    def learn(
        self, weights: Weights, episode: Episode, noise: NoiseSource | None, over_tasks: OverTasks = one_task
    ) -> Outcome:
        x, y, samples = episode.support_x, episode.support_y, self.train_samples

        def drawn_start(weights: Weights, support: Weights, query: Weights, sample: int) -> tuple[Weights, Tensor]:
            posterior, prior = self.given(weights, query, "posterior"), self.given(weights, support, "prior")
            # Others that are adapted start as copies: θ depends on them, and the inner gradient must not take that way.
            others = {name: weights[name].clone() for name in self.adapted_names if name not in self.drawn_names}
            return others | self.draw(*posterior, noise, sample), divergence(*posterior, *prior)

        _, support = self.support_gradient(
            weights, x, y, PRIOR, noise, samples, differentiable=True, over_tasks=over_tasks
        )
        before = self.judge(weights, episode, noise, over_tasks).loss.sum()
        means = [weights[name] for name in self.drawn_names]
        gradients = torch.autograd.grad(before, means, create_graph=not self.first_order)
        query = dict(zip(self.drawn_names, gradients, strict=True))
        losses, logits = [], []
        for sample in range(samples):
            theta, kl = over_tasks(partial(drawn_start, sample=sample))(weights, support, query)
            one = _OneSample(noise, sample)
            model = self.inner_steps(weights | theta, x, y, one, 1, differentiable=True, over_tasks=over_tasks)
            outcome = self.judge(model, episode, noise, over_tasks)
            losses.append(outcome.loss + self.kl_weight / (y.shape[-1] + episode.query_y.shape[-1]) * kl)
            logits.append(outcome.logits)
        return Outcome(torch.stack(losses).mean(dim=0), mean_log_probabilities(logits))

    def test_start(self, x: Tensor, y: Tensor, samples: int, noise: NoiseSource | None) -> Weights:
        weights = super().test_start(x, y, samples, noise)
        start = {name: w.requires_grad_(name in self.adapted_names) for name, w in weights.items()}
        with torch.enable_grad():
            _, gradients = self.support_gradient(start, x, y, PRIOR, noise, samples, differentiable=False)
        means, _ = self.given(start, gradients, "prior")
        return {name: w.detach() for name, w in (start | means).items()}

    def adapted_models(self, x: Tensor, y: Tensor, samples: int, noise: NoiseSource | None) -> list[Weights]:
        start = self.test_start(x, y, samples, noise)  # from the prior's mean
        means, stds = self.given(start, None, "prior")
        models = [start | self.draw(means, stds, noise, sample) for sample in range(samples)]
        return [self.test_steps_from(model, x, y, 1, _OneSample(noise, s)) for s, model in enumerate(models)]

    def given(self, weights: Weights, gradients: Weights | None, which: str) -> tuple[Weights, Weights]:
        """Return the means of the prior or the posterior, a step on a loss, and logarithms of standard deviations."""
        means = {name: weights[name] for name in self.drawn_names}
        if gradients is not None:
            means = {name: mean - weights[f"{which}_lr"] * gradients[name] for name, mean in means.items()}
        return means, {name: weights[f"{which}_std.{module_key(name)}"] for name in means}

    def draw(self, means: Weights, stds: Weights, noise: NoiseSource | None, sample: int) -> Weights:
        """Draw initial weights."""
        assert noise is not None
        return drawn(means, stds, noise.fork().stream(0, sample))


class _OneSample:
    """The noise of one sample of a task, for inner steps that know of no other."""

    def __init__(self, noise: NoiseSource | None, sample: int) -> None:
        assert noise is not None
        self.noise, self.sample = noise, sample

    def stream(self, step: int, sample: int) -> NoiseStream:
        return self.noise.stream(step, self.sample)

    def fork(self) -> NoiseSource:
        return self.noise.fork()
