"""Networks as functions: the same answers as the module, other weights, other statistics."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch import Tensor, nn
from toys import UsersModel, make_episode

import metadropout as md
from metadropout.networks import FunctionalNetwork, Normalisation, find_layers
from metadropout.ops.normalisation import OffsetNorm, batch_normalise
from metadropout.perturbations import PERTURBATIONS


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


@pytest.mark.parametrize("kind", [md.Conv4, md.ResNet12])
def test_a_network_of_the_library_that_gives_features_is_known_to_do_so(kind: type[nn.Module]) -> None:
    network = kind(None, in_channels=1, image_size=16)
    layers = find_layers(network)
    assert all(isinstance(network.get_submodule(name), nn.Conv2d) for name in layers.hidden)
    assert (layers.head, layers.gives_features) == ("head", True)


def test_any_other_network_that_gives_features_has_to_name_the_place_of_its_head() -> None:
    network = nn.Sequential(OrderedDict(conv=nn.Conv2d(1, 2, 3), norm=nn.BatchNorm2d(2), head=nn.Identity()))
    with pytest.raises(ValueError, match=r"has no layer that is known to be its head; name it: head="):
        find_layers(network)
    assert find_layers(network, head="head").gives_features


def test_conv4_has_the_papers_feature_sizes() -> None:
    assert md.Conv4(way=20, in_channels=1, image_size=28, channels=64).head.in_features == 64
    assert md.Conv4(way=5, in_channels=3, image_size=84, channels=32).head.in_features == 800
    assert md.Conv4(way=5, in_channels=3, image_size=32, channels=32).head.in_features == 128


def test_a_network_can_read_the_settings_of_its_convolutions() -> None:
    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.head = nn.Conv2d(1, 4, 3, stride=2), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = nn.functional.pad(x, [self.conv.stride[0] - 1] * 4)
            return self.head(self.conv(x).mean(dim=(2, 3)))

    model, x = Padded(), torch.rand(2, 1, 16, 16)
    torch.testing.assert_close(FunctionalNetwork(model)(dict(model.named_parameters()), x), model(x))


def test_a_hard_sigmoid_can_be_differentiated_twice() -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(256, 8), nn.Hardsigmoid(), nn.Linear(8, 3)).double()
    x = torch.randn(4, 1, 16, 16, dtype=torch.float64) * 9
    torch.testing.assert_close(FunctionalNetwork(network)(dict(network.named_parameters()), x), network(x))
    gradients = md.MAML(network, inner_lr=0.1).task_gradient(make_episode()).gradients
    assert all(g.any() for g in gradients.values())


class Keywords(nn.Module):
    """Calls its layers by keyword, or not."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.offset = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), OffsetNorm(4)
        self.hidden, self.head = nn.Linear(4, 8), nn.Linear(8, 3)
        self.by_keyword = False

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.conv, self.norm, self.offset):
            x = layer(input=x) if self.by_keyword else layer(x)
        x = x.tanh().mean(dim=(2, 3))
        for layer in (self.hidden, self.head):
            x = layer(input=x) if self.by_keyword else layer(x)
        return x


@pytest.mark.parametrize("name", ["none", "metadropout", "mixup"])
def test_layers_may_be_called_by_keyword(name: str) -> None:
    torch.manual_seed(0)
    model, losses = Keywords().double(), []
    perturbation = PERTURBATIONS[name](model).double()
    for by_keyword in (False, True):
        model.by_keyword = by_keyword
        losses.append(md.MAML(model, perturbation).loss(make_episode(), generator=md.SeededNoise(0)))
    assert torch.equal(*losses)


def test_a_hook_replaces_the_first_argument_of_a_module_and_keeps_the_others() -> None:
    class Block(nn.Module):
        def forward(self, x: Tensor, y: Tensor, *, z: Tensor) -> Tensor:
            return x.flatten(1) + y + z

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def forward(self, x: Tensor) -> Tensor:
            return self.block(x, torch.ones(4), z=torch.ones(4))

    function, x = FunctionalNetwork(Model(), inputs=["block"]), torch.rand(2, 1, 2, 2)
    got = function({}, x, on_input=lambda name, h: 10 * h)
    assert torch.equal(got, 10 * x.flatten(1) + 2)


def test_images_of_another_type_than_the_weights_are_refused_with_the_conversion() -> None:
    model = UsersModel()
    learner, x, y = md.MAML(model), torch.randint(256, (6, 1, 16, 16), dtype=torch.uint8), torch.arange(6) % 3
    with pytest.raises(
        TypeError, match=r"UsersModel failed on images of type torch.uint8.* x.to\(torch.float32\) / 255"
    ):
        learner.adapt(x, y)
    with pytest.raises(TypeError, match=r"images of type torch.float64.*: x.to\(torch.float32\)$"):
        learner.adapt(x.double(), y)
    with pytest.raises(TypeError, match=r"images of type torch.uint8"):
        learner.adapt(x.float() / 255, y)(x)


def test_a_network_that_takes_bytes_gets_them_as_they_are() -> None:
    class Scaled(UsersModel):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.float() / 255)

    model, plain = Scaled(), UsersModel()
    plain.load_state_dict(model.state_dict())
    x, y = torch.randint(256, (6, 1, 16, 16), dtype=torch.uint8), torch.arange(6) % 3
    got, expected = md.MAML(model).adapt(x, y)(x), md.MAML(plain).adapt(x / 255, y)(x / 255)
    torch.testing.assert_close(got, expected)
