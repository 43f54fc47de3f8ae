"""Each perturbation's defining fact, what they have in common, and what they become at their limits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import integrate, stats
from torch import Tensor, distributions, nn
from torch.nn import functional as F
from toys import make_episode, randomise
from toys import make_perturbation as make

import metadropout as md
from metadropout.learners import GradientLearner
from metadropout.networks import find_layers
from metadropout.networks.layers import apply_layer, module_key
from metadropout.perturbations import PERTURBATIONS, Pass, Perturbation, PerturbedNetwork
from metadropout.robustness.attacks import projected_gradient_descent

ALL = list(PERTURBATIONS)
WITH_WEIGHTS = [name for name in ALL if name not in ("none", "fixed-gaussian", "mixup", "adversarial")]


def support_pass(perturbation: Perturbation, streams: Sequence[Any]) -> Pass:
    return Pass(dict(perturbation.named_parameters()), streams, support=True)


class Still:
    """A noise source whose every draw is zero."""

    def stream(self, step: int, sample: int) -> Still:
        return self

    def normal(self, shape: Sequence[int], like: Tensor) -> Tensor:
        return like.new_zeros(tuple(shape))

    def numbers(self) -> np.random.Generator:
        return np.random.default_rng(0)


class Chosen:
    """A noise source that lets mixup mix at its first site with a given ratio; normal draws are another source's."""

    def __init__(self, ratio: float, source: Any) -> None:
        self.ratio, self.source = ratio, source

    def stream(self, step: int, sample: int) -> Chosen:
        return Chosen(self.ratio, self.source.stream(step, sample))

    def normal(self, shape: Sequence[int], like: Tensor) -> Tensor:
        return self.source.normal(shape, like)

    def numbers(self) -> Any:
        return self

    def integers(self, count: int) -> int:
        return 0

    def beta(self, a: float, b: float) -> float:
        return self.ratio

    def permutation(self, n: int) -> Any:
        return np.roll(np.arange(n), 1)


def logits_of(learner: GradientLearner, x: Tensor, source: Any) -> Tensor:
    """A support pass of a learner, before any adaptation."""
    context = support_pass(learner.perturbation, [source.stream(0, 0)] if learner.perturbation.traits.random else [])
    return learner.perturbed.run(dict(learner.named_parameters()), x, context)


# --- what all have in common -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [md.MAML, md.MetaSGD])
@pytest.mark.parametrize("name", ALL)
def test_works_with_every_learner_on_every_network(name: str, kind: type[GradientLearner], network: nn.Module) -> None:
    episode, perturbation = make_episode(), make(name, network)
    learner = kind(network, perturbation, inner_lr=0.01, steps=2).double()
    result = learner.task_gradient(episode, generator=md.SeededNoise(3))
    assert result.loss.isfinite()
    assert all(g.isfinite().all() for g in result.gradients.values())
    classifier = learner.adapt(episode.support_x, episode.support_y, mc_samples=3, generator=md.SeededNoise(3))
    assert torch.equal(classifier(episode.query_x), classifier(episode.query_x))


@pytest.mark.parametrize("name", WITH_WEIGHTS)
def test_meta_gradient_of_its_own_weights_equals_finite_differences(name: str, conv4: md.Conv4) -> None:
    perturbation, episode, source = make(name, conv4), make_episode(), md.SeededNoise(2)
    learner = md.MAML(conv4, perturbation, inner_lr=0.05, steps=2)
    names = [n for n, _ in learner.named_parameters() if n.startswith("perturbation.")]
    gradients = learner.task_gradient(episode, generator=source).gradients
    parameters = dict(learner.named_parameters())
    g = torch.Generator().manual_seed(0)
    direction = {n: torch.randn(parameters[n].shape, generator=g, dtype=torch.float64) for n in names}
    expected = sum((gradients[n] * direction[n]).sum().item() for n in names)
    losses = []
    for move in (1e-8, -2e-8):
        with torch.no_grad():
            for n in names:
                parameters[n].add_(direction[n], alpha=move)
        losses.append(learner.loss(episode, generator=source).item())
    assert (losses[0] - losses[1]) / 2e-8 == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert abs(expected) > 1e-4


def test_meta_gradient_with_adversarial_movements_held_constant_equals_finite_differences(conv4: md.Conv4) -> None:
    class Recorded(PERTURBATIONS["adversarial"]):  # type: ignore[misc]
        """Moves images, or once it has been recorded moves them again as before."""

        def change_images(self, x: Tensor, y: Tensor, classify: Any) -> Tensor:
            if not replays:
                moved.append(super().change_images(x, y, classify))
                return moved[-1]
            return next(replays[-1])

    moved: list[Tensor] = []
    replays: list[Iterator[Tensor]] = []
    episode, learner = make_episode(), md.MAML(conv4, Recorded(conv4, radius=0.05), inner_lr=0.05, steps=3)
    gradients = learner.task_gradient(episode).gradients
    assert len(moved) == 3
    assert not torch.equal(moved[0], moved[1])  # they are moved again before each step
    g = torch.Generator().manual_seed(0)
    parameters = dict(learner.named_parameters())
    direction = {n: torch.randn(p.shape, generator=g, dtype=torch.float64) for n, p in parameters.items()}
    expected = sum((gradients[n] * direction[n]).sum().item() for n in parameters)
    losses = []
    for move in (1e-7, -2e-7):
        with torch.no_grad():
            for n, parameter in parameters.items():
                parameter.add_(direction[n], alpha=move)
        replays.append(iter(moved))
        losses.append(learner.loss(episode).item())
    assert (losses[0] - losses[1]) / 2e-7 == pytest.approx(expected, rel=1e-4)
    assert abs(expected) > 1e-2


def conv4_by_hand(
    theta: dict[str, Tensor],
    x: Tensor,
    on_output: Callable[[int, Tensor, Tensor], Tensor] = lambda i, h, f: f,
    on_relu: Callable[[int, Tensor, Tensor], Tensor] = lambda i, h, f: f,
) -> Tensor:
    """The logits of Conv4 by PyTorch alone, with a say after each convolution and each ReLU."""
    h = x
    for i in range(4):
        f = F.conv2d(h, theta[f"blocks.{i}.conv.weight"], theta[f"blocks.{i}.conv.bias"], padding=1)
        f = F.batch_norm(on_output(i, h, f), None, None, None, theta[f"blocks.{i}.norm.bias"], training=True, eps=1e-3)
        h = F.max_pool2d(on_relu(i, h, F.relu(f)), 2)
    return F.linear(h.flatten(1), theta["head.weight"], theta["head.bias"])


def loss_by_hand(name: str, theta: dict[str, Tensor], phi: dict[str, Tensor], episode: md.Episode) -> Tensor:
    """The support loss of an inner step with `SeededNoise(3)`, by PyTorch alone."""
    x, y, stream = episode.support_x, episode.support_y, md.SeededNoise(3).stream(0, 0)
    terms = []

    def twin(i: int, h: Tensor) -> Tensor:
        w, b = (phi[f"generators.blocks/{i}/conv.{part}"] for part in ("weight", "bias"))
        return F.conv2d(h, w, b, padding=1)

    def bottleneck(i: int, h: Tensor, f: Tensor) -> Tensor:
        sigma = F.softplus(twin(i, h) - 5)
        kl = distributions.kl_divergence(distributions.Normal(f, sigma), distributions.Normal(0.0, 1.0))
        terms.append(0.1 * kl.sum(dim=1).mean())
        return f + sigma * stream.normal(f.shape, f)

    def dropout(i: int, h: Tensor, f: Tensor) -> Tensor:
        spread = 0.001 + 0.7 * torch.sigmoid(twin(i, h))
        terms.append(-0.1 * (torch.log(spread) * (f > 0)).sum(dim=1).mean())
        return f * torch.exp(spread * stream.normal(f.shape, f))

    if name == "vib":
        return F.cross_entropy(conv4_by_hand(theta, x, on_output=bottleneck), y) + sum(terms)
    if name == "information-dropout":
        return F.cross_entropy(conv4_by_hand(theta, x, on_relu=dropout), y) + sum(terms)
    if name == "mixup":  # of the images, with a ratio of 0.3
        logits = conv4_by_hand(theta, 0.3 * x + 0.7 * x.roll(1, 0))
        labels = 0.3 * F.one_hot(y, 3).double() + 0.7 * F.one_hot(y.roll(1), 3).double()
        return F.cross_entropy(logits, labels)
    assert name == "adversarial"
    fixed = {n: w.detach() for n, w in theta.items()}
    moved = projected_gradient_descent(
        lambda images: conv4_by_hand(fixed, images), x, y, norm="l2", radius=0.5, steps=10, start=None
    )
    return F.cross_entropy(conv4_by_hand(theta, moved), y)


STRONG: dict[str, dict[str, Any]] = {
    "vib": {"kl_weight": 0.1},
    "information-dropout": {"kl_weight": 0.1},
    "mixup": {},
    "adversarial": {"norm": "l2", "radius": 0.5},
}


@pytest.mark.parametrize("name", STRONG)
def test_an_inner_step_is_the_one_on_the_loss_by_hand(name: str, conv4: md.Conv4) -> None:
    episode, perturbation = make_episode(), make(name, conv4, **STRONG[name])
    learner = md.MAML(conv4, perturbation, inner_lr=0.1, steps=1)
    source: Any = Chosen(0.3, md.SeededNoise(3)) if name == "mixup" else md.SeededNoise(3)
    adapted = learner.adapted_weights(episode.support_x, episode.support_y, mc_samples=1, generator=source)
    theta, phi = dict(conv4.named_parameters()), dict(perturbation.named_parameters())
    weights = {f"network.{n}": w for n, w in theta.items()} | {f"perturbation.{n}": w for n, w in phi.items()}
    names = learner.adapted_names
    assert len(names) == (18 if phi else 10)  # of four convolutions and a head; of four twins
    gradients = torch.autograd.grad(loss_by_hand(name, theta, phi, episode), [weights[n] for n in names])
    for n, gradient in zip(names, gradients, strict=True):
        torch.testing.assert_close(adapted[n], weights[n].detach() - 0.1 * gradient, msg=n)
    plain = md.MAML(conv4, inner_lr=0.1, steps=1).adapted_weights(episode.support_x, episode.support_y)
    assert not torch.allclose(adapted["network.head.bias"], plain["network.head.bias"], atol=1e-4)


@pytest.mark.parametrize("name", ALL)
def test_only_what_says_so_is_adapted(name: str, conv4: md.Conv4) -> None:
    perturbation, episode = make(name, conv4), make_episode()
    learner = md.MAML(conv4, perturbation, inner_lr=0.1, steps=2)
    before = {n: p.detach() for n, p in learner.named_parameters()}
    source = md.SeededNoise(0) if perturbation.traits.random else None
    after = learner.inner_steps(dict(before), episode.support_x, episode.support_y, source, 1, differentiable=False)
    own = {n for n in before if n.startswith("perturbation.")}
    changed = {n for n in own if not torch.equal(before[n], after[n])}
    assert changed == (own if name in ("more-parameters", "vib", "information-dropout") else set())


@pytest.mark.parametrize("name", [name for name in ALL if PERTURBATIONS[name].traits.random or name == "combined"])
def test_a_step_with_many_samples_is_the_mean_of_single_ones(name: str, conv4: md.Conv4) -> None:
    perturbation, episode = make(name, conv4), make_episode()
    learner = md.MAML(conv4, perturbation, inner_lr=0.1, steps=1)

    class Only:
        """The given sample of a source, as if it were the first."""

        def __init__(self, sample: int) -> None:
            self.sample = sample

        def stream(self, step: int, sample: int) -> Any:
            return md.SeededNoise(0).stream(step, self.sample)

    def one_step(source: Any, samples: int) -> dict[str, Tensor]:
        weights = {n: p.detach() for n, p in learner.named_parameters()}
        return learner.inner_steps(weights, episode.support_x, episode.support_y, source, samples, differentiable=False)

    together, singles = one_step(md.SeededNoise(0), 3), [one_step(Only(s), 1) for s in range(3)]
    for n in learner.adapted_names:
        torch.testing.assert_close(together[n], torch.stack([s[n] for s in singles]).mean(0), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ALL)
def test_first_order_is_refused_exactly_where_a_reason_is_declared(name: str, conv4: md.Conv4) -> None:
    perturbation = make(name, conv4)
    if perturbation.traits.needs_second_order:
        with pytest.raises(ValueError, match="first_order cannot be used with"):
            md.MAML(conv4, perturbation, first_order=True)
        return
    gradients = (
        md.MAML(conv4, perturbation, first_order=True)
        .task_gradient(make_episode(), generator=md.SeededNoise(0))
        .gradients
    )
    assert all(g.abs().max() > 0 for n, g in gradients.items() if n.startswith("perturbation."))


# --- what they become at their limits --------------------------------------------------------------------------------


def copy_weights(target: Perturbation, source: Perturbation) -> None:
    shared = dict(source.named_parameters())
    with torch.no_grad():
        for n, p in target.named_parameters():
            if n in shared:
                p.copy_(shared[n])


def test_deterministic_is_metadropout_with_zero_noise(conv4: md.Conv4) -> None:
    x = make_episode().support_x
    full, still = make("metadropout", conv4), make("deterministic", conv4)
    copy_weights(still, full)
    a, b = md.MAML(conv4, full), md.MAML(conv4, still)
    torch.testing.assert_close(logits_of(a, x, Still()), logits_of(b, x, Still()))
    assert not torch.allclose(logits_of(a, x, md.SeededNoise(0)), logits_of(b, x, Still()))


def test_fixed_gaussian_is_metadropout_with_zero_mean(conv4: md.Conv4) -> None:
    x = make_episode().support_x
    full, fixed = make("metadropout", conv4), make("fixed-gaussian", conv4)
    with torch.no_grad():
        for parameter in full.parameters():
            parameter.zero_()
    a, b = md.MAML(conv4, full), md.MAML(conv4, fixed)
    torch.testing.assert_close(logits_of(a, x, md.SeededNoise(0)), logits_of(b, x, md.SeededNoise(0)))
    h = torch.rand(2, 4, 8, 8, dtype=torch.float64)
    f = conv4.blocks[1].conv(h)
    query = Pass(dict(full.named_parameters()))
    torch.testing.assert_close(fixed.after("blocks.1.conv", h, f, query), f * math.log(2))
    torch.testing.assert_close(full.after("blocks.1.conv", h, f, query), f * math.log(2))


def test_learned_variance_with_unit_spread_is_metadropout(conv4: md.Conv4) -> None:
    x = make_episode().support_x
    full, learned = make("metadropout", conv4), make("learned-variance", conv4)
    copy_weights(learned, full)
    a, b = md.MAML(conv4, full), md.MAML(conv4, learned)
    assert not torch.allclose(logits_of(a, x, md.SeededNoise(0)), logits_of(b, x, md.SeededNoise(0)))
    with torch.no_grad():
        for key, twin in learned.generators.items():
            if key.startswith("spread:"):
                twin.weight.zero_()
                twin.bias.fill_(math.log(math.e - 1))
    torch.testing.assert_close(logits_of(a, x, md.SeededNoise(0)), logits_of(b, x, md.SeededNoise(0)))


def test_learned_variance_starts_at_a_spread_of_one() -> None:
    perturbation = PERTURBATIONS["learned-variance"](md.Conv4(way=3))
    bias = perturbation.generators["spread:blocks/0/conv"].bias
    torch.testing.assert_close(F.softplus(bias), torch.ones(64), rtol=1e-4, atol=0)


@pytest.mark.parametrize(
    ("name", "options"), [("additive", {"noise_scale": 0.0}), ("vib", {}), ("information-dropout", {})]
)
def test_without_noise_features_are_as_without_perturbation(
    name: str, options: dict[str, Any], conv4: md.Conv4
) -> None:
    x = make_episode().support_x
    perturbed, plain = md.MAML(conv4, make(name, conv4, **options)), md.MAML(conv4)
    source = md.SeededNoise(0) if name == "additive" else Still()
    torch.testing.assert_close(logits_of(perturbed, x, source), logits_of(plain, x, Still()))


def test_mixup_with_ratio_one_is_no_perturbation(conv4: md.Conv4) -> None:
    episode, mixup = make_episode(), make("mixup", conv4)
    a = md.MAML(conv4, mixup).loss(episode, generator=Chosen(1.0, Still()))
    torch.testing.assert_close(a, md.MAML(conv4).loss(episode))
    assert not torch.allclose(a, md.MAML(conv4, mixup).loss(episode, generator=md.SeededNoise(0)))


def test_mixup_of_the_first_input_mixes_the_images(network: nn.Module) -> None:
    x = make_episode().support_x
    plain, mixed = md.MAML(network), md.MAML(network, make("mixup", network))
    torch.testing.assert_close(logits_of(mixed, x, Chosen(0.0, Still())), logits_of(plain, x.roll(1, 0), Still()))
    mixture = 0.3 * x + 0.7 * x.roll(1, 0)
    torch.testing.assert_close(logits_of(mixed, x, Chosen(0.3, Still())), logits_of(plain, mixture, Still()))


def test_mixup_mixes_at_the_modules_that_are_named(conv4: md.Conv4) -> None:
    assert list(make("mixup", conv4, layers=["blocks.2"]).input_sites) == ["blocks.2", "head"]
    assert list(make("mixup", md.ResNet12(way=3)).input_sites) == [*(f"blocks.{i}" for i in range(4)), "head"]
    with pytest.raises(ValueError, match=r"'blocks\.9' is not a module of Conv4; it has \['blocks', "):
        make("mixup", conv4, layers=["blocks.9"])


def test_adversarial_of_radius_zero_is_no_perturbation(conv4: md.Conv4) -> None:
    episode = make_episode()
    a = md.MAML(conv4, make("adversarial", conv4, radius=0.0)).loss(episode)
    torch.testing.assert_close(a, md.MAML(conv4).loss(episode))


# --- their defining facts --------------------------------------------------------------------------------------------


def sample_factor(
    name: str, bias: float, spread_bias: float | None = None, **options: Any
) -> tuple[Tensor, Perturbation]:
    """Many draws of what a perturbation makes of f = 1 where its twin's output is a constant."""
    network = md.Conv4(way=2, channels=2, image_size=16).double()
    perturbation = PERTURBATIONS[name](network, **options).double()
    with torch.no_grad():
        for n, parameter in perturbation.named_parameters():
            parameter.zero_()
            if n.endswith("bias") or n.startswith("means"):
                parameter.fill_(spread_bias if "spread:" in n and spread_bias is not None else bias)
    context = support_pass(perturbation, [md.SeededNoise(11).stream(0, 0)])
    f = torch.ones(300, 2, 16, 16, dtype=torch.float64)
    h = torch.zeros(300, 1, 16, 16, dtype=torch.float64)
    return perturbation.hidden("blocks.0.conv", h, f, context), perturbation  # type: ignore[operator]


def softplus(a: Any) -> Any:
    return np.logaddexp(0, a)


BIAS, SPREAD_BIAS = -0.7, 0.3
DISTRIBUTIONS: dict[str, tuple[dict[str, Any], Callable[[Any], Any]]] = {
    "metadropout": ({}, lambda e: softplus(BIAS + e)),
    "additive": ({"noise_scale": 0.4}, lambda e: 1 + 0.4 * softplus(BIAS) * e),
    "fixed-gaussian": ({}, softplus),
    "independent-gaussian": ({}, lambda e: softplus(BIAS + e)),
    "learned-variance": ({}, lambda e: softplus(BIAS + softplus(SPREAD_BIAS) * e)),
    "vib": ({}, lambda e: 1 + softplus(BIAS - 5) * e),
    "information-dropout": ({}, lambda e: np.exp((0.001 + 0.7 / (1 + np.exp(-BIAS))) * e)),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_noise_has_the_distribution_it_should_have(name: str) -> None:
    options, function = DISTRIBUTIONS[name]
    draws, _ = sample_factor(name, BIAS, SPREAD_BIAS, **options)

    def moment(k: int, centre: float = 0.0) -> float:
        return float(integrate.quad(lambda e: (function(e) - centre) ** k * stats.norm.pdf(e), -12, 12)[0])

    mean = moment(1)
    variance, n = moment(2, mean), draws.numel()
    assert abs(draws.mean().item() - mean) < 5 * math.sqrt(variance / n)
    assert abs(draws.var().item() - variance) < 5 * math.sqrt((moment(4, mean) - variance**2) / n)
    median = float(function(0.0))
    assert abs((draws < median).double().mean().item() - 0.5) < 5 * math.sqrt(0.25 / n)


def twin_of(w: dict[str, Tensor], h: Tensor, prefix: str = "") -> Tensor:
    """What the twin of the second convolution gives, by PyTorch alone."""
    weight, bias = (w[f"generators.{prefix}blocks/1/conv.{part}"] for part in ("weight", "bias"))
    return F.conv2d(h, weight, bias, padding=1)


QUERY_FORMS: dict[str, Callable[[dict[str, Tensor], Tensor], Tensor | float]] = {
    "metadropout": lambda w, h: F.softplus(twin_of(w, h)),
    "additive": lambda w, h: 1.0,
    "fixed-gaussian": lambda w, h: math.log(2),
    "independent-gaussian": lambda w, h: F.softplus(w["means.blocks/1/conv"]).view(1, -1, 1, 1),
    "deterministic": lambda w, h: F.softplus(twin_of(w, h)),
    "more-parameters": lambda w, h: F.softplus(twin_of(w, h)),
    "learned-variance": lambda w, h: F.softplus(twin_of(w, h)),
    "vib": lambda w, h: 1.0,
    "information-dropout": lambda w, h: 1.0,
}


@pytest.mark.parametrize("name", QUERY_FORMS)
def test_query_images_get_the_factor_that_the_table_says(name: str, conv4: md.Conv4) -> None:
    perturbation = make(name, conv4)
    w, query = dict(perturbation.named_parameters()), Pass(dict(perturbation.named_parameters()))
    h, f = torch.rand(2, 3, 4, 8, 8, dtype=torch.float64) - 0.5  # before normalisation, which would hide factors
    for layer in [layer for layer in ("blocks.1.conv", "blocks.1.relu") if layer in perturbation.sites]:
        torch.testing.assert_close(perturbation.after(layer, h, f, query), f * QUERY_FORMS[name](w, h))
    assert perturbation.penalty(query) is None
    logits = torch.randn(3, 3, dtype=torch.float64)
    assert torch.equal(perturbation.after("head", torch.rand(3, 4, dtype=torch.float64), logits, query), logits)


@pytest.mark.parametrize("name", [name for name, kind in PERTURBATIONS.items() if kind.traits.support_only])
def test_a_query_pass_without_a_perturbation_equals_the_one_with_it(name: str, network: nn.Module) -> None:
    learner, x = md.MAML(network, make(name, network)).double(), make_episode().query_x
    weights = dict(learner.named_parameters())
    without = learner.perturbed.run(weights, x, learner.perturbed.query_pass(weights))
    perturbation = learner.perturbation
    perturbation.traits = replace(perturbation.traits, support_only=False)
    acting = PerturbedNetwork(network, perturbation)
    torch.testing.assert_close(acting.run(weights, x, acting.query_pass(weights)), without)


def test_every_perturbation_of_features_has_its_query_form_tested() -> None:
    assert set(QUERY_FORMS) == {name for name, kind in PERTURBATIONS.items() if kind.traits.changes == ("features",)}


SUPPORT_FORMS: dict[str, Callable[[dict[str, Tensor], Tensor, Tensor, Tensor], Tensor]] = {
    "metadropout": lambda w, h, f, e: f * F.softplus(twin_of(w, h) + e),
    "additive": lambda w, h, f, e: f + 0.1 * F.softplus(twin_of(w, h)) * e,
    "fixed-gaussian": lambda w, h, f, e: f * F.softplus(e),
    "independent-gaussian": lambda w, h, f, e: f * F.softplus(w["means.blocks/1/conv"].view(1, -1, 1, 1) + e),
    "deterministic": lambda w, h, f, e: f * F.softplus(twin_of(w, h)),
    "more-parameters": lambda w, h, f, e: f * F.softplus(twin_of(w, h)),
    "learned-variance": lambda w, h, f, e: f * F.softplus(twin_of(w, h) + F.softplus(twin_of(w, h, "spread:")) * e),
    "vib": lambda w, h, f, e: f + F.softplus(twin_of(w, h) - 5) * e,
    "information-dropout": lambda w, h, f, e: f * torch.exp((0.001 + 0.7 * torch.sigmoid(twin_of(w, h))) * e),
}


@pytest.mark.parametrize("name", QUERY_FORMS)
def test_support_images_get_noise_that_depends_on_them_as_the_table_says(name: str, conv4: md.Conv4) -> None:
    perturbation = make(name, conv4)
    h, f, e = torch.randn(3, 2, 4, 8, 8, dtype=torch.float64)
    context = support_pass(
        perturbation, [md.RecordedNoise([e], per_pass=1).stream(0, 0)] if perturbation.traits.random else []
    )
    got = perturbation.after("blocks.1.conv", h, f, context)
    if name == "information-dropout":
        assert got is f
        got = perturbation.after("blocks.1.relu", f, f, context)
    torch.testing.assert_close(got, SUPPORT_FORMS[name](dict(perturbation.named_parameters()), h, f, e))


def test_independent_noise_has_one_learned_mean_per_channel(conv4: md.Conv4) -> None:
    perturbation = make("independent-gaussian", conv4)
    f = torch.ones(3, 4, 8, 8, dtype=torch.float64)
    query = Pass(dict(perturbation.named_parameters()))
    a = perturbation.after("blocks.1.conv", torch.rand(3, 4, 8, 8, dtype=torch.float64), f, query)
    b = perturbation.after("blocks.1.conv", torch.rand(3, 4, 8, 8, dtype=torch.float64), f, query)
    assert torch.equal(a, b)  # whatever the input
    assert torch.equal(a, a[:1, :, :1, :1].expand_as(a))
    assert a[0, :, 0, 0].unique().numel() == 4


def test_heads_get_the_noise_that_the_table_says(conv4: md.Conv4) -> None:
    h = torch.rand(5, 4, dtype=torch.float64)
    logits = conv4.head(h)
    e = torch.randn(5, 3, dtype=torch.float64)
    expected: dict[str, Callable[[dict[str, Tensor]], Tensor | float]] = {
        "metadropout": lambda w: F.softplus(h @ w["generators.head.weight"].T + w["generators.head.bias"]),
        "learned-variance": lambda w: F.softplus(h @ w["generators.head.weight"].T + w["generators.head.bias"]),
        "additive": lambda w: 0.1 * F.softplus(h @ w["generators.head.weight"].T + w["generators.head.bias"]),
        "fixed-gaussian": lambda w: math.log(2),
        "independent-gaussian": lambda w: F.softplus(w["means.head"]),
        "deterministic": lambda w: 0.0,
        "more-parameters": lambda w: 0.0,
        "vib": lambda w: 0.0,
    }
    for name, sigma in expected.items():
        perturbation = make(name, conv4)
        context = support_pass(perturbation, [md.RecordedNoise([e], per_pass=1).stream(0, 0)])
        got = perturbation.after("head", h, logits, context)
        torch.testing.assert_close(got, logits + sigma(dict(perturbation.named_parameters())) * e, msg=name)


def test_weight_noise_is_one_gaussian_draw_per_weight_and_pass(conv4: md.Conv4) -> None:
    torch.manual_seed(0)
    network = md.Conv4(way=5, channels=32).double()
    perturbation = PERTURBATIONS["weight-gaussian"](network).double()
    theta = dict(network.named_parameters())
    noisy = perturbation.change_weights(dict(theta), support_pass(perturbation, [md.SeededNoise(0).stream(0, 0)]))
    changed = {n for n in theta if not torch.equal(theta[n], noisy[n])}
    assert changed == {n for n in theta if ".norm." not in n}
    noise = torch.cat([(noisy[n] - theta[n]).flatten() for n in changed])
    assert noise.mean().abs() < 5 * 0.002 / math.sqrt(noise.numel())
    assert noise.std().item() == pytest.approx(0.002, rel=5 / math.sqrt(2 * noise.numel()))
    query = perturbation.change_weights(dict(theta), Pass(dict(perturbation.named_parameters())))
    assert all(query[n] is theta[n] for n in theta)


@pytest.mark.parametrize("gamma", [0.2, 1.0, 2.0])
def test_mixup_mixes_images_and_labels_alike_at_one_random_layer(gamma: float, conv4: md.Conv4) -> None:
    mixup = make("mixup", conv4, gamma=gamma)
    assert list(mixup.input_sites) == [f"blocks.{i}.conv" for i in range(4)] + ["head"]
    h = torch.rand(6, 4, dtype=torch.float64)
    y, logits = torch.tensor([0, 0, 1, 1, 2, 2]), torch.randn(6, 3, dtype=torch.float64)
    counts: dict[str, int] = {}
    ratios = []
    for seed in range(400):
        context = support_pass(mixup, [md.SeededNoise(seed).stream(0, 0)])
        outputs = {name: mixup.before(name, h, context) for name in mixup.input_sites}
        layer, ratio, partner = context.notes["layer"], context.notes["ratio"], context.notes["partner"]
        counts[layer] = counts.get(layer, 0) + 1
        ratios.append(ratio)
        torch.testing.assert_close(outputs[layer], ratio * h + (1 - ratio) * h[partner])
        assert all(torch.equal(o, h) for name, o in outputs.items() if name != layer)
        labels = ratio * F.one_hot(y, 3).double() + (1 - ratio) * F.one_hot(y[partner], 3).double()
        torch.testing.assert_close(mixup.label_loss(logits, y, context), F.cross_entropy(logits, labels))
    assert stats.chisquare([counts[name] for name in mixup.input_sites]).pvalue > 1e-4
    assert stats.kstest(ratios, stats.beta(gamma, gamma).cdf).pvalue > 1e-4


def test_vib_penalty_is_the_kl_divergence_to_a_standard_normal(conv4: md.Conv4) -> None:
    vib = make("vib", conv4, kl_weight=0.01)
    h, h2 = torch.rand(3, 1, 16, 16, dtype=torch.float64), torch.rand(3, 4, 8, 8, dtype=torch.float64)
    context = support_pass(vib, [md.SeededNoise(0).stream(0, 0)])
    expected = 0.0
    for name, layer_input in (("blocks.0.conv", h), ("blocks.1.conv", h2)):
        f = conv4.get_submodule(name)(layer_input)
        vib.after(name, layer_input, f, context)
        sigma = F.softplus(vib.generators[module_key(name)](layer_input) - 5)
        kl = distributions.kl_divergence(distributions.Normal(f, sigma), distributions.Normal(0.0, 1.0))
        expected += kl.sum(dim=1).mean().item()  # summed over channels, averaged over images and positions
    assert vib.penalty(context).item() == pytest.approx(0.01 * expected, rel=1e-10)


def test_information_dropout_penalises_weak_noise_on_active_units_after_the_relu(conv4: md.Conv4) -> None:
    perturbation = make("information-dropout", conv4, kl_weight=0.01)
    h = torch.rand(3, 1, 16, 16, dtype=torch.float64)
    context = support_pass(perturbation, [md.SeededNoise(0).stream(0, 0)])
    f = conv4.blocks[0].conv(h)
    assert perturbation.after("blocks.0.conv", h, f, context) is f
    activated = torch.relu(f)
    out = perturbation.after("blocks.0.relu", f, activated, context)
    assert not torch.allclose(out, activated)
    assert torch.equal(out == 0, activated == 0)
    spread = 0.001 + 0.7 * torch.sigmoid(perturbation.generators["blocks/0/conv"](h))
    expected = (-spread.log() * (activated > 0)).sum(dim=1).mean().item()
    assert perturbation.penalty(context).item() == pytest.approx(0.01 * expected, rel=1e-10)


def test_information_dropout_penalises_by_the_kl_divergence_to_a_log_uniform_prior_up_to_a_constant() -> None:
    network = convolutions(nn.ReLU())
    perturbation = make("information-dropout", network, kl_weight=1.0, layers=["0"])
    penalties, entropies = [], []
    for bias in (-1.0, 2.0):
        with torch.no_grad():
            for n, parameter in perturbation.named_parameters():
                parameter.fill_(bias if n.endswith("bias") else 0.0)
        context = support_pass(perturbation, [md.SeededNoise(0).stream(0, 0)])
        h, f = torch.rand(3, 1, 4, 4, dtype=torch.float64), torch.ones(3, 2, 4, 4, dtype=torch.float64)
        perturbation.after("0", h, f, context)
        perturbation.after("1", f, f, context)
        penalties.append(perturbation.penalty(context).item())
        spread = torch.tensor(0.001 + 0.7 / (1 + math.exp(-bias)), dtype=torch.float64)
        # To a log-uniform prior, the divergence of log-normal noise of median one is minus its entropy, and a constant.
        entropies.append(2 * distributions.LogNormal(0.0, spread).entropy().item())  # of two channels
    assert penalties[1] - penalties[0] == pytest.approx(entropies[0] - entropies[1], rel=1e-10)


def convolutions(*between: nn.Module) -> nn.Sequential:
    """A network of two convolutions with some modules after the first, and a ReLU module after the second."""
    first, second = nn.Conv2d(1, 2, 3, padding=1), nn.Conv2d(2, 2, 3, padding=1)
    end = [nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 3)]
    return nn.Sequential(first, *between, second, *end).double()


def test_information_dropout_needs_relu_modules_after_the_layers_that_are_named() -> None:
    with pytest.raises(ValueError, match=r"has no nn\.ReLU module; use nn\.ReLU\(\)"):
        PERTURBATIONS["information-dropout"](nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(2, 3)))
    episode, noise = make_episode(), md.SeededNoise(0)
    network = convolutions(nn.Tanh())
    named = md.MAML(network, make("information-dropout", network, layers=["0"]))
    with pytest.raises(ValueError, match=r"'0' is followed by '2' and not by an nn\.ReLU module"):
        named.loss(episode, generator=noise)
    found = md.MAML(network, make("information-dropout", network))
    gradients = found.task_gradient(episode, generator=noise).gradients
    of_first, of_second = (gradients[f"perturbation.generators.{name}.weight"] for name in ("0", "2"))
    assert of_first.abs().max() == 0  # its activation is left alone, and the other layer's is not taken for its own
    assert of_second.abs().max() > 0
    network = convolutions(nn.MaxPool2d(2), nn.ReLU())
    with pytest.raises(ValueError, match=r"'0' gives .* needs the ReLU before pooling"):
        md.MAML(network, make("information-dropout", network)).loss(episode, generator=noise)


def test_a_bottleneck_on_a_network_without_hidden_layers_does_nothing() -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(256, 3)).double()
    a = md.MAML(network, make("vib", network)).loss(make_episode(), generator=md.SeededNoise(0))
    torch.testing.assert_close(a, md.MAML(network).loss(make_episode()))


def test_adversarial_refuses_unknown_norms_and_images_out_of_range(conv4: md.Conv4) -> None:
    with pytest.raises(ValueError, match="norm is 'L2', but only l1, l2, linf are known"):
        make("adversarial", conv4, norm="L2")
    episode = make_episode()
    standardised = md.Episode(4 * episode.support_x - 2, episode.support_y, episode.query_x, episode.query_y)
    with pytest.raises(ValueError, match=r"within \[0, 1\], but these reach from -1\.\d+ to 1\.\d+"):
        md.MAML(conv4, make("adversarial", conv4)).loss(standardised)


@pytest.mark.parametrize(("norm", "order", "radius"), [("l1", 1, 1.0), ("l2", 2, 0.3), ("linf", math.inf, 0.05)])
def test_adversarial_moves_images_within_the_radius_and_raises_the_support_loss(
    norm: str, order: float, radius: float, conv4: md.Conv4
) -> None:
    episode = make_episode()
    learner = md.MAML(conv4, make("adversarial", conv4, norm=norm, radius=radius))
    weights: dict[str, Tensor] = dict(learner.named_parameters())
    moved = learner.perturbed.change_images(weights, episode.support_x, episode.support_y)
    distances = torch.linalg.vector_norm((moved - episode.support_x).flatten(1), order, dim=1)
    assert distances.max() <= radius * (1 + 1e-12)
    assert distances.min() > 0.8 * radius
    assert 0 <= moved.min() <= moved.max() <= 1
    assert not moved.requires_grad

    def loss(x: Tensor) -> float:
        return F.cross_entropy(conv4(x), episode.support_y).item()

    assert loss(moved) > loss(episode.support_x)


@pytest.mark.parametrize("name", ["vib", "information-dropout"])
def test_stays_finite_through_five_large_steps_at_the_largest_weight(name: str) -> None:
    torch.manual_seed(0)
    network = md.Conv4(way=5, channels=64, image_size=28)  # the KL sums over channels, so as many as in the recipe
    perturbation = PERTURBATIONS[name](network, kl_weight=1e-3)
    learner = md.MAML(network, perturbation, inner_lr=0.4, steps=5)
    episode = make_episode(way=5, shot=5, query=3, size=28, dtype=torch.float32)
    for seed in range(3):
        result = learner.task_gradient(episode, generator=md.SeededNoise(seed))
        assert result.loss.isfinite()
        assert all(g.isfinite().all() for g in result.gradients.values())


# --- on models of all kinds ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in WITH_WEIGHTS if name not in ("weight-gaussian", "combined")])
def test_layers_that_are_frozen_get_twins_that_are_trained(name: str, conv4: md.Conv4) -> None:
    conv4.blocks.requires_grad_(False)
    learner = md.MAML(conv4, make(name, conv4), inner_lr=0.05, steps=2)
    gradients = learner.task_gradient(make_episode(), generator=md.SeededNoise(0)).gradients
    own = {n: g for n, g in gradients.items() if n.startswith("perturbation.")}
    assert own.keys() == {n for n, _ in learner.named_parameters() if n.startswith("perturbation.")}
    assert all(g.abs().max() > 0 for n, g in own.items() if "bias" not in n)


class Tokens(nn.Module):
    """Takes the rows of an image for tokens, as many as there are features: (n, tokens, features)."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.relu, self.head = nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.relu(self.mix(x.flatten(0, 1))).mean(dim=1))


def test_a_linear_layers_channels_are_its_features_also_on_tokens() -> None:
    network, f = Tokens().double(), torch.rand(3, 16, 16, dtype=torch.float64)
    independent = make("independent-gaussian", network)
    factor = independent.after("mix", f, torch.ones_like(f), Pass(dict(independent.named_parameters())))
    torch.testing.assert_close(factor, F.softplus(independent.means["mix"]).expand(3, 16, 16))
    network.mix = nn.Linear(16, 5).double()  # now features and tokens differ in number
    vib = make("vib", network, kl_weight=1.0)
    context = support_pass(vib, [md.SeededNoise(0).stream(0, 0)])
    out = network.mix(f)
    vib.after("mix", f, out, context)
    normal = distributions.Normal(out, F.softplus(vib.generators["mix"](f) - 5))
    kl = distributions.kl_divergence(normal, distributions.Normal(0.0, 1.0))
    assert vib.penalty(context).item() == pytest.approx(kl.sum(dim=-1).mean().item(), rel=1e-10)


def test_a_layer_whose_weight_is_computed_from_others_can_have_no_twin() -> None:
    network = convolutions(nn.ReLU())
    nn.utils.parametrizations.weight_norm(network[2])
    with pytest.raises(ValueError, match=r"the weight of '2' is computed from others .* layers="):
        make("metadropout", network)
    for perturbation in (make("metadropout", network, layers=["0"]), make("independent-gaussian", network)):
        learner = md.MAML(network, perturbation)
        assert learner.loss(make_episode(), generator=md.SeededNoise(0)).isfinite()


def test_the_old_weight_norm_is_refused_with_the_newer_one_named() -> None:
    network = convolutions(nn.ReLU())
    with pytest.warns(FutureWarning, match="weight_norm"):
        nn.utils.weight_norm(network[2])
    with pytest.raises(ValueError, match=r"the weight of '2' is no parameter but set by a hook.*parametrizations"):
        make("metadropout", network)
    with pytest.raises(ValueError, match=r"the weight of '2' is no parameter but set by a hook.*parametrizations"):
        md.MAML(network)


class CosineHead(nn.Module):
    """Logits are cosines between features and class vectors."""

    def __init__(self, features: int, way: int) -> None:
        super().__init__()
        self.in_features, self.vectors = features, nn.Parameter(torch.randn(way, features))

    def forward(self, x: Tensor) -> Tensor:
        return 5 * F.linear(F.normalize(x, dim=-1), F.normalize(self.vectors, dim=-1))


def with_head(*head: nn.Module) -> nn.Sequential:
    """A network whose two convolutions give 4 features, and its head."""
    first, second = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.AdaptiveAvgPool2d(1), *head).double()


HEADS: dict[str, Callable[[], list[nn.Module]]] = {
    "1x1 convolution": lambda: [nn.Conv2d(4, 3, 1), nn.Flatten()],
    "convolution, then pooling": lambda: [
        nn.Upsample(size=(2, 2)),
        nn.Conv2d(4, 3, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    ],
    "cosines": lambda: [nn.Flatten(), CosineHead(4, 3)],
}


@pytest.mark.parametrize("name", [name for name in ALL if name not in ("none", "combined")])
@pytest.mark.parametrize("head", HEADS)
def test_a_head_need_not_be_a_linear_layer(head: str, name: str) -> None:
    torch.manual_seed(0)
    network = with_head(*HEADS[head]())
    randomise(network, scale=0.1)
    learner = md.MAML(network, make(name, network), inner_lr=0.05, steps=2)
    found = find_layers(network)
    assert found.hidden == ("0", "2")
    assert found.head == ("5" if head == "1x1 convolution" else "6")
    result = learner.task_gradient(make_episode(), generator=md.SeededNoise(0))
    assert all(g.isfinite().all() for g in result.gradients.values())
    heads = [n for n in result.gradients if n.startswith(("perturbation.generators.5", "perturbation.generators.6"))]
    assert all(result.gradients[n].abs().max() > 0 for n in heads)
    assert bool(heads) is (name in ("metadropout", "additive", "learned-variance"))


def test_only_noise_on_the_logits_needs_to_know_how_many_features_the_head_gets() -> None:
    network = with_head(nn.Flatten(), CosineHead(4, 3))
    del network[-1].in_features
    with pytest.raises(ValueError, match=r"'6' gets, but a CosineHead does not say how many: give it an attribute"):
        make("metadropout", network)
    learner = md.MAML(network, make("metadropout", network, head_noise=False))
    assert learner.loss(make_episode(), generator=md.SeededNoise(0)).isfinite()


def test_noise_on_a_convolutions_logits_has_one_sigma_for_all_classes() -> None:
    network = with_head(nn.Conv2d(4, 3, 1), nn.Flatten())
    noise = make("metadropout", network)
    h, e = torch.rand(5, 4, 1, 1, dtype=torch.float64), torch.randn(5, 3, 1, 1, dtype=torch.float64)
    logits = network[5](h)
    context = support_pass(noise, [md.RecordedNoise([e], per_pass=1).stream(0, 0)])
    sigma = (noise.after("5", h, logits, context) - logits) / e
    weight, bias = noise.generators["5"].weight, noise.generators["5"].bias
    torch.testing.assert_close(sigma, F.softplus(F.conv2d(h, weight, bias)).expand(5, 3, 1, 1))


def test_for_another_number_of_classes_a_convolutions_rows_change_and_an_unknown_heads_do_not() -> None:
    network = with_head(nn.Conv2d(4, 3, 1), nn.Flatten())
    learner = md.MAML(network, make("metadropout", network)).for_way(5)
    rows = learner.network[5].weight
    torch.testing.assert_close(rows, network[5].weight.mean(dim=0, keepdim=True).expand(5, 4, 1, 1))
    assert learner.loss(make_episode(way=5), generator=md.SeededNoise(0)).isfinite()
    other = md.MAML(with_head(nn.Flatten(), CosineHead(4, 3)))
    assert other.for_way(5) is other


def test_a_hidden_layer_is_not_taken_for_the_head_in_silence() -> None:
    network = with_head(nn.Flatten(), nn.Linear(4, 8), nn.Tanh(), CosineHead(8, 3))
    episode, noise = make_episode(), md.SeededNoise(0)
    with pytest.raises(
        ValueError, match=r"'6' is assumed to be the head, but it does not give as many values as there"
    ):
        md.MAML(network, make("deterministic", network)).loss(episode, generator=noise)
    for options in ({"head": "8"}, {"layers": ["0", "2", "6"]}):
        perturbation = make("deterministic", network, **options)
        assert list(perturbation.generators) == ["0", "2", "6"]
        assert md.MAML(network, perturbation).loss(episode, generator=noise).isfinite()


class FunctionalHead(nn.Module):
    """Uses the weights of its last layer without running it."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.last = nn.Linear(256, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.features(x.flatten(1))), self.last.weight)


def test_a_head_has_to_run_as_a_module_where_its_logits_get_noise() -> None:
    network, episode, noise = FunctionalHead().double(), make_episode(), md.SeededNoise(0)
    for options in ({}, {"head": "last"}, {"layers": ["features"]}):
        with pytest.raises(ValueError, match=r"'last' is assumed to be the head, but it did not run as a module"):
            md.MAML(network, make("metadropout", network, **options)).loss(episode, generator=noise)
    for options in ({"head": "last"}, {"layers": ["features"]}):
        perturbation = make("metadropout", network, head_noise=False, **options)
        assert md.MAML(network, perturbation).loss(episode, generator=noise).isfinite()


@pytest.mark.parametrize("name", [name for name in WITH_WEIGHTS if name not in ("weight-gaussian", "combined")])
def test_transposed_convolutions_are_perturbed_as_others(name: str) -> None:
    torch.manual_seed(0)
    up = nn.ConvTranspose2d(2, 4, 3, stride=2, padding=1, output_padding=1, groups=2)
    end = [nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)]
    network = nn.Sequential(nn.Conv2d(1, 2, 3, stride=2, padding=1), nn.ReLU(), up, *end).double()
    learner = md.MAML(network, make(name, network), inner_lr=0.05, steps=2)
    gradients = learner.task_gradient(make_episode(), generator=md.SeededNoise(0)).gradients
    own = {n: g for n, g in gradients.items() if n.startswith(("perturbation.generators.2", "perturbation.means.2"))}
    assert own
    assert all(g.abs().max() > 0 for g in own.values())
    h = torch.rand(2, 2, 8, 8, dtype=torch.float64)
    torch.testing.assert_close(apply_layer(up, h, up.weight, up.bias), up(h))


# --- combinations, and perturbations of one's own --------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in ALL if PERTURBATIONS[name].traits.changes not in ((), ("labels",))])
def test_combined_with_a_mixup_that_mixes_nothing_a_perturbation_is_itself(name: str, conv4: md.Conv4) -> None:
    episode, source = make_episode(), Chosen(1.0, md.SeededNoise(0))
    alone = make(name, conv4)
    both = PERTURBATIONS["combined"](conv4, parts=[alone, make("mixup", conv4)])
    a, b = (md.MAML(conv4, p, inner_lr=0.05, steps=2) for p in (alone, both))
    one, two = (learner.task_gradient(episode, generator=source) for learner in (a, b))
    torch.testing.assert_close(two.loss, one.loss)
    for parameter, gradient in one.gradients.items():
        in_both = parameter.replace("perturbation.", "perturbation.parts.0.")
        torch.testing.assert_close(two.gradients[in_both], gradient)
    assert not torch.allclose(two.loss, b.loss(episode, generator=Chosen(0.6, md.SeededNoise(0))))


def test_combined_with_noise_that_is_zero_mixup_is_itself(conv4: md.Conv4) -> None:
    episode, mixup = make_episode(), make("mixup", conv4)
    both = PERTURBATIONS["combined"](conv4, parts=[make("additive", conv4, noise_scale=0.0), mixup])
    a, b = (md.MAML(conv4, p).loss(episode, generator=md.SeededNoise(0)) for p in (mixup, both))
    torch.testing.assert_close(a, b)


def test_combining_two_of_a_kind_is_refused_with_the_reason(conv4: md.Conv4) -> None:
    class Silent(Perturbation):
        """Does not say what it acts on."""

    class Relabels(Perturbation):
        """Acts on the labels, too, and says so of the weights only."""

        traits = md.Traits(changes=("weights",))

        def label_loss(self, logits: Tensor, y: Tensor, context: Pass) -> Tensor:
            return logits.sum()

    def combine(*parts: Any) -> None:
        PERTURBATIONS["combined"](conv4, parts=parts)

    with pytest.raises(ValueError, match="MetaDropout and Additive cannot be combined: both act on the features"):
        combine({"name": "metadropout"}, {"name": "additive"})
    with pytest.raises(ValueError, match="Mixup and Relabels cannot be combined: both act on the labels"):
        combine({"name": "mixup"}, Relabels(conv4))
    with pytest.raises(ValueError, match="'nothing' cannot be a part"):
        combine({"name": "nothing"})
    with pytest.raises(ValueError, match="'metadropout' cannot be a part of a combination: write"):
        combine("metadropout")
    with pytest.raises(ValueError, match="Silent says that it acts on nothing: leave it out, or name"):
        combine(Silent(conv4))
    with pytest.raises(ValueError, match="a combination cannot be a part of another one"):
        combine(PERTURBATIONS["combined"](conv4, parts=[{"name": "mixup"}]))


class HeadFirst(nn.Module):
    """Declares the layer that gives the logits before a hidden one, and a ReLU that never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.unused, self.relu = nn.ReLU(), nn.ReLU()
        self.logits, self.features = nn.Linear(8, 3), nn.Linear(256, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.logits(self.relu(self.features(x.flatten(1))))


def test_a_combination_checks_networks_as_its_parts_do() -> None:
    network, episode, noise = HeadFirst().double(), make_episode(), md.SeededNoise(0)

    def loss(part: str, **options: Any) -> Tensor:
        parts = [make(part, network, **options), make("mixup", network, **options)]
        return md.MAML(network, PERTURBATIONS["combined"](network, parts=parts)).loss(episode, generator=noise)

    with pytest.raises(ValueError, match="'features' is assumed to be the head, but 'logits' runs after it"):
        loss("metadropout")
    assert loss("metadropout", head="logits").isfinite()
    assert loss("information-dropout", head="logits").isfinite()  # that one of the ReLUs does not run is no harm


def test_mistakes_in_a_perturbation_of_ones_own_are_told_as_what_they_are(conv4: md.Conv4) -> None:
    class Forgetful(Perturbation):
        """Draws noise without saying so."""

        sites = ("head",)

        def after(self, name: str, h: Tensor, f: Tensor, context: Pass) -> Tensor:
            return f + context.normal(f)

    class Broken(Perturbation):
        """Looks for what is not there."""

        def label_loss(self, logits: Tensor, y: Tensor, context: Pass) -> Tensor:
            return logits[99].sum()

    with pytest.raises(ValueError, match="say so in its class: traits = Traits\\(random=True\\)"):
        md.MAML(conv4, Forgetful(conv4)).loss(make_episode())
    with pytest.raises(IndexError):
        md.MAML(conv4, Broken(conv4)).loss(make_episode())
    with pytest.raises(ValueError, match="a label is 4, but the network has 3 outputs"):
        md.MAML(conv4).loss(make_episode(way=5))


def test_a_new_perturbation_is_one_class(conv4: md.Conv4) -> None:
    class Shaken(Perturbation):
        """Adds noise of a learned size to the logits of support images."""

        traits = md.Traits(changes=("features",), random=True)
        sites = ("head",)

        def __init__(self, network: nn.Module) -> None:
            super().__init__(network)
            self.size = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))

        def after(self, name: str, h: Tensor, f: Tensor, context: Pass) -> Tensor:
            return f + context.weights["size"] * context.normal(f) if context.support else f

    episode, noise = make_episode(), md.SeededNoise(0)
    learner = md.MAML(conv4, Shaken(conv4), steps=1)
    expected = conv4(episode.support_x) + 0.5 * noise.stream(0, 0).normal((6, 3), episode.support_x)
    torch.testing.assert_close(logits_of(learner, episode.support_x, noise), expected)
    assert learner.task_gradient(episode, generator=noise).gradients["perturbation.size"] != 0
    mixed = PERTURBATIONS["combined"](conv4, parts=[Shaken(conv4), {"name": "mixup"}])
    assert md.MAML(conv4, mixed).loss(episode, generator=noise).isfinite()


def test_traits_of_a_combination_are_those_of_all_its_parts(conv4: md.Conv4) -> None:
    parts = [make("vib", conv4), make("mixup", conv4)]
    assert PERTURBATIONS["combined"](conv4, parts=parts).traits == md.Traits(
        changes=("features", "labels"),
        random=True,
        samples_share_a_batch=False,
        tasks_share_a_batch=False,
        adapts=True,
        support_only=True,
        needs_second_order=parts[0].traits.needs_second_order,
    )


def test_traits_that_could_not_be_meant_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"changes is 'features'; it lists what is acted on, of features, .*'features',"
    ):
        md.Traits(changes="features")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"changes is \('logits',\)"):
        md.Traits(changes=("logits",))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"Old.random has no effect: write traits = Traits\(random=...\)"):
        type("Old", (Perturbation,), {"random": True})
