"""ANIL and MAML++: what is adapted, which step sizes are learned, and which losses count."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from toys import UsersModel, assert_batched_equals_loop, assert_finite_differences, make_episode, randomise

import metadropout as md
from metadropout.learners import ANIL, MAMLPlusPlus


@pytest.mark.parametrize("perturbation", [False, True], ids=["plain", "metadropout"])
def test_anil_is_maml_that_adapts_the_head_alone(network: nn.Module, perturbation: bool, episode: md.Episode) -> None:
    noise = md.MetaDropout(network).double() if perturbation else None
    head = "fc" if isinstance(network, UsersModel) else "head"
    learner = ANIL(network, noise, inner_lr=0.1, steps=2)
    assert learner.adapted_names == [f"network.{head}.weight", f"network.{head}.bias"]
    same = md.MAML(network, noise, inner_lr=0.1, steps=2, adapted=[f"{head}.weight", f"{head}.bias"])
    mine, its = (each.task_gradient(episode, generator=md.SeededNoise(0)) for each in (learner, same))
    assert torch.equal(mine.loss, its.loss)
    assert all(torch.equal(mine.gradients[name], gradient) for name, gradient in its.gradients.items())
    after = learner.adapted_weights(episode.support_x, episode.support_y, generator=md.SeededNoise(0), mc_samples=1)
    changed = {name for name, value in learner.named_parameters() if not torch.equal(value, after[name])}
    assert changed == set(learner.adapted_names)


def test_anils_meta_gradient_equals_finite_differences(conv4: md.Conv4, episode: md.Episode) -> None:
    learner = ANIL(conv4, md.MetaDropout(conv4).double(), inner_lr=0.1, steps=2)
    names = [name for name, _ in learner.named_parameters()]
    groups = {start: [name for name in names if name.startswith(start)] for start in ("network.head", "network.blocks")}
    assert_finite_differences(learner, episode, groups, md.SeededNoise(5))
    assert_batched_equals_loop(learner)
    assert learner.for_way(5).adapt(*make_episode(way=5).tensors()[:2], generator=md.SeededNoise(0)) is not None


def make_plus(network: nn.Module, perturbation: md.Perturbation | None = None, **options: int) -> MAMLPlusPlus:
    learner = MAMLPlusPlus(network, perturbation, **{"inner_lr": 0.05, "steps": 3, **options}).double()
    randomise(learner.step_sizes, scale=0.02, seed=2)
    return learner


def test_with_equal_step_sizes_and_only_the_last_loss_it_is_maml(network: nn.Module, episode: md.Episode) -> None:
    learner = MAMLPlusPlus(network, inner_lr=0.05, steps=3, multi_step_iterations=0).double()
    maml = md.MAML(network, inner_lr=0.05, steps=3)
    assert {name.replace("/", "."): size.tolist() for name, size in learner.step_sizes.items()} == {
        name: pytest.approx([0.05] * 3) for name in maml.adapted_names
    }
    mine, its = learner.task_gradient(episode), maml.task_gradient(episode)
    torch.testing.assert_close(mine.loss, its.loss, rtol=1e-12, atol=0)
    for name, gradient in its.gradients.items():
        torch.testing.assert_close(mine.gradients[name], gradient, rtol=1e-9, atol=1e-12)


def test_each_layer_and_step_has_a_step_size_of_its_own(conv4: md.Conv4, episode: md.Episode) -> None:
    learner = make_plus(conv4, steps=2, test_steps=4)
    x, y = episode.support_x, episode.support_y
    for number in (1, 2, 3, 4):
        paths = [
            learner.inner_steps(learner.initial_weights(), x, y, None, 1, False, steps=n) for n in (number - 1, number)
        ]
        loss = learner.perturbed.support_loss(
            before := {n: w.detach().requires_grad_() for n, w in paths[0].items()}, x, y
        )
        for name in learner.adapted_names:
            (gradient,) = torch.autograd.grad(loss, before[name], retain_graph=True)
            # Beyond the steps of training the last size counts.
            size = learner.step_sizes[name.replace(".", "/")][min(number, 2) - 1]
            torch.testing.assert_close(paths[1][name], paths[0][name] - size * gradient, rtol=1e-10, atol=1e-12)
    after = learner.adapted_weights(x, y)
    assert torch.equal(after["network.head.weight"], paths[1]["network.head.weight"])


def losses_after_each_step(learner: MAMLPlusPlus, episode: md.Episode) -> list[float]:
    path = learner.inner_path(learner.initial_weights(), *episode.tensors()[:2], None, 1, True)
    return [learner.judge(weights, episode, None).loss.item() for weights in path][1:]


@pytest.mark.parametrize(
    ("outer_steps", "shares"),
    [(0, (1 / 3, 1 / 3, 1 / 3)), (50, (1 / 6, 1 / 6, 2 / 3)), (100, (0, 0, 1)), (900, (0, 0, 1))],
)
def test_the_weights_of_the_losses_move_from_all_steps_to_the_last(
    outer_steps: int, shares: tuple[float, ...], conv4: md.Conv4, episode: md.Episode
) -> None:
    learner = make_plus(conv4, multi_step_iterations=100)
    learner.outer_steps.fill_(outer_steps)
    outcome = learner(episode)
    losses = losses_after_each_step(learner, episode)
    assert len(set(losses)) == 3
    assert outcome.loss.item() == pytest.approx(
        sum(s * loss for s, loss in zip(shares, losses, strict=True)), rel=1e-12
    )
    assert outcome.buffers["outer_steps"] == outer_steps + 1
    assert learner.outer_steps == outer_steps  # which is for the outer loop to move
    tested = learner.adapt(episode.support_x, episode.support_y)(episode.query_x)
    torch.testing.assert_close(outcome.logits, tested)


@pytest.mark.parametrize("steps", [0, 1])
def test_few_steps_are_no_special_case(steps: int, conv4: md.Conv4, episode: md.Episode) -> None:
    learner = make_plus(conv4, steps=steps)
    expected = (
        md.MAML(conv4, inner_lr=0.05, steps=0).loss(episode)
        if steps == 0
        else learner.judge(
            learner.inner_steps(learner.initial_weights(), *episode.tensors()[:2], None, 1, True), episode, None
        ).loss
    )
    torch.testing.assert_close(learner.loss(episode), expected)


@pytest.mark.parametrize("perturbation", [False, True], ids=["plain", "metadropout"])
def test_its_meta_gradient_equals_finite_differences_and_tasks_can_be_batched(
    perturbation: bool, conv4: md.Conv4, episode: md.Episode
) -> None:
    noise = md.MetaDropout(conv4).double() if perturbation else None
    learner = make_plus(conv4, noise, steps=2)
    names = [name for name, _ in learner.named_parameters()]
    groups = {"θ": learner.adapted_names, "sizes": [name for name in names if name.startswith("step_sizes.")]}
    assert_finite_differences(learner, episode, groups, md.SeededNoise(5))
    assert_batched_equals_loop(learner)
