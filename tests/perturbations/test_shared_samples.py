"""Noise samples that share what does not depend on the noise."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor
from toys import randomise

import metadropout as md
from metadropout.networks import layers
from metadropout.ops import kernels


def shared_learner(channels: int = 4, **options: Any) -> md.MAML:
    torch.manual_seed(0)
    network = md.Conv4(way=3, in_channels=1, image_size=16, channels=channels).double()
    randomise(network)
    return md.MAML(network, md.MetaDropout(network, **options).double(), steps=2)


@pytest.mark.parametrize("link", ["softplus", "exp"])
@pytest.mark.parametrize("path", ["kernels", "plain"])
def test_samples_that_share_the_first_layer_give_what_samples_of_their_own_do(
    link: str, path: str, episode: md.Episode
) -> None:
    learner = shared_learner(link=link)
    noise = md.CounterNoise(0)

    def logits() -> Tensor:
        return learner.adapt(episode.support_x, episode.support_y, mc_samples=5, generator=noise)(episode.query_x)

    with kernels.disabled() if path == "plain" else contextlib.nullcontext():
        shared = logits()
        learner.images_per_pass = 1  # one sample after the other
        torch.testing.assert_close(shared, logits(), rtol=1e-9, atol=1e-9)


def test_the_first_layer_is_computed_once_for_all_samples(episode: md.Episode, monkeypatch: pytest.MonkeyPatch) -> None:
    images: list[int] = []
    original = layers.convolution
    monkeypatch.setattr(layers, "convolution", lambda x, *rest: (images.append(len(x)), original(x, *rest))[1])
    learner, n = shared_learner(), len(episode.support_x)
    for _ in range(2):  # the first time one more pass looks which layers run
        images.clear()
        learner.adapt(episode.support_x, episode.support_y, mc_samples=5, generator=md.CounterNoise(0))
    assert images == 2 * [n, n, *[5 * n] * 6]  # for two steps: θ and φ of four layers
    images.clear()
    learner.adapt(episode.support_x, episode.support_y, mc_samples=5, generator=md.SeededNoise(0))
    assert images == 16 * [5 * n]  # bit for bit as before there was another source


def test_samples_that_share_the_first_layer_have_the_same_second_derivatives(episode: md.Episode) -> None:
    learner = shared_learner()
    weights = learner.initial_weights()
    noise = md.CounterNoise(0)

    def second(images_per_pass: int) -> list[Tensor]:
        learner.images_per_pass = images_per_pass
        _, gradients = learner.support_gradient(
            weights, episode.support_x, episode.support_y, 0, noise, 3, differentiable=True
        )
        total = sum((g.square().sum() for g in gradients.values()), torch.zeros(()))
        return list(torch.autograd.grad(total, list(learner.parameters()), materialize_grads=True))

    torch.testing.assert_close(second(100), second(1), rtol=1e-8, atol=1e-10)
