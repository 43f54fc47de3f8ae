"""Meta-dropout's defining facts, checked before normalisation, which would hide a constant factor per channel."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import integrate, stats
from torch import Tensor, nn
from torch.nn import functional as F
from toys import make_episode, randomise

import metadropout as md
from metadropout.perturbations import PERTURBATIONS, Pass


def make(conv4: md.Conv4, **options: object) -> tuple[md.MetaDropout, dict[str, Tensor]]:
    noise = md.MetaDropout(conv4, **options).double()  # type: ignore[arg-type]
    randomise(noise)
    return noise, dict(noise.named_parameters())


def test_query_form_is_the_output_times_softplus_of_the_twin(conv4: md.Conv4) -> None:
    noise, weights = make(conv4)
    h = torch.rand(2, 4, 8, 8, dtype=torch.float64)
    f = conv4.blocks[1].conv(h)
    mean = F.conv2d(h, weights["generators.blocks/1/conv.weight"], weights["generators.blocks/1/conv.bias"], padding=1)
    out = noise.after("blocks.1.conv", h, f, Pass(weights))
    torch.testing.assert_close(out, f * torch.log1p(torch.exp(mean)))


def test_support_form_adds_unit_noise_before_the_softplus(conv4: md.Conv4) -> None:
    noise, weights = make(conv4)
    h = torch.rand(2, 4, 8, 8, dtype=torch.float64)
    f = conv4.blocks[1].conv(h)
    mean = F.conv2d(h, weights["generators.blocks/1/conv.weight"], weights["generators.blocks/1/conv.bias"], padding=1)
    e = torch.randn(f.shape, dtype=torch.float64)
    stream = md.RecordedNoise([e], per_pass=1).stream(0, 0)
    out = noise.after("blocks.1.conv", h, f, Pass(weights, [stream], support=True))
    torch.testing.assert_close(out, f * torch.log1p(torch.exp(mean + e)))


@pytest.mark.parametrize("mean", [-2.0, 0.0, 1.5])
@pytest.mark.parametrize("link", ["softplus", "exp"])
def test_sampled_multiplier_has_the_mean_and_variance_of_the_links_gaussian(mean: float, link: str) -> None:
    network = md.Conv4(way=2, channels=2, image_size=16).double()
    noise = md.MetaDropout(network, link=link).double()  # type: ignore[arg-type]
    with torch.no_grad():
        for parameter in noise.parameters():
            parameter.zero_()
        noise.generators["blocks/0/conv"].bias.fill_(mean)
    f = torch.ones(300, 2, 16, 16, dtype=torch.float64)
    stream = md.SeededNoise(7).stream(0, 0)
    z = noise.after(
        "blocks.0.conv",
        torch.zeros(300, 1, 16, 16, dtype=torch.float64),
        f,
        Pass(dict(noise.named_parameters()), [stream], support=True),
    )

    function = (lambda a: np.logaddexp(0, a)) if link == "softplus" else np.exp

    def moment(k: int) -> float:
        return float(integrate.quad(lambda a: function(a) ** k * stats.norm.pdf(a, mean, 1), mean - 12, mean + 12)[0])

    expected_mean = moment(1)
    expected_variance = moment(2) - expected_mean**2
    fourth = integrate.quad(
        lambda a: (function(a) - expected_mean) ** 4 * stats.norm.pdf(a, mean, 1), mean - 12, mean + 12
    )[0]
    n = z.numel()
    assert abs(z.mean().item() - expected_mean) < 5 * math.sqrt(expected_variance / n)
    assert abs(z.var().item() - expected_variance) < 5 * math.sqrt((fourth - expected_variance**2) / n)


def test_head_noise_has_one_sigma_per_image_and_a_draw_per_class(conv4: md.Conv4) -> None:
    noise, weights = make(conv4)
    h = torch.rand(5, 4, dtype=torch.float64)
    logits = conv4.head(h)
    e = torch.randn(5, 3, dtype=torch.float64)
    stream = md.RecordedNoise([e], per_pass=1).stream(0, 0)
    added = noise.after("head", h, logits, Pass(weights, [stream], support=True)) - logits
    sigma = added / e
    torch.testing.assert_close(sigma, sigma[:, :1].expand(-1, 3))
    assert sigma[:, 0].unique().numel() == 5
    expected = F.softplus(h @ weights["generators.head.weight"].T + weights["generators.head.bias"])
    torch.testing.assert_close(sigma[:, :1], expected)


def test_head_is_clean_on_query_and_where_head_noise_is_off(conv4: md.Conv4) -> None:
    noise, weights = make(conv4)
    h = torch.rand(5, 4, dtype=torch.float64)
    logits = conv4.head(h)
    assert torch.equal(noise.after("head", h, logits, Pass(weights)), logits)
    clean, weights = make(conv4, head_noise=False)
    assert torch.equal(
        clean.after("head", h, logits, Pass(weights, [md.SeededNoise(0).stream(0, 0)], support=True)), logits
    )
    assert not any("head" in name for name in weights)


def test_twins_have_the_layers_shapes_and_the_authors_initial_values() -> None:
    torch.manual_seed(0)
    network = md.Conv4(way=20, channels=64)
    noise = md.MetaDropout(network)
    for i in range(4):
        twin, layer = noise.generators[f"blocks/{i}/conv"], network.blocks[i].conv
        for conv in (twin, layer):
            assert conv.weight.shape == layer.weight.shape
            assert conv.weight.abs().max() <= 0.04
            if i:  # enough values for the standard deviation of a normal cut at two of its own: 0.88 · 0.02
                assert conv.weight.std().item() == pytest.approx(0.0176, rel=0.03)
            assert (conv.bias == 0).all()
        assert (network.blocks[i].norm.bias == 0).all()
        assert not torch.equal(twin.weight, layer.weight)
    assert noise.generators["head"].weight.shape == (1, 64)
    assert network.head.weight.std().item() == pytest.approx(0.02, rel=0.1)


@pytest.mark.parametrize("link", ["softplus", "exp"])
@pytest.mark.parametrize(
    "name",
    ["metadropout", "learned-variance", "deterministic", "more-parameters", "independent-gaussian", "fixed-gaussian"],
)
def test_a_start_at_one_leaves_query_images_of_a_network_as_they_are(name: str, link: str) -> None:
    torch.manual_seed(0)
    hidden = nn.Linear(256, 64, bias=False)  # a twin needs a bias all the same
    network = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), hidden, nn.Tanh())
    network.append(nn.Linear(64, 3)).double()
    options = {"link": link} if name == "metadropout" else {}
    perturbation = PERTURBATIONS[name](network, start="one", **options).double()
    learner, episode = md.MAML(network, perturbation, steps=0), make_episode()
    classify = learner.adapt(episode.support_x, episode.support_y, generator=md.SeededNoise(0))
    torch.testing.assert_close(classify(episode.query_x), network(episode.query_x))
    ordinary = md.MAML(network, PERTURBATIONS[name](network, **options).double(), steps=0)
    classify = ordinary.adapt(episode.support_x, episode.support_y, generator=md.SeededNoise(0))
    assert torch.allclose(classify(episode.query_x), network(episode.query_x), rtol=1e-3) is False
    learner = md.MAML(network, perturbation, inner_lr=0.05, steps=2)
    gradients = learner.task_gradient(episode, generator=md.SeededNoise(0)).gradients
    silent = [n for n, g in gradients.items() if n.startswith("perturbation.") and not g.any()]
    assert silent == []


def test_an_unknown_start_is_refused(conv4: md.Conv4) -> None:
    with pytest.raises(ValueError, match="start is 'two', but only 'zero' and 'one' are known"):
        md.MetaDropout(conv4, start="two")  # type: ignore[arg-type]


def test_an_unknown_link_is_refused(conv4: md.Conv4) -> None:
    with pytest.raises(ValueError, match="link is 'relu'"):
        md.MetaDropout(conv4, link="relu")  # type: ignore[arg-type]
