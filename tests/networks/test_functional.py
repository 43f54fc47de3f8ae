"""Networks as functions: the same answers as the module, other weights, other statistics."""

from __future__ import annotations

import torch
from torch import nn
from toys import UsersModel

import metadropout as md
from metadropout.networks import FunctionalNetwork, Normalisation, find_layers
from metadropout.ops.normalisation import batch_normalise


def test_a_network_as_a_function_gives_the_modules_own_answer(conv4: md.Conv4) -> None:
    x = torch.rand(4, 1, 16, 16, dtype=torch.float64)
    function = FunctionalNetwork(conv4, [])
    torch.testing.assert_close(function(dict(conv4.named_parameters()), x), conv4(x))
    other = {name: 2 * p for name, p in conv4.named_parameters()}
    assert not torch.allclose(function(other, x), conv4(x))


def test_a_users_batch_norm_runs_on_batch_statistics_with_its_own_eps_and_scale() -> None:
    norm = nn.BatchNorm2d(3, eps=0.1).double().train()
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([1.0, -2.0, 3.0]))
        norm.bias.copy_(torch.tensor([0.5, 0.0, -1.0]))
    network = nn.Sequential(norm, nn.Flatten())
    x = torch.randn(4, 3, 5, 5, dtype=torch.float64)
    answer = FunctionalNetwork(network)(dict(network.named_parameters()), x)
    assert (norm.running_mean == 0).all()
    torch.testing.assert_close(answer, norm(x).flatten(1))


def test_hooks_see_each_listed_layer_once_in_order_and_may_replace_its_output() -> None:
    model = UsersModel().double()
    layers = find_layers(model)
    assert layers.hidden == ("stem", "body.0", "hidden")
    assert layers.head == "fc"
    function = FunctionalNetwork(model, [*layers.hidden, layers.head])
    seen = []

    def hook(name: str, h: torch.Tensor, f: torch.Tensor) -> torch.Tensor:
        seen.append(name)
        return f + 1 if name == "fc" else f

    x = torch.rand(4, 1, 16, 16, dtype=torch.float64)
    weights = dict(model.named_parameters())
    torch.testing.assert_close(function(weights, x, hook), function(weights, x) + 1)
    assert seen == ["stem", "body.0", "hidden", "fc"]


def test_groups_are_normalised_apart() -> None:
    x = torch.randn(6, 3, 4, 4, dtype=torch.float64)
    bias = torch.randn(3, dtype=torch.float64)
    together = batch_normalise(x, None, bias, 1e-3, groups=3)
    grouped = x.reshape(3, 2, 3, 4, 4)  # (groups, n, channels, height, width)
    variance, mean = torch.var_mean(grouped, dim=(1, 3, 4), correction=0, keepdim=True)
    apart = ((grouped - mean) / torch.sqrt(variance + 1e-3)).reshape(6, 3, 4, 4) + bias.view(1, 3, 1, 1)
    torch.testing.assert_close(together, apart)
    assert not torch.allclose(together, batch_normalise(x, None, bias, 1e-3))


def test_normalisation_uses_the_biased_variance_and_the_papers_eps() -> None:
    norm = md.Conv4(way=2).blocks[0].norm.double()
    x = torch.randn(3, 64, 2, 2, dtype=torch.float64)
    mean, variance = x.mean(dim=(0, 2, 3), keepdim=True), x.var(dim=(0, 2, 3), correction=0, keepdim=True)
    torch.testing.assert_close(norm(x), (x - mean) / torch.sqrt(variance + 1e-3))


def test_collected_statistics_given_back_give_the_same_answer(conv4: md.Conv4) -> None:
    x = torch.rand(4, 1, 16, 16, dtype=torch.float64)
    function, weights = FunctionalNetwork(conv4, []), dict(conv4.named_parameters())
    statistics: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    expected = function(weights, x, normalisation=Normalisation(collected=statistics))
    assert list(statistics) == [f"blocks.{i}.norm" for i in range(4)]
    torch.testing.assert_close(function(weights, x, normalisation=Normalisation(given=statistics)), expected)


def test_resnet12_perturbs_its_3x3_convolutions_and_not_its_shortcuts() -> None:
    model = md.ResNet12(way=5, channels=(4, 5, 6, 7))
    layers = find_layers(model)
    assert len(layers.hidden) == 12
    assert all(model.get_submodule(name).kernel_size == (3, 3) for name in layers.hidden)
    assert [block.shortcut_conv.out_channels for block in model.blocks] == [4, 5, 6, 7]
    assert md.ResNet12(way=5).head.in_features == 512
    assert model(torch.rand(2, 3, 84, 84)).shape == (2, 5)


def test_conv4_has_the_papers_feature_sizes() -> None:
    assert md.Conv4(way=20, in_channels=1, image_size=28, channels=64).head.in_features == 64
    assert md.Conv4(way=5, in_channels=3, image_size=84, channels=32).head.in_features == 800
    assert md.Conv4(way=5, in_channels=3, image_size=32, channels=32).head.in_features == 128
