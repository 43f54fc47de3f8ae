"""UNICORN-MAML: one row from which all classes start, so that neither their order nor their number matters."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from toys import assert_batched_equals_loop, assert_finite_differences, make_episode, make_perturbation, randomise

import metadropout as md
from metadropout.learners import Unicorn, UnicornMetaSGD
from metadropout.perturbations import PERTURBATIONS

KINDS = {"unicorn": Unicorn, "unicorn-metasgd": UnicornMetaSGD}
PARENTS = {"unicorn": md.MAML, "unicorn-metasgd": md.MetaSGD}


def make_network(way: int = 1) -> md.Conv4:
    torch.manual_seed(0)
    network = md.Conv4(way=way, in_channels=1, image_size=16, channels=4).double()
    randomise(network)
    return network


def make(kind: str, perturbation: str = "none", **options: float) -> md.GradientLearner:
    network = make_network()
    noise = make_perturbation(perturbation, network)
    learner = KINDS[kind](network, noise, **{"inner_lr": 0.05, "steps": 2, **options}).double()
    if kind == "unicorn-metasgd":
        randomise(learner.step_sizes, scale=0.002, seed=2)
    return learner


def noise() -> md.SeededNoise:
    return md.SeededNoise(0)


def answers(learner: md.GradientLearner, episode: md.Episode, labels: Tensor | None = None) -> Tensor:
    y = episode.support_y if labels is None else labels
    return learner.adapt(episode.support_x, y, generator=noise())(episode.query_x)


@pytest.fixture(params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_another_order_of_classes_gives_the_same_answers_in_that_order(kind: str, episode: md.Episode) -> None:
    order = torch.tensor([2, 0, 1])
    learner = make(kind)
    moved = answers(learner, episode, order[episode.support_y])
    torch.testing.assert_close(moved[:, order], answers(learner, episode), rtol=1e-10, atol=1e-12)
    maml = PARENTS[kind](make_network(way=3), inner_lr=0.05, steps=2).double()
    assert not torch.allclose(answers(maml, episode, order[episode.support_y])[:, order], answers(maml, episode))


@pytest.mark.parametrize("way", [2, 3, 7])
def test_one_learner_does_tasks_of_any_number_of_classes(kind: str, way: int) -> None:
    learner, episode = make(kind), make_episode(way=way)
    assert learner.for_way(way) is learner
    assert answers(learner, episode).shape == (2 * way, way)
    assert learner(episode).logits.shape == (2 * way, way)
    assert_batched_equals_loop(learner, [make_episode(way=way, seed=seed) for seed in range(3)])


def test_without_a_step_no_class_is_told_from_another(kind: str, episode: md.Episode) -> None:
    logits = answers(make(kind, steps=0), episode)
    assert torch.equal(logits, logits[:, :1].expand(-1, 3))


@pytest.mark.parametrize("perturbation", ["none", "metadropout"])
def test_what_the_row_is_has_no_influence_as_it_is_added_to_all_logits_alike(
    kind: str, perturbation: str, episode: md.Episode
) -> None:
    learner = make(kind, perturbation)
    before, gradients = (
        answers(learner, episode).softmax(1),
        learner.task_gradient(episode, generator=noise()).gradients,
    )
    assert all((gradients[f"network.head.{part}"] == 0).all() for part in ("weight", "bias"))  # and no rounding, either
    assert gradients["network.blocks.3.conv.weight"].abs().max() > 1e-3
    nn.init.zeros_(learner.network.head.weight)  # type: ignore[union-attr, arg-type]
    torch.testing.assert_close(answers(learner, episode).softmax(1), before, rtol=1e-9, atol=0)
    again = learner.task_gradient(episode, generator=noise()).gradients
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, again[name], rtol=1e-7, atol=1e-12)


def test_the_first_step_moves_the_head_alone(kind: str, episode: md.Episode) -> None:
    learner = make(kind, steps=1)
    after = learner.adapted_weights(episode.support_x, episode.support_y)
    moved = {n for n, value in learner.initial_weights().items() if (after[n] - value).abs().max() > 1e-12}
    assert moved == {"network.head.weight"}  # with as many images of each class, the biases have nothing to do either


def test_it_is_maml_from_equal_rows_whose_gradients_are_added_up(kind: str, episode: md.Episode) -> None:
    learner = make(kind)
    network = make_network(way=3)
    state = learner.network.state_dict()
    state |= {name: state[name].repeat(3, *[1] * (state[name].dim() - 1)) for name in ("head.weight", "head.bias")}
    network.load_state_dict(state)
    parent = PARENTS[kind](network, inner_lr=0.05, steps=2).double()
    if kind == "unicorn-metasgd":
        with torch.no_grad():
            for name, size in parent.step_sizes.items():
                size.copy_(learner.step_sizes[name].expand_as(size))
    mine, its = learner.task_gradient(episode), parent.task_gradient(episode)
    torch.testing.assert_close(mine.loss, its.loss, rtol=1e-12, atol=0)
    for name, gradient in mine.gradients.items():
        other = its.gradients[name]
        if other.shape != gradient.shape:
            assert "head" in name
            other = other.sum(dim=0, keepdim=True)
        torch.testing.assert_close(gradient, other, rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize("perturbation", ["none", "metadropout"])
def test_the_meta_gradient_equals_finite_differences(kind: str, perturbation: str, episode: md.Episode) -> None:
    learner = make(kind, perturbation)
    names = [name for name, _ in learner.named_parameters()]
    starts = ("network.blocks.", "perturbation.", "step_sizes.")
    groups = {start: found for start in starts if (found := [name for name in names if name.startswith(start)])}
    assert len(groups) == 1 + (perturbation != "none") + (kind != "unicorn")
    assert_finite_differences(learner, episode, groups, md.SeededNoise(5))


@pytest.mark.parametrize("perturbation", PERTURBATIONS)
def test_it_goes_with_every_perturbation(kind: str, perturbation: str, episode: md.Episode) -> None:
    learner = make(kind, perturbation)
    result = learner.task_gradient(episode, generator=noise())
    assert all(gradient.isfinite().all() for gradient in result.gradients.values())
    assert answers(learner, episode).isfinite().all()


def test_noisy_weights_are_drawn_for_each_class(episode: md.Episode) -> None:
    learner = make("unicorn", "weight-gaussian")
    weights = next(learner.inner_path(learner.initial_weights(), *episode.tensors()[:2], None, 1, True))
    theta = {name.removeprefix("network."): w for name, w in weights.items() if name.startswith("network.")}
    context = learner.perturbed.support_pass(weights, [md.SeededNoise(0).stream(0, 0)])
    rows = learner.perturbation.change_weights(theta, context)["head.weight"]
    assert rows.shape[0] == 3
    assert not torch.allclose(rows[0], rows[1])


def test_checkpointed_steps_have_the_same_gradients(kind: str, episode: md.Episode) -> None:
    one, other = (make(kind, "metadropout", gradient_checkpointing=on) for on in (False, True))
    mine, its = (learner.task_gradient(episode, generator=noise()) for learner in (one, other))
    for name, gradient in mine.gradients.items():
        torch.testing.assert_close(gradient, its.gradients[name], rtol=1e-9, atol=1e-12)


def test_a_network_with_a_row_per_class_is_refused_with_the_way_out(kind: str) -> None:
    with pytest.raises(ValueError, match=r"build the network with way=1, not with 3 rows to adapt"):
        KINDS[kind](make_network(way=3))
    with pytest.raises(ValueError, match=r"the one row of its head, which has to be adapted, too"):
        KINDS[kind](make_network(), adapted=["blocks.0.conv.weight"])


def test_a_users_network_is_left_as_it_is(kind: str, episode: md.Episode) -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(256, 8), nn.ReLU(), nn.Linear(8, 1)).double()
    before = copy.deepcopy(network.state_dict())
    learner = KINDS[kind](network).double()
    answers(learner, episode)
    learner.task_gradient(episode)
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
