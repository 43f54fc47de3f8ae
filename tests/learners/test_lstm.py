"""Meta-Learner LSTM: a learned rule, shared by all weights, with gradients as constants."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toys import assert_finite_differences, grouped, make_episode, make_perturbation, randomise, smooth_model

import metadropout as md
from metadropout.learners import lstm
from metadropout.learners.lstm import flattened


def with_gates(learner: md.MetaLSTM, forget: float, entry: float) -> md.MetaLSTM:
    """Give both gates constant values."""
    with torch.no_grad():
        for gate, value in ((learner.forget_gate, forget), (learner.input_gate, entry)):
            gate.weight.zero_()
            gate.bias.copy_(torch.tensor(value, dtype=torch.float64).logit().clamp(max=40))
    return learner


def test_with_open_forget_gates_and_constant_input_gates_it_is_first_order_maml(conv4: md.Conv4) -> None:
    episode, rate = make_episode(), 0.05
    learner = with_gates(md.MetaLSTM(conv4, steps=3).double(), 1.0, rate)
    sgd = md.FOMAML(conv4, inner_lr=rate, steps=3, adapted=[n for n, _ in conv4.named_parameters()])
    x, y = episode.support_x, episode.support_y
    mine, its = (each.adapted_weights(x, y) for each in (learner, sgd))
    for name in sgd.adapted_names:
        torch.testing.assert_close(mine[name], its[name], rtol=1e-12, atol=1e-14)
    mine, its = (each.task_gradient(episode).gradients for each in (learner, sgd))
    for name in sgd.adapted_names:  # of the initial weights, the cell's first state
        torch.testing.assert_close(mine[name], its[name], rtol=1e-10, atol=1e-12)


def test_with_constant_gates_weights_decay_and_gradients_are_summed() -> None:
    network, episode, forget, entry = smooth_model(), make_episode(), 0.9, 0.1
    learner = with_gates(md.MetaLSTM(network, steps=4).double(), forget, entry)
    seen: list[Tensor] = []
    theta, weights = flattened(learner.initial_weights(), learner.adapted_names), learner.initial_weights()
    for step in range(4):
        _, gradients = learner.support_gradient(
            weights, episode.support_x, episode.support_y, step, None, 1, differentiable=False
        )
        seen.append(flattened(gradients, learner.adapted_names))
        by_hand = forget ** (step + 1) * theta - entry * sum(forget ** (step - t) * g for t, g in enumerate(seen))
        weights = learner.inner_steps(
            learner.initial_weights(),
            episode.support_x,
            episode.support_y,
            None,
            1,
            differentiable=True,
            steps=step + 1,
        )
        torch.testing.assert_close(flattened(weights, learner.adapted_names), by_hand, rtol=1e-12, atol=1e-14)


def test_one_meta_learner_serves_any_number_of_weights_and_all_of_them_are_adapted() -> None:
    own = {}
    for channels in (4, 8):
        network = md.Conv4(5, in_channels=3, image_size=84, channels=channels)
        learner = md.MetaLSTM(network)
        own[channels] = [p.shape for n, p in learner.named_parameters() if not n.startswith("network.")]
        assert learner.adapted_names == [f"network.{name}" for name, _ in network.named_parameters()]
    authors = md.MetaLSTM(md.Conv4(5, in_channels=3, image_size=84, channels=32, norm="batch"))
    assert sum(tensor.numel() for tensor in authors.adapted_tensors().values()) == 32_901
    assert own[4] == own[8] == [(80, 24), (80,), (1, 22), (1,), (1, 22), (1,)]


def test_gates_start_where_the_authors_do_and_the_rest_close_to_zero() -> None:
    torch.manual_seed(0)
    learner = md.MetaLSTM(nn.Linear(2, 2))
    assert 4 <= learner.forget_gate.bias <= 5
    assert -5.01 <= learner.input_gate.bias <= -3.99
    assert max(p.abs().max() for p in (learner.lstm.weight, learner.lstm.bias, learner.input_gate.weight)) <= 0.01
    assert learner.steps == 12


def trained_rule(network: nn.Module, perturbation: Any = None, **options: Any) -> md.MetaLSTM:
    """A meta-learner whose every part matters."""
    learner = md.MetaLSTM(network, perturbation, steps=3, inner_lr=0.2, **options).double()
    for part in (learner.lstm, learner.forget_gate, learner.input_gate):
        randomise(part, scale=0.3, seed=5)
    return learner


def test_the_meta_gradient_is_exact_with_losses_and_gradients_held_constant(monkeypatch: pytest.MonkeyPatch) -> None:
    learner, episode = trained_rule(smooth_model()), make_episode()
    gradients = learner.task_gradient(episode).gradients
    recorded: list[tuple[Tensor, dict[str, Tensor]]] = []
    original = learner.support_gradient

    def record(*arguments: Any, **how: Any) -> tuple[Tensor, dict[str, Tensor]]:
        loss, found = original(*arguments, **how)
        recorded.append((loss.detach(), {name: g.detach() for name, g in found.items()}))
        return loss, found

    monkeypatch.setattr(learner, "support_gradient", record)
    learner.loss(episode)
    replay = list(recorded)
    monkeypatch.setattr(learner, "support_gradient", lambda weights, x, y, step, *_, **__: replay[step])
    groups = grouped(gradients, "network.", "lstm.", "forget_gate.", "input_gate.")
    assert_finite_differences(learner, episode, groups, gradients=gradients, step=1e-6, tolerance=1e-6)


def test_in_second_order_the_gradient_of_the_step_is_differentiated_and_what_the_gates_see_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    network, episode, source = smooth_model(), make_episode(), md.SeededNoise(2)
    learner = trained_rule(network, make_perturbation("metadropout", network), first_order=False)
    gradients = learner.task_gradient(episode, generator=source).gradients
    recorded: list[Tensor] = []
    original = lstm.preprocessed
    monkeypatch.setattr(lstm, "preprocessed", lambda x: recorded.append(original(x)) or recorded[-1])
    learner.loss(episode, generator=source)

    def loss() -> Tensor:
        replay = iter(recorded)
        monkeypatch.setattr(lstm, "preprocessed", lambda x: next(replay))
        return learner.loss(episode, generator=source)

    groups = grouped(gradients, "network.", "lstm.", "forget_gate.", "input_gate.", "perturbation.")
    assert_finite_differences(learner, episode, groups, gradients=gradients, loss=loss, step=1e-6, tolerance=1e-6)


def test_meta_dropout_is_refused_unless_the_raw_gradient_keeps_its_graph(conv4: md.Conv4) -> None:
    with pytest.raises(ValueError, match="first_order cannot be used with MetaDropout: the noise acts only through"):
        md.MetaLSTM(conv4, md.MetaDropout(conv4))
    learner = md.MetaLSTM(conv4, make_perturbation("metadropout", conv4), first_order=False, steps=2).double()
    found = learner.task_gradient(make_episode(), generator=md.SeededNoise(0)).gradients
    head = "perturbation.generators.head.weight"  # acts on support images only
    assert found[head].abs().max() > 0
    md.MetaLSTM(conv4, make_perturbation("fixed-gaussian", conv4)).double()


def test_gradients_can_be_divided_by_the_number_of_images_once_more() -> None:
    network, episode = smooth_model(), make_episode()
    weights = []
    for again in (False, True):
        learner = with_gates(md.MetaLSTM(network, steps=1, divide_again=again).double(), 1.0, 0.5)
        adapted = learner.adapted_weights(episode.support_x, episode.support_y)
        weights.append(
            flattened(adapted, learner.adapted_names) - flattened(learner.initial_weights(), learner.adapted_names)
        )
    torch.testing.assert_close(weights[1] * len(episode.support_y), weights[0])


def test_numbers_of_any_size_are_brought_to_the_size_of_one() -> None:
    p = 10.0
    x = torch.tensor([2.0, -3e-4, 1e-5, -1e-6, 0.0], dtype=torch.float64)
    large, small = lstm.preprocessed(x)[:2], lstm.preprocessed(x)[2:]
    torch.testing.assert_close(large, torch.stack([x[:2].abs().log() / p, x[:2].sign()], dim=1))
    torch.testing.assert_close(
        small, torch.stack([-torch.ones(3).double(), torch.exp(torch.tensor(p)) * x[2:]], dim=1), rtol=1e-6, atol=0
    )
    assert lstm.preprocessed(x).abs().max() <= 1
