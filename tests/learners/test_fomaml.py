"""First-order MAML: the identity in place of the Jacobian of the inner steps."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from toys import make_episode, make_perturbation, smooth_model

import metadropout as md
from metadropout.config import build_learner, parse_config
from metadropout.data import ImageShape
from metadropout.learners.lstm import flattened
from metadropout.perturbations import Pass, Perturbation


def gradients(learner: md.GradientLearner, episode: md.Episode) -> Tensor:
    return flattened(learner.task_gradient(episode).gradients, learner.adapted_names)


def test_its_distance_from_the_exact_gradient_grows_with_the_step_size_and_is_none_without_steps() -> None:
    network, episode = smooth_model(), make_episode()
    distances = []
    for rate in (1e-3, 2e-3, 4e-3):
        exact, first = (gradients(kind(network, inner_lr=rate, steps=2), episode) for kind in (md.MAML, md.FOMAML))
        distances.append((exact - first).norm().item())
    assert distances[1] / distances[0] == pytest.approx(2, rel=0.05)
    assert distances[2] / distances[1] == pytest.approx(2, rel=0.05)
    none = [gradients(kind(network, steps=0), episode) for kind in (md.MAML, md.FOMAML)]
    assert torch.equal(*none)


class Quadratic(Perturbation):
    """Nothing but another support loss: half the mean square of the logits."""

    def label_loss(self, logits: Tensor, y: Tensor, context: Pass) -> Tensor:
        return logits.square().sum(dim=1).mean() / 2


def test_on_a_quadratic_support_loss_the_exact_gradient_is_it_times_the_steps_jacobian() -> None:
    episode, rate, steps = make_episode(), 0.02, 3
    network = nn.Sequential(nn.Flatten(), nn.Linear(256, 3, bias=False)).double()
    exact, first = (
        kind(network, Quadratic(network), inner_lr=rate, steps=steps)
        .task_gradient(episode)
        .gradients["network.1.weight"]
        for kind in (md.MAML, md.FOMAML)
    )
    x = episode.support_x.flatten(1)
    hessian = x.T @ x / len(x)  # the same for each row of the weight
    jacobian = torch.linalg.matrix_power(torch.eye(256).double() - rate * hessian, steps)
    torch.testing.assert_close(exact, first @ jacobian)
    assert not torch.allclose(exact, first, rtol=0.1)


def test_it_is_maml_with_first_order_and_offsets_still_learn_from_query_images(conv4: md.Conv4) -> None:
    episode = make_episode()
    one = md.FOMAML(conv4, inner_lr=0.1, steps=2).task_gradient(episode)
    other = md.MAML(conv4, inner_lr=0.1, steps=2, first_order=True).task_gradient(episode)
    assert all(torch.equal(one.gradients[name], other.gradients[name]) for name in other.gradients)
    assert one.gradients["network.blocks.0.norm.bias"].abs().max() > 0


def test_meta_dropout_is_refused_with_the_reason_and_fixed_or_frozen_noise_is_not(conv4: md.Conv4) -> None:
    with pytest.raises(ValueError, match="first_order cannot be used with MetaDropout: the noise acts only through"):
        md.FOMAML(conv4, md.MetaDropout(conv4))
    episode = make_episode()
    frozen = make_perturbation("metadropout", conv4).requires_grad_(False)
    for noise in (make_perturbation("fixed-gaussian", conv4), frozen):
        result = md.FOMAML(conv4, noise, inner_lr=0.01).task_gradient(episode, generator=md.SeededNoise(0))
        assert not any(name.startswith("perturbation.") for name in result.gradients)


def test_an_option_says_that_it_is_of_first_order_and_cannot_say_otherwise() -> None:
    config = parse_config({"learner": {"name": "fomaml", "inner_lr": 0.4}, "perturbation": {"name": "none"}})
    learner = build_learner(config, ImageShape(1, 28, 28))
    assert isinstance(learner, md.FOMAML)
    assert (learner.first_order, learner.inner_lr, config.learner["first_order"]) == (True, 0.4, True)
    assert parse_config({"learner": {"name": "fomaml"}}, {"learner.first_order": "true"}).learner["first_order"] is True
    with pytest.raises(md.ConfigError, match=r"learner.first_order is False: input should be true"):
        parse_config({"learner": {"name": "fomaml", "first_order": False}})
