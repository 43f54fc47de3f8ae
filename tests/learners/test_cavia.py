"""CAVIA: a context that is adapted, weights that are not, and FiLM between pooling and ReLU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from toys import assert_batched_equals_loop, assert_finite_differences, make_episode, randomise

import metadropout as md
from metadropout.learners import CAVIA
from metadropout.networks.film import FiLM

CONTEXT = "network.blocks.2.film.context"


def make_network(channels: int = 4, context: int = 5) -> md.Conv4:
    torch.manual_seed(0)
    network = md.Conv4(way=3, in_channels=1, image_size=16, channels=channels, context=context, norm="batch").double()
    randomise(network)
    return network


@pytest.fixture
def network() -> md.Conv4:
    return make_network()


def film_of(network: md.Conv4) -> FiLM:
    film = network.blocks[2].film
    assert isinstance(film, FiLM)
    return film


def adapted(learner: md.GradientLearner, episode: md.Episode) -> dict[str, Tensor]:
    return learner.adapted_weights(episode.support_x, episode.support_y, mc_samples=1, generator=md.SeededNoise(0))


def test_the_context_is_all_that_is_adapted_and_is_not_meta_learned(network: md.Conv4, episode: md.Episode) -> None:
    learner = CAVIA(network, inner_lr=1.0, steps=2)
    assert learner.adapted_names == [CONTEXT]
    before = learner.initial_weights()
    after = adapted(learner, episode)
    assert [name for name in before if not torch.equal(before[name], after[name])] == [CONTEXT]
    gradients = learner.task_gradient(episode).gradients
    assert gradients.keys() == {name for name, _ in network.named_parameters(prefix="network")}
    assert all(gradient.abs().max() > 0 for gradient in gradients.values())


def test_each_task_starts_from_a_context_of_zeros(network: md.Conv4, episode: md.Episode) -> None:
    learner = CAVIA(network, inner_lr=1.0, steps=2)
    first = adapted(learner, episode)[CONTEXT]
    adapted(learner, make_episode(seed=1))
    learner.task_gradient(make_episode(seed=2))
    assert torch.equal(adapted(learner, episode)[CONTEXT], first)
    assert (film_of(network).context == 0).all()
    none = CAVIA(network, steps=0)
    torch.testing.assert_close(none(episode).logits, network(episode.query_x))


@pytest.mark.parametrize("channels", [2, 4, 16])
def test_as_many_numbers_are_adapted_whatever_the_width(channels: int) -> None:
    learner = CAVIA(make_network(channels, context=100))
    assert sum(tensor.numel() for tensor in learner.adapted_tensors().values()) == 100


def test_the_gradient_of_the_context_is_that_of_scale_and_offset_through_a(
    network: md.Conv4, episode: md.Episode
) -> None:
    learner, film = CAVIA(network, inner_lr=1.0, steps=1), film_of(network)
    values = film.bias.detach().clone().requires_grad_()  # γ and β at c = 0
    loss = F.cross_entropy(
        torch.func.functional_call(network, {"blocks.2.film.bias": values}, (episode.support_x,)), episode.support_y
    )
    (slope,) = torch.autograd.grad(loss, values)
    torch.testing.assert_close(adapted(learner, episode)[CONTEXT], -film.weight.T @ slope, rtol=1e-9, atol=1e-14)


def test_with_a_zero_nothing_adapts_and_a_stays_zero(network: md.Conv4, episode: md.Episode) -> None:
    learner, film = CAVIA(network, inner_lr=1.0, steps=2), film_of(network)
    nn.init.zeros_(film.weight)
    assert (adapted(learner, episode)[CONTEXT] == 0).all()
    assert (learner.task_gradient(episode).gradients["network.blocks.2.film.weight"] == 0).all()


def test_with_a_zero_scale_1_and_offset_0_it_is_plain_conv4(network: md.Conv4, episode: md.Episode) -> None:
    film = film_of(network)
    with torch.no_grad():
        film.weight.zero_()
        film.bias.copy_(torch.tensor([1.0] * 4 + [0.0] * 4))
    plain = md.Conv4(way=3, in_channels=1, image_size=16, channels=4, norm="batch").double()
    plain.load_state_dict({n: v for n, v in network.state_dict().items() if "film" not in n})
    torch.testing.assert_close(CAVIA(network)(episode).logits, plain(episode.query_x))


def test_film_comes_after_pooling_and_before_relu(network: md.Conv4, episode: md.Episode) -> None:
    film, h = film_of(network), episode.query_x
    with torch.no_grad():
        film.context.fill_(0.5)
        film.bias[:2] -= 2
        assert (F.linear(film.context, film.weight, film.bias)[:4] < 0).any()  # or pooling could come after it
    for i, block in enumerate(network.blocks):
        norm = block.norm
        h = F.conv2d(h, block.conv.weight, block.conv.bias, padding=1)
        h = F.max_pool2d(F.batch_norm(h, None, None, norm.weight, norm.bias, training=True, eps=1e-5), 2)
        if i == 2:
            scale, offset = F.linear(film.context, film.weight, film.bias).chunk(2)
            h = scale[:, None, None] * h + offset[:, None, None]
        h = F.relu(h)
    torch.testing.assert_close(network(episode.query_x), network.head(h.flatten(1)))


def test_film_starts_as_the_authors_does() -> None:
    torch.manual_seed(0)
    film = FiLM(64, 100)
    assert (film.context == 0).all()
    assert film.bias.abs().max() < 0.1  # so that γ is not near 1
    assert film.bias.abs().max() > 0.09
    assert film.weight.abs().max().item() == pytest.approx((3 / 100) ** 0.5, rel=0.01)


def test_conv4_without_a_context_is_what_it_was(episode: md.Episode) -> None:
    def built(**options: int) -> md.Conv4:
        torch.manual_seed(0)
        return md.Conv4(way=3, in_channels=1, image_size=16, channels=4, **options)

    assert list(built().blocks[2]._modules) == list(built(context=0).blocks[2]._modules)
    assert list(built().blocks[2]._modules) == ["conv", "norm", "relu", "pool"]
    assert not list(built().buffers())


class AtTheHead(nn.Module):
    """A network that gets its context beside the features of the head."""

    context: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("context", torch.zeros(4))
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(256, 8), nn.Tanh())
        self.head = nn.Linear(8 + 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        return self.head(torch.cat([h, self.context.expand(len(h), -1)], dim=1))


def test_a_context_at_the_head_moves_the_logits_of_all_images_alike(episode: md.Episode) -> None:
    torch.manual_seed(0)
    network = AtTheHead().double()
    learner = CAVIA(network, inner_lr=0.7, steps=1)
    assert learner.adapted_names == ["network.context"]
    classify = learner.adapt(episode.support_x, episode.support_y)
    v = network.head.weight[:, 8:]
    errors = network(episode.support_x).softmax(1) - F.one_hot(episode.support_y, 3)
    moved = -0.7 * v @ v.T @ errors.mean(dim=0)
    torch.testing.assert_close(classify(episode.query_x), network(episode.query_x) + moved, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("perturbation", [False, True], ids=["plain", "metadropout"])
def test_the_meta_gradient_equals_finite_differences(
    perturbation: bool, network: md.Conv4, episode: md.Episode
) -> None:
    noise = md.MetaDropout(network).double() if perturbation else None
    if noise is not None:
        randomise(noise, seed=1)
    learner = CAVIA(network, noise, inner_lr=1.0, steps=2)
    names = [name for name, _ in learner.named_parameters()]
    groups = {
        "film": [name for name in names if ".film." in name],
        "norms": [name for name in names if ".norm." in name],
        "rest": [n for n in names if n.startswith("network.") and ".norm." not in n and ".film." not in n],
    }
    if noise is not None:
        groups["φ"] = [name for name in names if name.startswith("perturbation.")]
    assert_finite_differences(learner, episode, groups, md.SeededNoise(5))


def test_with_metadropout_the_noise_is_on_convolutions_and_not_on_film(network: md.Conv4, episode: md.Episode) -> None:
    noise = md.MetaDropout(network).double()
    assert list(noise.generators) == [*(f"blocks/{i}/conv" for i in range(4)), "head"]
    learner = CAVIA(network, noise, inner_lr=1.0, steps=2)
    one, other = (
        learner.adapted_weights(episode.support_x, episode.support_y, mc_samples=1, generator=md.SeededNoise(seed))
        for seed in (0, 1)
    )
    assert not torch.allclose(one[CONTEXT], other[CONTEXT])
    weights = adapted(learner, episode)
    h = episode.query_x
    for i, block in enumerate(network.blocks):
        z = F.softplus(noise.generators[f"blocks/{i}/conv"](h))
        h = F.conv2d(h, block.conv.weight, block.conv.bias, padding=1) * z
        h = F.max_pool2d(F.batch_norm(h, None, None, block.norm.weight, block.norm.bias, training=True, eps=1e-5), 2)
        if i == 2:
            scale, offset = F.linear(weights[CONTEXT], block.film.weight, block.film.bias).chunk(2)
            h = scale[:, None, None] * h + offset[:, None, None]
        h = F.relu(h)
    classify = learner.adapt(episode.support_x, episode.support_y, generator=md.SeededNoise(0), mc_samples=1)
    torch.testing.assert_close(classify(episode.query_x), network.head(h.flatten(1)), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("inductive", [False, True], ids=["transductive", "inductive"])
@pytest.mark.parametrize("perturbation", [False, True], ids=["plain", "metadropout"])
def test_several_tasks_can_be_one_batched_pass(perturbation: bool, inductive: bool, network: md.Conv4) -> None:
    learner = CAVIA(network, md.MetaDropout(network).double() if perturbation else None, inner_lr=1.0, steps=2)
    assert_batched_equals_loop(learner, [make_episode(seed=seed, inductive=inductive) for seed in range(3)])


def test_another_number_of_classes_than_in_training_is_refused_with_the_reason(network: md.Conv4) -> None:
    learner = CAVIA(network)
    assert learner.for_way(3) is learner
    with pytest.raises(
        md.ConfigError, match=r"trained on tasks of 3 classes and cannot do tasks of 5: it does not adapt"
    ):
        learner.for_way(5)


def test_a_network_without_a_context_is_refused_with_the_way_out(conv4: md.Conv4) -> None:
    with pytest.raises(ValueError, match=r"Conv4 has none: build the network with one \(--network.context 100\)"):
        CAVIA(conv4)
