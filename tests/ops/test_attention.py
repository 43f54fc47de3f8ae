"""Attention: second derivatives, answers with and without gradients, and PyTorch's settings left as they were."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from toys import make_episode, randomise

import metadropout as md
from metadropout.ops.attention import twice_differentiable_attention
from metadropout.perturbations import PERTURBATIONS
from metadropout.perturbations.base import _warn_once

Attend = Callable[[], nn.Module]


class SelfAttention(nn.Module):
    """Calls `nn.MultiheadAttention` as transformers do, without asking for its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(x, x, x, need_weights=False)[0]  # type: ignore[no-any-return]


class PlainAttention(nn.Module):
    """Calls the function, as timm's and transformers' vision transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).reshape(len(x), -1, 3, 2, 4).permute(2, 0, 3, 1, 4)  # each (n, heads, tokens, features)
        return x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, dim_feedforward=12, dropout=0.1, batch_first=True)
    return nn.TransformerEncoder(layer, 2)


class Transformer(nn.Module):
    """A small vision transformer: 16 tokens of 8 features."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.embed, self.body, self.head = nn.Conv2d(1, 8, 4, stride=4), attend(), nn.Linear(8, 3)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.embed(x).flatten(2).transpose(1, 2)  # (n, tokens, features)
        return self.head(self.norm(self.body(tokens)).mean(dim=1))  # type: ignore[no-any-return]


BODIES: dict[str, Attend] = {"multihead": SelfAttention, "encoder": encoder, "function": PlainAttention}


@pytest.fixture(params=list(BODIES))
def transformer(request: pytest.FixtureRequest) -> Transformer:
    torch.manual_seed(0)
    model = Transformer(BODIES[request.param]).double()
    randomise(model, scale=0.1)
    return model


def settings() -> list[bool]:
    cuda = torch.backends.cuda
    return [
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
        cuda.math_sdp_enabled(),
        torch.backends.mha.get_fastpath_enabled(),
    ]


def test_the_meta_gradient_through_attention_equals_finite_differences(transformer: Transformer) -> None:
    noise = md.MetaDropout(transformer).double()
    randomise(noise, scale=0.1, seed=1)
    learner, episode, source = md.MAML(transformer, noise, inner_lr=0.05, steps=2), make_episode(), md.SeededNoise(0)
    gradients = learner.task_gradient(episode, generator=source).gradients
    parameters = dict(learner.named_parameters())
    g = torch.Generator().manual_seed(0)
    direction = {n: torch.randn(p.shape, generator=g, dtype=torch.float64) for n, p in parameters.items()}
    expected = sum((gradients[n] * direction[n]).sum().item() for n in parameters)
    losses = []
    for move in (1e-7, -2e-7):
        with torch.no_grad():
            for n, parameter in parameters.items():
                parameter.add_(direction[n], alpha=move)
        losses.append(learner.loss(episode, generator=source).item())
    assert (losses[0] - losses[1]) / 2e-7 == pytest.approx(expected, rel=1e-5)
    assert abs(expected) > 1e-2


@pytest.mark.parametrize("name", PERTURBATIONS)
def test_every_perturbation_works_on_attention_in_single_precision(name: str) -> None:
    model, episode = Transformer(encoder), make_episode(dtype=torch.float32)
    model.body.layers[1].activation = nn.ReLU()  # a module, which information dropout needs
    options = {"combined": {"parts": [{"name": "metadropout"}, {"name": "mixup"}]}}
    learner = md.MAML(model, PERTURBATIONS[name](model, **options.get(name, {})), inner_lr=0.01, steps=2)
    result = learner.task_gradient(episode, generator=md.SeededNoise(0))
    assert all(g.isfinite().all() for g in result.gradients.values())
    classify = learner.adapt(episode.support_x, episode.support_y, mc_samples=2, generator=md.SeededNoise(0))
    assert classify(episode.query_x).isfinite().all()


def test_several_tasks_with_attention_run_as_one(transformer: Transformer) -> None:
    learner = md.MAML(transformer, md.MetaDropout(transformer).double(), inner_lr=0.05, steps=2)
    episodes, sources = [make_episode(seed=seed) for seed in (1, 2)], [md.SeededNoise(seed) for seed in (1, 2)]
    together = learner.task_gradients(episodes, sources)
    for episode, source, result in zip(episodes, sources, together, strict=True):
        alone = learner.task_gradient(episode, generator=source)
        for name, gradient in alone.gradients.items():
            torch.testing.assert_close(result.gradients[name], gradient)


def test_answers_do_not_depend_on_whether_gradients_are_enabled(transformer: Transformer) -> None:
    # PyTorch's fast path for encoder layers, taken without gradients, would skip the layers that are perturbed.
    noise = md.MetaDropout(transformer).double()
    learner, episode = md.MAML(transformer, noise), make_episode()
    classify = learner.adapt(episode.support_x, episode.support_y, mc_samples=1, generator=md.SeededNoise(0))
    expected = classify(episode.query_x.clone().requires_grad_())
    with torch.no_grad():
        torch.testing.assert_close(classify(episode.query_x), expected, rtol=1e-12, atol=1e-12)


def test_a_pass_leaves_pytorchs_settings_as_they_were(transformer: Transformer) -> None:
    before, inside = settings(), []
    body = type(transformer.body)

    class Watched(body):  # type: ignore[misc, valid-type]
        def forward(self, x: Tensor) -> Tensor:
            inside.append(settings())
            if x.isnan().any():
                raise KeyError("broken")
            return super().forward(x)  # type: ignore[no-any-return]

    transformer.body.__class__ = Watched
    learner, x = md.MAML(transformer, steps=0), make_episode().query_x
    classify = learner.adapt(x, torch.arange(6) % 3)
    classify(x)
    assert inside == [[False, False, False, True, False]]
    with pytest.raises(KeyError):
        classify(x * torch.nan)
    assert settings() == before == [True] * 5


def test_threads_that_overlap_keep_the_settings_until_the_last_is_done() -> None:
    first_inside, second_inside = threading.Event(), threading.Event()

    def first() -> None:
        with twice_differentiable_attention:
            first_inside.set()
            second_inside.wait(10)

    thread = threading.Thread(target=first)
    thread.start()
    first_inside.wait(10)
    with twice_differentiable_attention:
        second_inside.set()
        thread.join()
        assert settings() == [False, False, False, True, False]
    assert settings() == [True] * 5


# --- layers that do not run as modules -------------------------------------------------------------------------------


def test_layers_that_never_run_are_left_alone_with_one_note(caplog: pytest.LogCaptureFixture) -> None:
    _warn_once.cache_clear()
    model, episode = Transformer(encoder).double(), make_episode()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):  # also a second learner says nothing new
            noise = md.MetaDropout(model).double()
            learner = md.MAML(model, noise, inner_lr=0.05, steps=2)
            gradients = learner.task_gradient(episode, generator=md.SeededNoise(0)).gradients
    (record,) = caplog.records
    assert record.getMessage() == (
        "MetaDropout leaves body.layers.0.self_attn.out_proj, body.layers.1.self_attn.out_proj alone: found by type, "
        "but not run as a module (nn.MultiheadAttention, for one, uses the weights of its out_proj directly)"
    )
    silent = [n for n, g in gradients.items() if n.startswith("perturbation.") and not g.any()]
    assert {n.rpartition(".")[0] for n in silent} == {
        f"perturbation.generators.body/layers/{i}/self_attn/out_proj" for i in (0, 1)
    }


def test_mixup_never_draws_a_layer_that_does_not_run() -> None:
    model, episode = Transformer(SelfAttention).double(), make_episode()
    mixup = PERTURBATIONS["mixup"](model, gamma=1.0)
    learner = md.MAML(model, mixup, steps=3)
    first, again = (learner.loss(episode, generator=md.SeededNoise(0)) for _ in range(2))
    assert torch.equal(first, again)  # also the very first draw knows which layers run
    assert mixup.input_sites == ("embed", "head")


@pytest.mark.parametrize("name", ["metadropout", "mixup"])
def test_a_layer_that_is_named_has_to_run(name: str) -> None:
    model = Transformer(SelfAttention).double()
    noise = PERTURBATIONS[name](model, layers=["embed", "body.attention.out_proj"]).double()
    with pytest.raises(ValueError, match=r"'body\.attention\.out_proj' did not run as a module in a forward pass, so"):
        md.MAML(model, noise).loss(make_episode(), generator=md.SeededNoise(0))
