"""Probabilistic MAML: initial weights that are drawn, from what the task itself makes of their distribution."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from toys import assert_finite_differences, grouped, make_episode, make_perturbation, randomise, smooth_model

import metadropout as md
from metadropout.learners.platipus import PRIOR
from metadropout.ops import kernels


def make(network: nn.Module, perturbation: Any = None, **options: Any) -> md.Platipus:
    return md.Platipus(network, perturbation, **{"inner_lr": 0.1, "steps": 2, "kl_weight": 1.0, **options}).double()


def set_rates(learner: md.Platipus, prior: float, posterior: float) -> None:
    with torch.no_grad():
        learner.prior_lr.fill_(prior)
        learner.posterior_lr.fill_(posterior)


@pytest.mark.parametrize("perturbation", ["none", "metadropout"])
def test_the_meta_gradient_equals_finite_differences(perturbation: str) -> None:
    network, source = smooth_model(), md.SeededNoise(3)
    learner = make(network, make_perturbation(perturbation, network), log_std=-1.0, train_samples=2)
    randomise(learner.prior_std, scale=0.3, seed=4)
    randomise(learner.posterior_std, scale=0.3, seed=5)
    episode = make_episode()
    prefixes = ["network.", "prior_std.", "posterior_std.", "prior_lr", "posterior_lr"]
    groups = grouped(
        dict(learner.named_parameters()), *prefixes, *(["perturbation."] if perturbation != "none" else [])
    )
    assert_finite_differences(learner, episode, groups, source, step=1e-6, tolerance=1e-6)


def test_without_spread_steps_of_the_means_and_divergence_it_is_maml(conv4: md.Conv4) -> None:
    episode = make_episode()
    learner = make(conv4, log_std=-30.0, kl_weight=0.0)
    set_rates(learner, 0.0, 0.0)
    mine = learner.task_gradient(episode, generator=md.SeededNoise(0))
    its = md.MAML(conv4, inner_lr=0.1, steps=2).task_gradient(episode)
    torch.testing.assert_close(mine.loss, its.loss, rtol=1e-9, atol=0)
    for name, gradient in its.gradients.items():
        torch.testing.assert_close(mine.gradients[name], gradient, rtol=1e-7, atol=1e-9)


def divergence_of(network: nn.Module, episode: md.Episode, prior: float, posterior: float, **options: Any) -> float:
    """KL(posterior ‖ prior) as it stands in the loss."""
    losses = []
    for weight in (0.0, 1.0):
        learner = make(network, kl_weight=weight, **options)
        set_rates(learner, prior, posterior)
        losses.append(learner.loss(episode, generator=md.SeededNoise(0)).item())
    return (losses[1] - losses[0]) * (len(episode.support_y) + len(episode.query_y))


def test_the_divergence_is_that_of_two_gaussians_a_step_apart(conv4: md.Conv4) -> None:
    episode, std, rate = make_episode(), -2.0, 0.05
    assert divergence_of(conv4, episode, 0.0, 0.0, log_std=std) == pytest.approx(0, abs=1e-12)
    maml = md.MAML(conv4, steps=0)
    names = [name.removeprefix("network.") for name in maml.adapted_names]

    def squares(x: Tensor, y: Tensor) -> float:
        classify = maml.classifier(maml.initial_weights(), episode.support_x, inductive=False)
        gradients = torch.autograd.grad(cross_entropy(classify(x), y), [conv4.get_parameter(n) for n in names])
        return sum(g.square().sum().item() for g in gradients)

    variance = float(torch.tensor(2 * std).double().exp())
    by_hand = rate**2 * squares(episode.support_x, episode.support_y) / variance / 2
    assert divergence_of(conv4, episode, rate, 0.0, log_std=std) == pytest.approx(by_hand, rel=1e-9)
    by_hand = rate**2 * squares(episode.query_x, episode.query_y) / variance / 2
    assert divergence_of(conv4, episode, 0.0, rate, log_std=std) == pytest.approx(by_hand, rel=1e-9)


def test_without_spread_testing_is_maml_with_one_more_step_on_the_support_images(conv4: md.Conv4) -> None:
    episode, x, y = make_episode(), *make_episode().tensors()[:2]
    learner = make(conv4, log_std=-30.0)
    set_rates(learner, 0.3, 99.0)  # testing knows nothing of the posterior
    one = md.MAML(conv4, inner_lr=0.3, steps=1)
    moved = one.adapted_weights(x, y)
    two = md.MAML(conv4, inner_lr=0.1, steps=2)
    weights = two.inner_steps(moved, x, y, None, 1, differentiable=False)
    expected = two.classifier(weights, x, inductive=False)(episode.query_x)
    logits = learner.adapt(x, y, mc_samples=2, generator=md.SeededNoise(0))(episode.query_x)
    torch.testing.assert_close(logits, expected.log_softmax(dim=1), rtol=1e-8, atol=1e-8)
    mean = learner.adapted_weights(x, y, generator=md.SeededNoise(0))
    torch.testing.assert_close(mean["network.head.weight"], weights["network.head.weight"], rtol=1e-8, atol=1e-9)


def test_training_starts_from_the_posterior_and_testing_from_the_prior(
    conv4: md.Conv4, monkeypatch: pytest.MonkeyPatch
) -> None:
    episode, name, source = make_episode(), "network.head.weight", md.SeededNoise(0)
    learner = make(conv4, log_std=-2.0)
    with torch.no_grad():
        learner.posterior_std["network/head/weight"].fill_(-30.0)
    starts: list[Tensor] = []
    original = learner.inner_steps
    monkeypatch.setattr(
        learner, "inner_steps", lambda w, *a, **k: (starts.append(w[name].detach()), original(w, *a, **k))[1]
    )
    learner.loss(episode, generator=source)
    learner.adapted_models(episode.support_x, episode.support_y, 2, source)
    maml = md.MAML(conv4, steps=0)
    classify = maml.classifier(maml.initial_weights(), episode.support_x, inductive=False)
    (query,) = torch.autograd.grad(cross_entropy(classify(episode.query_x), episode.query_y), conv4.head.weight)
    (support,) = torch.autograd.grad(cross_entropy(classify(episode.support_x), episode.support_y), conv4.head.weight)
    weight = conv4.head.weight.detach()
    torch.testing.assert_close(starts[0], weight - 0.1 * query, rtol=1e-9, atol=1e-10)
    spread = torch.stack(starts[1:]) - (weight - 0.1 * support)
    assert not torch.allclose(starts[1], starts[2])
    assert 0.5 < spread.std() / torch.tensor(-2.0).exp() < 2


def test_answers_are_the_mean_of_the_probabilities_of_several_adapted_models(conv4: md.Conv4) -> None:
    episode, source = make_episode(), md.SeededNoise(1)
    learner = make(conv4, log_std=-2.0)
    assert (learner.samples_used(None), learner.samples_used(30), learner.samples_used(3)) == (10, 10, 3)
    models = learner.adapted_models(episode.support_x, episode.support_y, 3, source)
    each = [learner.classifier(m, episode.support_x, inductive=False)(episode.query_x).softmax(dim=1) for m in models]
    logits = learner.adapt(episode.support_x, episode.support_y, mc_samples=3, generator=source)(episode.query_x)
    torch.testing.assert_close(logits.exp(), torch.stack(each).mean(dim=0))
    assert not torch.allclose(each[0], each[1])


def test_meta_dropout_acts_on_both_uses_of_the_support_images_and_not_on_query_images(conv4: md.Conv4) -> None:
    asked: list[tuple[int, int]] = []

    class Spy(md.SeededNoise):
        def stream(self, step: int, sample: int) -> Any:
            asked.append((step, sample))
            return super().stream(step, sample)

    episode = make_episode()
    learner = make(conv4, make_perturbation("metadropout", conv4))
    gradients = learner.task_gradient(episode, generator=Spy(0)).gradients
    assert asked == [(PRIOR, 0), (0, 0), (1, 0)]
    own = [g for name, g in gradients.items() if name.startswith("perturbation.") and name.endswith("weight")]
    assert all(gradient.abs().max() > 0 for gradient in own)
    asked.clear()
    learner.adapt(episode.support_x, episode.support_y, mc_samples=2, generator=Spy(0))
    assert asked == [(PRIOR, 0), (PRIOR, 1), (0, 0), (1, 0), (0, 1), (1, 1)]


def test_the_draws_of_initial_weights_do_not_depend_on_the_perturbation(conv4: md.Conv4) -> None:
    source = md.SeededNoise(0)
    means = {"network.head.weight": conv4.head.weight}
    stds = {"network.head.weight": torch.zeros_like(conv4.head.weight)}
    plain, noisy = make(conv4), make(conv4, make_perturbation("metadropout", conv4))
    for sample in range(2):
        a, b = (learner.draw(means, stds, source, sample) for learner in (plain, noisy))
        assert torch.equal(a["network.head.weight"], b["network.head.weight"])


def test_parameters_of_a_perturbation_that_are_adapted_take_steps_with_the_drawn_weights_held_fixed(
    conv4: md.Conv4, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = make(conv4, make_perturbation("more-parameters", conv4))
    episode, source = make_episode(), md.SeededNoise(0)
    own = [n for n in learner.adapted_names if n.startswith("perturbation.")]
    original, checked = learner.inner_steps, []

    def spy(weights: dict[str, Tensor], x: Tensor, y: Tensor, noise: Any, samples: int, **how: Any) -> Any:
        fixed = {n: w.detach() for n, w in weights.items()}
        expected = original(fixed, x, y, noise, samples, differentiable=False)
        found = original(weights, x, y, noise, samples, **how)
        for n in own:
            torch.testing.assert_close(found[n], expected[n])
        checked.append(len(own))
        return found

    monkeypatch.setattr(learner, "inner_steps", spy)
    with kernels.disabled():
        learner.loss(episode, generator=source)
    assert checked[0] > 0
