"""ABML: a Gaussian over each weight that is adapted, and its combination with Meta-dropout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Gamma, Normal, kl_divergence
from torch.nn.functional import cross_entropy
from toys import assert_finite_differences, grouped, make_episode, make_perturbation, randomise, smooth_model

import metadropout as md
from metadropout.learners.abml import RATE
from metadropout.networks.layers import module_key
from metadropout.perturbations import Pass, Perturbation


def make(network: nn.Module, perturbation: Any = None, **options: Any) -> md.ABML:
    learner = md.ABML(network, perturbation, **{"inner_lr": 0.1, "steps": 2, "kl_weight": 1.0, **options}).double()
    if "log_std" not in options:
        randomise(learner.log_std, scale=0.3, seed=4)
    return learner


def start(learner: md.ABML) -> dict[str, Tensor]:
    weights = learner.initial_weights()
    return weights | {f"state.{name}": w for name, w in learner.inner_init(weights, None).items()}


@pytest.mark.parametrize("perturbation", ["none", "metadropout"])
def test_the_meta_gradient_equals_finite_differences(perturbation: str) -> None:
    network, source = smooth_model(), md.SeededNoise(3)
    options = {"log_std": -1.0, "prior_weight": 0.1, "train_samples": 2}
    learner, episode = make(network, make_perturbation(perturbation, network), **options), make_episode()
    prefixes = ["network.", "log_std.", *(["perturbation."] if perturbation != "none" else [])]
    groups = grouped(dict(learner.named_parameters()), *prefixes)
    assert_finite_differences(learner, episode, groups, source, step=1e-6, tolerance=1e-6)


def test_the_divergence_from_the_prior_and_its_gradient_start_at_zero(conv4: md.Conv4) -> None:
    learner = make(conv4)
    weights = start(learner)
    kl = learner.kl(weights)
    assert kl == 0
    adapted = [weights[name] for name in learner.adapted_names]
    # The prior's own tensors are the same ones here: the posterior's part of the gradient is all there is.
    prior = {name: w.detach() for name, w in weights.items() if name.startswith("state.")}
    gradients = torch.autograd.grad(learner.kl(weights | prior), adapted)
    assert not any(gradient.any() for gradient in gradients)


def test_the_divergence_and_the_hyper_prior_are_those_of_torch_distributions(conv4: md.Conv4) -> None:
    learner = make(conv4)
    weights = start(learner)
    g = torch.Generator().manual_seed(0)
    moved = {n: weights[n] + torch.randn(weights[n].shape, generator=g).double() * 0.1 for n in learner.adapted_names}
    kl, hyper_prior = torch.zeros(()).double(), torch.zeros(()).double()
    for name, std in learner.std_names.items():
        prior = Normal(weights[name], weights[std].exp())
        kl += kl_divergence(Normal(moved[name], moved[std].exp()), prior).sum()
        hyper_prior -= Normal(0.0, 1.0).log_prob(weights[name]).sum()
        hyper_prior -= Gamma(1.0, RATE).log_prob((-2 * weights[std]).exp()).sum()
    torch.testing.assert_close(learner.kl(weights | moved), kl)
    torch.testing.assert_close(learner.hyper_prior(weights), hyper_prior)
    stds = [weights[std] for std in learner.std_names.values()]
    for std, gradient in zip(stds, torch.autograd.grad(learner.hyper_prior(weights), stds), strict=True):
        torch.testing.assert_close(gradient, -2 * RATE / std.exp().square())


def test_without_spread_and_divergence_the_means_are_those_of_maml(conv4: md.Conv4) -> None:
    episode, source = make_episode(), md.SeededNoise(0)
    learner = make(conv4, kl_weight=0.0, log_std=-30.0, support_term=False)
    maml = md.MAML(conv4, inner_lr=0.1, steps=2)
    x, y = episode.support_x, episode.support_y
    mine, its = learner.adapted_weights(x, y, generator=source), maml.adapted_weights(x, y)
    gradients, exact = learner.task_gradient(episode, generator=source), maml.task_gradient(episode)
    torch.testing.assert_close(gradients.loss, exact.loss, rtol=1e-9, atol=0)
    for name in maml.adapted_names:
        torch.testing.assert_close(mine[name], its[name], rtol=1e-9, atol=1e-10)
    for name, gradient in exact.gradients.items():
        torch.testing.assert_close(gradients.gradients[name], gradient, rtol=1e-7, atol=1e-9)


def test_without_steps_the_loss_is_that_of_weights_drawn_from_the_prior(conv4: md.Conv4) -> None:
    episode, source = make_episode(), md.SeededNoise(0)
    learner = make(conv4, steps=0, prior_weight=0.0)
    drawn = learner.draw(learner.initial_weights(), source, 0, 0)
    n, q = len(episode.support_y), len(episode.query_y)
    on_support, on_query = (
        cross_entropy(learner.classifier(drawn, episode.support_x, inductive=False)(x), y)
        for x, y in ((episode.support_x, episode.support_y), (episode.query_x, episode.query_y))
    )
    torch.testing.assert_close(learner.loss(episode, generator=source), (n * on_support + q * on_query) / (n + q))
    without = make(conv4, steps=0, prior_weight=0.0, support_term=False)
    torch.testing.assert_close(without.loss(episode, generator=source), on_query)


class Regression(Perturbation):
    """Nothing but another support loss: half the sum of squares, the targets being the labels."""

    def label_loss(self, logits: Tensor, y: Tensor, context: Pass) -> Tensor:
        return (logits[:, 0] - y).square().sum() / 2


class NoDraws(md.SeededNoise):
    """All draws zero, so that weights are their means."""

    def fork(self) -> NoDraws:
        return self

    def stream(self, step: int, sample: int) -> Any:
        return self

    def normal(self, shape: Any, like: Tensor) -> Tensor:
        return torch.zeros(shape, dtype=like.dtype)


def test_the_inner_steps_end_at_the_posterior_mean_of_a_linear_gaussian_model() -> None:
    torch.manual_seed(0)
    network = nn.Linear(3, 1, bias=False).double()
    x, y, std = torch.randn(6, 3).double(), torch.arange(6), 0.5
    learner = md.ABML(
        network,
        Regression(network),
        inner_lr=0.02,
        steps=2000,
        inner_kl_weight=float(len(x)),  # of a sum over images, not a mean
        log_std=float(torch.tensor(std).log()),
    ).double()
    mean = learner.adapted_weights(x, y, mc_samples=1, generator=NoDraws(0))["network.weight"][0]
    precision = x.T @ x + torch.eye(3) / std**2
    expected = torch.linalg.solve(precision, x.T @ y.double() + network.weight[0].detach() / std**2)
    torch.testing.assert_close(mean, expected, rtol=1e-6, atol=1e-8)


def test_answers_are_the_mean_of_the_probabilities_under_several_draws(conv4: md.Conv4) -> None:
    episode, source = make_episode(), md.SeededNoise(1)
    learner = make(conv4, log_std=-2.0)
    x, y = episode.support_x, episode.support_y
    assert (learner.samples_used(None), learner.samples_used(30), learner.samples_used(3)) == (10, 10, 3)
    weights = learner.adapted_weights(x, y, mc_samples=3, generator=source)
    draws = [learner.draw(weights, source, learner.steps, sample) for sample in range(3)]
    each = [learner.classifier(w, x, inductive=False)(episode.query_x).softmax(dim=1) for w in draws]
    logits = learner.adapt(x, y, mc_samples=3, generator=source)(episode.query_x)
    torch.testing.assert_close(logits.exp(), torch.stack(each).mean(dim=0))
    torch.testing.assert_close(logits.logsumexp(dim=1), torch.zeros(len(logits)).double())
    assert not torch.allclose(each[0], each[1])


def test_offsets_of_normalisations_have_no_distribution_and_are_not_adapted(conv4: md.Conv4) -> None:
    learner = make(conv4)
    assert not any("norm" in name for name in learner.adapted_names)
    assert {n.removeprefix("log_std.") for n in learner.std_names.values()} == {
        module_key(n) for n in learner.std_names
    }
    assert set(learner.adapted_names) == {*learner.std_names, *learner.std_names.values()}


def test_every_pass_draws_weights_of_its_own_that_a_perturbation_does_not_change(conv4: md.Conv4) -> None:
    source = md.SeededNoise(0)
    plain = make(conv4)
    noisy = make(conv4, make_perturbation("metadropout", conv4))
    name = "network.head.weight"
    draws = [
        learner.draw(learner.initial_weights(), source, step, sample)[name]
        for learner in (plain, noisy)
        for step, sample in ((0, 0), (0, 1), (1, 0))
    ]
    assert all(torch.equal(a, b) for a, b in zip(draws[:3], draws[3:], strict=True))
    assert len({draw.sum().item() for draw in draws}) == 3


def test_with_meta_dropout_support_passes_are_noisy_given_the_weights_and_query_passes_are_not(
    conv4: md.Conv4,
) -> None:
    episode = make_episode()
    learner = make(conv4, make_perturbation("metadropout", conv4))
    weights, x, y = start(learner), episode.support_x, episode.support_y
    fixed = md.SeededNoise(0).fork()

    class SameWeights(md.SeededNoise):
        def fork(self) -> md.SeededNoise:
            return fixed

    def support(seed: int) -> float:
        source = SameWeights(seed)
        return learner.support_loss(weights, x, y, noise=source, step=0, samples=range(1)).item()

    def query(seed: int) -> Tensor:
        return learner.query_loss(weights, episode, SameWeights(seed))[1]

    assert support(1) != support(2)
    assert torch.equal(query(1), query(2))
    assert not any(name.startswith("perturbation.") for name in learner.adapted_names)
    gradients = learner.task_gradient(episode, generator=md.SeededNoise(0)).gradients
    own = [g for name, g in gradients.items() if name.startswith("perturbation.") and name.endswith("weight")]
    assert all(gradient.abs().max() > 0 for gradient in own)


def test_the_kl_terms_are_divided_by_the_number_of_images(conv4: md.Conv4) -> None:
    episode, source = make_episode(), md.SeededNoise(0)
    weights = start(make(conv4))
    moved = weights | {"network.head.weight": weights["network.head.weight"] + 0.1}
    n, q = len(episode.support_y), len(episode.query_y)
    with_kl, without = make(conv4, kl_weight=0.3, prior_weight=0.5), make(conv4, kl_weight=0.0)
    kl, hyper_prior = with_kl.kl(moved), with_kl.hyper_prior(moved)
    losses = [
        learner.support_loss(moved, episode.support_x, episode.support_y, noise=source, step=0, samples=range(1))
        for learner in (with_kl, without)
    ]
    torch.testing.assert_close(losses[0] - losses[1], 0.3 / n * kl)
    losses = [learner.query_loss(moved, episode, source)[0] for learner in (with_kl, without)]
    torch.testing.assert_close(losses[0] - losses[1], 0.3 / (n + q) * (kl + 0.5 * hyper_prior))
