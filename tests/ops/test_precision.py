"""Convolutions in bfloat16: what is rounded, what is not, and that learning hardly notices."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from toys import UsersModel, make_episode

import metadropout as md
from metadropout.config import parse_config
from metadropout.data import EpisodeSampler, open_dataset
from metadropout.errors import ConfigError
from metadropout.networks.functional import FunctionalNetwork
from metadropout.networks.layers import apply_layer
from metadropout.noise import SeededNoise
from metadropout.ops import precision


@pytest.fixture(params=["units", "no units"])
def hardware(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """PyTorch computes in bfloat16 on any CPU, if slowly; so both ways can be tried anywhere."""
    monkeypatch.setattr(precision, "has_units", lambda device: request.param == "units")
    return str(request.param)


def rounded(x: Tensor) -> Tensor:
    return x.bfloat16().float()


@pytest.mark.parametrize("options", [{"padding": 1}, {"padding": 1, "stride": 2}])
def test_a_convolution_multiplies_rounded_numbers_and_adds_the_bias_unrounded(
    hardware: str, options: dict[str, int]
) -> None:
    layer = nn.Conv2d(16, 16, 3, **options)
    x = torch.randn(3, 16, 8, 8)
    out = apply_layer(layer, x, layer.weight, layer.bias, "bf16")
    assert out.dtype == torch.float32
    exact = F.conv2d(rounded(x).double(), rounded(layer.weight).double(), None, **options)
    assert layer.bias is not None
    without_bias = (out - layer.bias.view(-1, 1, 1)).double()
    torch.testing.assert_close(without_bias, exact, rtol=2**-8, atol=1e-2)  # one rounding of the result
    assert (without_bias - F.conv2d(x, layer.weight, None, **options)).abs().max() > 1e-4  # it is not float32


def test_gradients_are_rounded_too(hardware: str) -> None:
    layer = nn.Conv2d(16, 16, 3, padding=1)
    x = torch.randn(3, 16, 8, 8, requires_grad=True)
    g_x, g_w = torch.autograd.grad(apply_layer(layer, x, layer.weight, layer.bias, "bf16").sum(), [x, layer.weight])
    assert torch.equal(g_x, rounded(g_x))
    assert torch.equal(g_w, rounded(g_w))


def test_a_linear_layer_is_not_rounded(hardware: str) -> None:
    layer, x = nn.Linear(16, 16), torch.randn(3, 16)
    assert torch.equal(apply_layer(layer, x, layer.weight, layer.bias, "bf16"), layer(x))


def test_with_and_without_units_the_numbers_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = nn.Conv2d(16, 16, 3, padding=1), torch.randn(3, 16, 8, 8)
    results = []
    for units in (True, False):
        monkeypatch.setattr(precision, "has_units", lambda device, units=units: units)
        results.append(apply_layer(layer, x, layer.weight, layer.bias, "bf16"))
    # Sums in another order may fall on the other side of a rounding, in few places.
    assert (results[0] != results[1]).float().mean() < 0.05
    torch.testing.assert_close(results[0], results[1], rtol=2**-7, atol=2e-3)


def test_every_convolution_of_a_network_and_every_twin_is_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Size] = []

    def spy(convolve: precision.Convolve, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        seen.append(weight.shape)
        return convolve(x, weight)

    monkeypatch.setattr("metadropout.networks.layers.in_bf16", spy)
    monkeypatch.setattr("metadropout.networks.layers.convolution_to_bf16", lambda *_: None)  # as on other devices
    network = md.Conv4(way=3, channels=16)
    learner = md.MAML(network, md.MetaDropout(network), steps=0, precision="bf16")
    episode = make_episode(way=3, shot=1, query=1, size=28, dtype=torch.float32)
    learner.loss(episode, generator=SeededNoise(0))
    seen.clear()  # before its first pass a learner looks once which layers run
    learner.loss(episode, generator=SeededNoise(0))
    assert len(seen) == 8  # four layers and their twins
    seen.clear()
    users = UsersModel()
    count = sum(isinstance(m, nn.Conv2d) for m in users.modules())
    function = FunctionalNetwork(users, precision="bf16")
    function(dict(users.named_parameters()), make_episode(way=3, shot=1, query=1, dtype=torch.float32).support_x)
    assert len(seen) == count > 0


@pytest.mark.parametrize("learner_class", [md.MAML, md.MetaSGD])
def test_the_meta_gradient_is_about_that_of_float32(hardware: str, learner_class: type[md.MAML]) -> None:
    # One inner step: at initial weights, the path of more of them is sensitive to any rounding.
    sampler = EpisodeSampler(open_dataset("glyphs").train, way=5, shot=1, query=15, seed=0)
    episode = sampler.raw(0, 0).to(torch.device("cpu"))
    gradients = []
    for kind in ("full", "bf16"):
        torch.manual_seed(0)
        network = md.Conv4(way=5, channels=16)
        learner = learner_class(network, md.MetaDropout(network), steps=1, precision=kind)  # type: ignore[arg-type]
        result = learner.task_gradient(episode, generator=SeededNoise(0))
        assert all(g.dtype == torch.float32 for g in result.gradients.values())
        gradients.append(torch.cat([g.flatten() for g in result.gradients.values()]))
    assert not torch.equal(gradients[0], gradients[1])
    assert F.cosine_similarity(gradients[0], gradients[1], dim=0) > 0.9


def test_it_is_an_option_of_runs() -> None:
    config = parse_config({}, {"learner.precision": "bf16"})
    assert config.learner["precision"] == "bf16"
    with pytest.raises(ConfigError, match=r"learner\.precision"):
        parse_config({}, {"learner.precision": "int8"})
