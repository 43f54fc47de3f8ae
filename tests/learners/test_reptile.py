"""Reptile: mini-batches, an inner Adam that goes on from task to task, and an update without query images."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from toys import make_episode, make_perturbation, smooth_model

import metadropout as md
from metadropout.config import TrainingOptions
from metadropout.learners.lstm import flattened
from metadropout.perturbations import Pass, Perturbation
from metadropout.training.outer import OuterOptimizer, rate_at


def moved(learner: md.Reptile, episode: md.Episode, seed: int = 0) -> Tensor:
    """θ - W as one vector."""
    result = learner.task_gradient(episode, generator=md.SeededNoise(seed))
    return flattened(result.gradients, learner.adapted_names)


def chosen_images(learner: md.Reptile, n: int, steps: int, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Which images each mini-batch of a task has."""
    seen: list[list[int]] = []
    original = learner.perturbed.support_loss

    def spy(weights: Any, x: Tensor, y: Tensor, streams: Any = ()) -> Tensor:
        seen.append(x[:, 0, 0, 0].long().tolist())
        return original(weights, x, y, streams)

    monkeypatch.setattr(learner.perturbed, "support_loss", spy)
    x = torch.rand(n, 1, 16, 16, dtype=torch.float64)
    x[:, 0, 0, 0] = torch.arange(n)
    y = torch.arange(n) % 3
    learner.task_gradient(md.Episode(x, y, x, y), generator=md.SeededNoise(0))
    return seen


def test_mini_batches_are_passes_over_all_images_in_random_order_and_may_span_two(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    learner = md.Reptile(smooth_model(), steps=7, batch=4).double()
    batches = chosen_images(learner, 6, 7, monkeypatch)
    assert [len(batch) for batch in batches] == [4] * 7
    order = [image for batch in batches for image in batch]
    passes = [order[start : start + 6] for start in range(0, 24, 6)]
    assert all(sorted(each) == list(range(6)) for each in passes)
    assert len({tuple(each) for each in passes}) == 4
    assert set(Counter(order).values()) <= {4, 5}


def test_with_sgd_the_update_is_the_sum_of_the_gradients_and_first_order_maml_is_the_last_of_them() -> None:
    network, episode, rate = smooth_model(), make_episode(), 0.1
    everything = {"inner_lr": rate, "batch": len(episode.support_y), "optimizer": "sgd"}
    x, y = episode.support_x, episode.support_y
    weights = dict(network.named_parameters())
    total = torch.zeros(()).double()
    for steps in (1, 2, 3):
        fomaml = md.FOMAML(network, inner_lr=rate, steps=steps - 1)
        gradients = fomaml.task_gradient(md.Episode(x, y, x, y)).gradients
        last = flattened(gradients, fomaml.adapted_names)
        total = total + last
        learner = md.Reptile(network, steps=steps, **everything).double()
        torch.testing.assert_close(moved(learner, episode) / rate, total)
        if steps == 1:  # joint training
            loss = cross_entropy(network(x), y)
            plain = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(weights.values()))])
            torch.testing.assert_close(last, plain)


class Distance(Perturbation):
    """Nothing but another support loss: half the squared distance of the first logits from ones."""

    def label_loss(self, logits: Tensor, y: Tensor, context: Pass) -> Tensor:
        return (logits[0] - 1).square().sum() / 2


def test_on_a_quadratic_loss_the_update_is_known_in_closed_form() -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(256, 3)).double()
    episode, rate, steps = make_episode(), 0.2, 5
    episode = md.Episode(torch.zeros_like(episode.support_x), episode.support_y, episode.query_x, episode.query_y)
    learner = md.Reptile(network, Distance(network), inner_lr=rate, steps=steps, optimizer="sgd", adapted=["1.bias"])
    towards = 1 - network[1].bias.detach()
    torch.testing.assert_close(-moved(learner.double(), episode), (1 - (1 - rate) ** steps) * towards)
    frozen = md.Reptile(network, Distance(network), inner_lr=0.0, steps=steps, adapted=["1.bias"]).double()
    assert not moved(frozen, episode).any()


def adam_by_hand(
    network: nn.Module, batches: list[tuple[Tensor, Tensor]], rate: float, state: dict[str, Tensor]
) -> dict[str, Tensor]:
    """TensorFlow's Adam with β1 = 0 on the sum over a batch; the state is changed in place."""
    weights = {name: p.detach().clone() for name, p in network.named_parameters()}
    for x, y in batches:
        weights = {name: w.detach().requires_grad_() for name, w in weights.items()}
        loss = cross_entropy(torch.func.functional_call(network, weights, (x,)), y, reduction="sum")
        gradients = torch.autograd.grad(loss, list(weights.values()))
        state["t"] = state.get("t", 0) + 1
        for (name, w), g in zip(weights.items(), gradients, strict=True):
            state[name] = 0.999 * state.get(name, torch.zeros_like(g)) + 0.001 * g.square()
            size = rate * (1 - 0.999 ** state["t"]) ** 0.5
            weights[name] = w - size * g / (state[name].sqrt() + 1e-8)
    return {name: w.detach() for name, w in weights.items()}


def test_second_moments_and_step_count_go_on_from_task_to_task_and_over_outer_steps() -> None:
    network = smooth_model()
    tasks = [make_episode(seed=seed) for seed in range(2)]
    learner = md.Reptile(network, inner_lr=0.05, steps=3, batch=6).double()
    options = TrainingOptions(optimizer="sgd", meta_lr=0.5, clip_by="none")
    outer = OuterOptimizer(learner.named_parameters(), options)
    state: dict[str, Tensor] = {}
    for iteration in range(2):
        # Full batches: their order is of no importance.
        ends = [adam_by_hand(network, [(e.support_x, e.support_y)] * 3, 0.05, state) for e in tasks]
        start = {name: p.detach().clone() for name, p in network.named_parameters()}
        results = learner.task_gradients(tasks, [md.SeededNoise(n) for n in range(2)])
        outer.step([torch.stack([r.gradients[f"network.{n}"] for r in results]).mean(dim=0) for n in start], iteration)
        for name in learner.changed_buffers():
            values = torch.stack([result.buffers[name] for result in results])
            learner.get_buffer(name).copy_(learner.next_buffer(name, values))
        for name, before in start.items():
            towards = torch.stack([end[name] for end in ends]).mean(dim=0)
            torch.testing.assert_close(network.get_parameter(name).detach(), before + 0.5 * (towards - before))
            moment = learner.get_buffer(f"moments/network/{name.replace('.', '/')}")
            torch.testing.assert_close(moment, state[name])
    assert learner.decay == pytest.approx(0.999**12)


def test_a_fresh_adam_steps_by_the_sign_and_testing_starts_from_the_moments_of_training() -> None:
    network, episode = smooth_model(), make_episode()
    learner = md.Reptile(network, inner_lr=0.01, steps=1, test_steps=1, batch=6).double()
    x, y = episode.support_x, episode.support_y
    gradients = torch.autograd.grad(cross_entropy(network(x), y), list(network.parameters()))
    by_sign = torch.cat([0.01 * g.sign().flatten() for g in gradients])
    torch.testing.assert_close(moved(learner, episode), by_sign, rtol=0.02, atol=0)

    def tested() -> Tensor:
        weights = learner.adapted_weights(x, y, generator=md.SeededNoise(0))
        start = flattened(dict(learner.named_parameters()), learner.adapted_names)
        return start - flattened(weights, learner.adapted_names)

    torch.testing.assert_close(tested(), moved(learner, episode))
    with torch.no_grad():
        for name in learner.changed_buffers():
            learner.get_buffer(name).fill_(0.5 if name == "decay" else 1000.0)
    before = {name: learner.get_buffer(name).clone() for name in learner.changed_buffers()}
    torch.testing.assert_close(tested(), moved(learner, episode))
    assert tested().abs().max() < 0.002
    assert all(torch.equal(learner.get_buffer(name), value) for name, value in before.items())


def test_testing_has_steps_and_mini_batches_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    learner = md.Reptile(smooth_model(), steps=2, test_steps=5, batch=6, test_batch=4).double()
    sizes: list[int] = []
    original = learner.perturbed.support_loss
    monkeypatch.setattr(
        learner.perturbed, "support_loss", lambda w, x, y, s=(): (sizes.append(len(x)), original(w, x, y, s))[1]
    )
    episode = make_episode()
    learner.adapt(episode.support_x, episode.support_y, generator=md.SeededNoise(0))
    assert sizes == [4] * 5
    learner.task_gradient(episode, generator=md.SeededNoise(0))
    assert sizes[5:] == [6] * 2


def test_the_outer_step_is_interpolation_at_a_rate_that_falls_to_zero() -> None:
    options = TrainingOptions(optimizer="sgd", schedule="linear", meta_lr=1.0, clip_by="none", iterations=10)
    assert [rate_at(t, options) for t in range(10)] == pytest.approx([1 - t / 10 for t in range(10)])


def test_query_images_are_answered_in_one_batch_or_each_beside_the_support_images(conv4: md.Conv4) -> None:
    episode, source = make_episode(), md.SeededNoise(0)
    learner = md.Reptile(conv4, steps=2, test_steps=2, batch=6, images_per_pass=15).double()
    x, y, queries = episode.support_x, episode.support_y, episode.query_x
    alone, together = (
        learner.adapt(x, y, inductive=inductive, generator=source)(queries) for inductive in (True, False)
    )
    weights = learner.adapted_weights(x, y, generator=source)
    in_batch = learner.classifier(weights, x, inductive=False)
    by_hand = torch.cat([in_batch(torch.cat([x, query[None]]))[-1:] for query in queries])
    torch.testing.assert_close(alone, by_hand)
    torch.testing.assert_close(together, in_batch(queries))
    assert not torch.allclose(alone, together)
    of_support = super(md.Reptile, learner).classifier(weights, x, inductive=True)(queries)
    assert not torch.allclose(alone, of_support)


def test_normalisation_is_adapted_and_biases_that_it_takes_away_are_left_alone(conv4: md.Conv4) -> None:
    learner = md.Reptile(conv4, batch=6).double()
    result = learner.task_gradient(make_episode(), generator=md.SeededNoise(0))
    still = {name for name, g in result.gradients.items() if not g.any()}
    assert still == {f"network.blocks.{i}.conv.bias" for i in range(4)}
    assert result.gradients["network.blocks.3.norm.bias"].abs().max() > 0
    noisy = md.Reptile(conv4, make_perturbation("fixed-gaussian", conv4), batch=6).double()
    assert "network.blocks.0.conv.bias" in noisy.adapted_names  # noise comes between it and the normalisation
    named = md.Reptile(conv4, adapted=["blocks.0.conv.bias"])
    assert named.adapted_names == ["network.blocks.0.conv.bias"]


@pytest.mark.parametrize("name", ["metadropout", "more-parameters", "weight-gaussian", "vib"])
def test_a_perturbation_that_is_trained_is_refused_with_the_reason_and_a_frozen_one_is_not(
    name: str, conv4: md.Conv4
) -> None:
    perturbation = make_perturbation(name, conv4)
    with pytest.raises(ValueError, match=r"Reptile cannot train \w+: there is no query loss and no derivative"):
        md.Reptile(conv4, perturbation)
    perturbation.requires_grad_(False)
    if name == "metadropout":
        learner = md.Reptile(conv4, perturbation, steps=2, batch=6).double()
        noises = [md.SeededNoise(seed) for seed in (0, 0, 1)]
        same, again, other = (learner.task_gradient(make_episode(), generator=noise).gradients for noise in noises)
        assert torch.equal(same["network.head.weight"], again["network.head.weight"])
        assert not torch.equal(same["network.head.weight"], other["network.head.weight"])


def test_tasks_of_another_way_start_from_the_mean_of_the_rows_and_of_their_moments() -> None:
    learner = md.Reptile(smooth_model(), test_steps=2, batch=6).double()
    with torch.no_grad():
        learner.get_buffer("moments/network/head/weight").copy_(torch.arange(15.0).view(3, 5))
    more = learner.for_way(4)
    assert isinstance(more, md.Reptile)
    expected = torch.arange(15.0).double().view(3, 5).mean(dim=0).expand(4, 5)
    torch.testing.assert_close(more.get_buffer("moments/network/head/weight"), expected)
    assert learner.get_buffer("moments/network/head/weight").shape == (3, 5)
    episode = make_episode(way=4)
    logits = more.adapt(episode.support_x, episode.support_y, generator=md.SeededNoise(0))(episode.query_x)
    assert logits.shape == (8, 4)
