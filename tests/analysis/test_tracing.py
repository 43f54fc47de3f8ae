"""A probe sees the very passes that the learner runs, on any network, and measures the noise."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from toys import randomise

import metadropout as md
from metadropout.analysis.tracing import Probe, draws_features, initial_weights, noise_strengths
from metadropout.noise import SeededNoise
from metadropout.perturbations import PERTURBATIONS


def learner_of(network: nn.Module, perturbation: str, **options: bool) -> md.MAML:
    noise = PERTURBATIONS[perturbation](network)
    randomise(noise)
    return md.MAML(network, noise, steps=2, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("inductive", [False, True])
@pytest.mark.parametrize("perturbation", ["none", "metadropout", "additive", "weight-gaussian", "vib"])
def test_a_traced_query_pass_gives_the_logits_of_the_adapted_classifier(
    network: nn.Module, episode: md.Episode, perturbation: str, inductive: bool
) -> None:
    learner = learner_of(network, perturbation)
    x, y = episode.support_x, episode.support_y
    classify = learner.adapt(x, y, inductive=inductive, mc_samples=3, generator=SeededNoise(1))
    weights = learner.adapted_weights(x, y, mc_samples=3, generator=SeededNoise(1))
    probe = Probe(learner)
    normalisation = probe.for_queries(weights, x, inductive=inductive)
    trace = probe(weights, episode.query_x, normalisation=normalisation)
    torch.testing.assert_close(trace.logits, classify(episode.query_x))
    head = f"network.{probe.found.head}"
    by_hand = nn.functional.linear(trace.features, weights[f"{head}.weight"], weights[f"{head}.bias"])
    torch.testing.assert_close(by_hand, trace.logits)


def test_a_support_pass_is_perturbed_by_the_given_noise_and_knows_what_it_would_be_without(conv4: md.Conv4) -> None:
    learner = learner_of(conv4, "metadropout")
    x = torch.rand(4, 1, 16, 16, dtype=torch.float64)
    trace = Probe(learner)(initial_weights(learner), x, stream=SeededNoise(0).stream(0, 0))
    layer = trace.hidden["blocks.0.conv"]
    twin = learner.perturbation.generators["blocks/0/conv"]  # type: ignore[index]
    mean = twin(x)
    e = SeededNoise(0).stream(0, 0).normal(mean.shape, mean)
    torch.testing.assert_close(layer.output, conv4.blocks[0].conv(x).detach())
    torch.testing.assert_close(layer.multiplier, nn.functional.softplus(mean).detach())
    torch.testing.assert_close(layer.undisturbed, layer.output * layer.multiplier)
    torch.testing.assert_close(layer.perturbed, layer.output * nn.functional.softplus(mean + e).detach())
    assert layer.activation.min() == 0  # what the ReLU gives
    assert trace.after(1).shape == (4, 4, 8, 8)  # pooled
    torch.testing.assert_close(trace.after(4), trace.features.unflatten(1, (4, 1, 1)).flatten(1))


def test_layers_stand_in_the_order_in_which_they_run_and_without_relu_give_their_output(episode: md.Episode) -> None:
    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(2, 3)
            self.second, self.first = nn.Conv2d(2, 2, 3), nn.Conv2d(1, 2, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(torch.relu(self.second(self.first(x))).mean((2, 3)))  # type: ignore[no-any-return]

    learner = learner_of(Backwards().double(), "fixed-gaussian")
    trace = Probe(learner)(initial_weights(learner), episode.support_x, stream=SeededNoise(0).stream(0, 0))
    assert list(trace.hidden) == ["first", "second"]
    assert trace.hidden["first"].activation is trace.hidden["first"].perturbed


def test_a_head_that_does_not_run_as_a_module_is_named(episode: md.Episode) -> None:
    class ByHand(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.fc = nn.Conv2d(1, 2, 3), nn.Linear(2, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(self.conv(x).mean((2, 3)), self.fc.weight)

    learner = md.MAML(ByHand().double())
    with pytest.raises(ValueError, match="'fc' did not run as a module"):
        Probe(learner)(initial_weights(learner), episode.support_x)


@pytest.mark.parametrize("name", [name for name in PERTURBATIONS if name != "combined"])
def test_strengths_are_measured_exactly_where_noise_is_put_on_layers(conv4: md.Conv4, name: str) -> None:
    learner = learner_of(conv4, name)
    strengths = noise_strengths(learner, torch.rand(6, 1, 16, 16, dtype=torch.float64), SeededNoise(0))
    noisy = name in ("metadropout", "additive", "fixed-gaussian", "independent-gaussian", "learned-variance", "vib")
    noisy |= name == "information-dropout"
    assert {key for key in strengths if key.startswith("strength/")} == (
        {f"strength/blocks.{block}.conv" for block in range(4)} if noisy else set()
    )
    assert all(value > 0 for value in strengths.values())
    assert draws_features(learner.perturbation) == (noisy or name == "weight-gaussian")


def test_the_strength_of_fixed_noise_is_that_of_its_distribution(conv4: md.Conv4) -> None:
    learner = learner_of(conv4, "fixed-gaussian")
    strengths = noise_strengths(learner, torch.rand(64, 1, 16, 16, dtype=torch.float64), SeededNoise(0))
    e = torch.randn(1_000_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    at_zero = nn.functional.softplus(torch.zeros((), dtype=torch.float64))
    expected = (nn.functional.softplus(e) - at_zero).square().mean().sqrt() / at_zero
    assert strengths["strength/blocks.0.conv"] == pytest.approx(float(expected), rel=0.02)
    assert strengths["multiplier/blocks.0.conv"] == pytest.approx(float(at_zero))
