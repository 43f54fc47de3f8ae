"""T-Net and MT-Net: what T and the masks do to the inner steps, and what they leave alone."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from toys import UsersModel, assert_batched_equals_loop, assert_finite_differences, make_episode, randomise

import metadropout as md
from metadropout.learners import MTNet, TNet
from metadropout.learners.mtnet import draw_mask

ALWAYS, NEVER = 100.0, -100.0  # mask logits under which every channel is adapted, or none


def make(kind: type[TNet], network: nn.Module, perturbation: md.Perturbation | None = None, **options: float) -> TNet:
    """Return a learner with values of T, and of the masks' logits, that matter."""
    learner = kind(network, perturbation, **{"inner_lr": 0.05, "steps": 2, **options}).double()
    randomise(learner.warps, scale=0.2, seed=4)
    if isinstance(learner, MTNet):
        randomise(learner.mask_logits, scale=1.0, seed=5)
    return learner


def set_all(parameters: Iterable[Tensor], value: Callable[[Tensor], Tensor]) -> None:
    with torch.no_grad():
        for parameter in parameters:
            parameter.copy_(value(parameter))


def adapted(learner: md.GradientLearner, episode: md.Episode, seed: int = 0, mc_samples: int = 1) -> dict[str, Tensor]:
    return learner.adapted_weights(
        episode.support_x, episode.support_y, mc_samples=mc_samples, generator=md.SeededNoise(seed)
    )


def masks_of(learner: MTNet, seed: int) -> dict[str, Tensor]:
    return learner.inner_init(learner.initial_weights(), md.SeededNoise(seed))


class NoNorms(nn.Module):
    """A network without normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, stride=4)
        self.head = nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.conv(x)).flatten(1))


# Where both are MAML.


def test_with_t_the_identity_and_all_masks_1_it_is_maml(network: nn.Module, episode: md.Episode) -> None:
    learner = MTNet(network, inner_lr=0.05, steps=2).double()
    assert all((warp == torch.eye(warp.shape[-1])).all() for warp in learner.warps.values())
    assert all((logits == 0).all() for logits in learner.mask_logits.values())
    set_all(learner.mask_logits.values(), lambda logits: torch.full_like(logits, ALWAYS))
    maml = md.MAML(network, inner_lr=0.05, steps=2)
    mine, its = learner.task_gradient(episode, generator=md.SeededNoise(0)), maml.task_gradient(episode)
    torch.testing.assert_close(mine.loss, its.loss, rtol=1e-12, atol=0)
    for name, gradient in its.gradients.items():
        torch.testing.assert_close(mine.gradients[name], gradient, rtol=1e-9, atol=1e-12)


def test_with_all_masks_0_nothing_is_adapted(conv4: md.Conv4, episode: md.Episode) -> None:
    learner = make(MTNet, conv4)
    set_all(learner.mask_logits.values(), lambda logits: torch.full_like(logits, NEVER))
    after = adapted(learner, episode)
    assert all(torch.equal(after[name], value) for name, value in learner.initial_weights().items())


@pytest.mark.parametrize("kind", [TNet, MTNet])
def test_with_t_orthogonal_it_is_maml_on_tw_and_tb(kind: type[TNet], conv4: md.Conv4, episode: md.Episode) -> None:
    learner = make(kind, conv4)
    set_all(learner.warps.values(), lambda warp: torch.linalg.qr(warp)[0])
    if isinstance(learner, MTNet):
        set_all(learner.mask_logits.values(), lambda logits: torch.full_like(logits, ALWAYS))
    start = learner.initial_weights()
    theta = {name.removeprefix("network."): w for name, w in start.items() if name.startswith("network.")}
    other = copy.deepcopy(conv4)
    other.load_state_dict(learner.network_weights(theta, start))
    assert not torch.allclose(other.head.weight, conv4.head.weight)
    outcome = learner(episode, generator=md.SeededNoise(0))
    expected = md.MAML(other, inner_lr=0.05, steps=2)(episode)
    torch.testing.assert_close(outcome.logits, expected.logits, rtol=1e-9, atol=1e-12)


def test_t_of_c_times_the_identity_is_maml_on_cw_with_c_squared_times_the_rate(episode: md.Episode) -> None:
    torch.manual_seed(0)
    network = NoNorms().double()
    learner = TNet(network, inner_lr=0.1, steps=2).double()
    set_all(learner.warps.values(), lambda warp: 1.5 * warp)
    other = copy.deepcopy(network)
    set_all(other.parameters(), lambda weight: 1.5 * weight)
    expected = md.MAML(other, inner_lr=0.1 * 1.5**2, steps=2)(episode)
    torch.testing.assert_close(learner(episode).logits, expected.logits, rtol=1e-10, atol=0)


def test_a_step_moves_a_layers_output_by_t_m_t_transposed(episode: md.Episode) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(256, 3)).double()
    learner = make(MTNet, network, steps=1, inner_lr=0.1)
    assert isinstance(learner, MTNet)
    (mask,), (warp,) = masks_of(learner, 0).values(), learner.warps["1"]
    assert 0 < mask.sum() < 3
    x, y = episode.support_x.flatten(1), episode.support_y
    before = F.linear(x, warp @ network[1].weight, warp @ network[1].bias)
    slope = (before.softmax(1) - F.one_hot(y, 3)) / len(x)  # ∂L/∂y, one row per image
    moved = -0.1 * (x @ x.T + 1) @ slope @ warp @ torch.diag(mask) @ warp.T  # the bias sees an input of 1
    classify = learner.adapt(episode.support_x, y, generator=md.SeededNoise(0))
    torch.testing.assert_close(classify(episode.support_x), before + moved, rtol=1e-9, atol=1e-12)


# What is adapted, and with what.


def test_only_w_and_b_are_adapted_and_never_t_masks_or_normalisation(network: nn.Module) -> None:
    learner = make(MTNet, network)
    assert learner.adapted_names == md.MAML(network).adapted_names
    after = adapted(learner, make_episode())
    changed = {name for name, value in learner.named_parameters() if not torch.equal(value, after[name])}
    assert {name.partition(".")[0] for name in changed} == {"network"}
    assert not any("norm" in name or "bn" in name for name in changed)


def test_a_mask_holds_for_all_steps_and_for_weights_and_biases_alike(conv4: md.Conv4, episode: md.Episode) -> None:
    conv4.blocks[0].norm = nn.Identity()  # so that the convolution's bias has a gradient
    learner = make(MTNet, conv4, steps=3)
    assert isinstance(learner, MTNet)
    mixed = (seed for seed in range(50) if all(0 < mask.sum() < len(mask) for mask in masks_of(learner, seed).values()))
    seed = next(mixed)
    after = adapted(learner, episode, seed)
    for layer in ("blocks.0.conv", "head"):
        mask = masks_of(learner, seed)[layer.replace(".", "/")].bool()
        for part in ("weight", "bias"):
            moved = (after[f"network.{layer}.{part}"] - learner.get_parameter(f"network.{layer}.{part}")).abs()
            assert torch.equal(moved.flatten(1).amax(1) > 0 if part == "weight" else moved > 0, mask), layer


def test_masks_belong_to_the_task_in_training_and_testing(conv4: md.Conv4, episode: md.Episode) -> None:
    learner = make(MTNet, conv4)
    first, again, other = (adapted(learner, episode, seed) for seed in (0, 0, 1))
    assert torch.equal(first["network.head.weight"], again["network.head.weight"])
    assert not torch.equal(first["network.head.weight"], other["network.head.weight"])
    trained = learner(episode, generator=md.SeededNoise(0)).logits
    tested = learner.adapt(episode.support_x, episode.support_y, generator=md.SeededNoise(0))(episode.query_x)
    torch.testing.assert_close(trained, tested)
    assert learner.samples_used(30) == 1
    with pytest.raises(ValueError, match="MTNet draws noise: pass a generator"):
        learner(episode)


def test_metadropout_does_not_change_the_masks_and_has_samples_of_its_own(conv4: md.Conv4, episode: md.Episode) -> None:
    noisy, plain = make(MTNet, conv4, md.MetaDropout(conv4).double()), make(MTNet, conv4)
    assert isinstance(noisy, MTNet)
    assert isinstance(plain, MTNet)
    for mine, its in zip(masks_of(noisy, 3).values(), masks_of(plain, 3).values(), strict=True):
        assert torch.equal(mine, its)
    assert noisy.samples_used(30) == 30
    after = adapted(noisy, episode, seed=3, mc_samples=4)
    mask = masks_of(noisy, 3)["head"].bool()
    moved = (after["network.head.bias"] - noisy.get_parameter("network.head.bias")).abs() > 0
    assert torch.equal(moved, mask)


def test_a_channel_is_adapted_as_often_as_its_logit_says() -> None:
    logits = torch.tensor([-2.0, -0.5, 0.0, 1.0, 3.0]).double()
    many = logits.repeat(20_000, 1)
    mask = draw_mask(many, md.SeededNoise(0).stream(0, 0))
    assert set(mask.unique().tolist()) == {0.0, 1.0}
    share = mask.mean(dim=0)
    assert ((share - logits.sigmoid()).abs() < 4 * (share * (1 - share) / 20_000).sqrt()).all()


def test_the_derivative_of_a_mask_is_that_of_the_relaxed_draw() -> None:
    logits = torch.linspace(-3, 3, 50).double().requires_grad_()
    (gradient,) = torch.autograd.grad(draw_mask(logits, md.SeededNoise(1).stream(0, 0)).sum(), logits)
    uniform = torch.special.ndtr(md.SeededNoise(1).stream(0, 0).normal((50,), logits))
    soft = torch.sigmoid(logits + torch.log(uniform / (1 - uniform)))
    torch.testing.assert_close(gradient, soft * (1 - soft), rtol=1e-10, atol=0)


# The meta-gradient.


@pytest.mark.parametrize("perturbation", [False, True], ids=["plain", "metadropout"])
@pytest.mark.parametrize("kind", [TNet, MTNet])
def test_the_meta_gradient_equals_finite_differences(
    kind: type[TNet], perturbation: bool, network: nn.Module, episode: md.Episode
) -> None:
    noise = md.MetaDropout(network).double() if perturbation else None
    if noise is not None:
        randomise(noise, scale=0.1, seed=1)
    learner = make(kind, network, noise)
    names = [name for name, _ in learner.named_parameters()]
    groups = {"θ": learner.adapted_names, "T": [name for name in names if name.startswith("warps.")]}
    groups["b"] = [n for n in names if n.startswith("network.") and n not in learner.adapted_names]
    if noise is not None:
        groups["φ"] = [name for name in names if name.startswith("perturbation.")]
    assert_finite_differences(learner, episode, groups, md.SeededNoise(6))


class GivenMasks(MTNet):
    """MT-Net whose masks are given."""

    given: dict[str, Tensor]

    def inner_init(self, weights: dict[str, Tensor], noise: md.NoiseSource | None) -> dict[str, Tensor]:
        return self.given


def test_the_gradient_of_the_masks_logits_is_that_of_the_masks_times_the_relaxed_draws(
    conv4: md.Conv4, episode: md.Episode
) -> None:
    learner, other = make(MTNet, conv4), make(GivenMasks, conv4)
    assert isinstance(learner, MTNet)
    assert isinstance(other, GivenMasks)
    gradients = learner.task_gradient(episode, generator=md.SeededNoise(0)).gradients
    masks = masks_of(learner, 0)
    for key, mask in masks.items():
        logits = learner.mask_logits[key]
        (slope,) = torch.autograd.grad(mask.sum(), logits)  # soft (1 − soft)
        direction = torch.randn(mask.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        losses = []
        for move in (1e-7, -1e-7):
            moved = {**masks, key: mask + move * slope * direction}
            other.given = {name: value.detach() for name, value in moved.items()}
            losses.append(other.loss(episode, generator=md.SeededNoise(0)).item())
        measured = (losses[0] - losses[1]) / 2e-7
        expected = (gradients[f"mask_logits.{key}"] * direction).sum().item()
        assert measured == pytest.approx(expected, rel=1e-4, abs=1e-7), key


# Parts that they go with.


def test_with_metadropout_the_noise_multiplies_t_of_the_convolution_before_normalisation(
    conv4: md.Conv4, episode: md.Episode
) -> None:
    noise = md.MetaDropout(conv4).double()
    randomise(noise, seed=1)
    learner = make(TNet, conv4, noise)
    weights = adapted(learner, episode)
    h = episode.query_x
    for i in range(4):
        theta, phi = f"network.blocks.{i}.conv", f"perturbation.generators.blocks/{i}/conv"
        f = F.conv2d(h, weights[f"{theta}.weight"], weights[f"{theta}.bias"], padding=1)
        (warp,) = weights[f"warps.blocks/{i}/conv"]
        f = F.conv2d(f, warp[:, :, None, None])  # the 1x1 convolution that T stands for
        z = F.softplus(F.conv2d(h, weights[f"{phi}.weight"], weights[f"{phi}.bias"], padding=1))
        offset = weights[f"network.blocks.{i}.norm.bias"]
        h = F.max_pool2d(F.relu(F.batch_norm(f * z, None, None, None, offset, training=True, eps=1e-3)), 2)
    logits = F.linear(h.flatten(1), weights["network.head.weight"], weights["network.head.bias"])
    by_hand = logits @ weights["warps.head"][0].T
    classify = learner.adapt(episode.support_x, episode.support_y, generator=md.SeededNoise(0), mc_samples=1)
    torch.testing.assert_close(classify(episode.query_x), by_hand, rtol=1e-9, atol=1e-12)


def test_a_convolution_of_two_groups_has_a_t_for_each(episode: md.Episode) -> None:
    torch.manual_seed(0)
    model = UsersModel().double()
    learner = make(TNet, model, steps=0)
    assert learner.warps["body/0"].shape == (2, 3, 3)
    theta = {name: p for name, p in model.named_parameters()}  # noqa: C416
    combined = learner.network_weights(theta, learner.initial_weights())
    x = torch.rand(2, 4, 5, 5, dtype=torch.float64)
    layer = model.body[0]
    plain = layer(x)
    expected = F.conv2d(plain, torch.block_diag(*learner.warps["body/0"])[:, :, None, None])
    got = F.conv2d(x, combined["body.0.weight"], combined["body.0.bias"], padding=1, groups=2)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("inductive", [False, True], ids=["transductive", "inductive"])
@pytest.mark.parametrize("perturbation", [False, True], ids=["plain", "metadropout"])
@pytest.mark.parametrize("kind", [TNet, MTNet])
def test_several_tasks_can_be_one_batched_pass(
    kind: type[TNet], perturbation: bool, inductive: bool, conv4: md.Conv4
) -> None:
    learner = make(kind, conv4, md.MetaDropout(conv4).double() if perturbation else None)
    assert_batched_equals_loop(learner, [make_episode(seed=seed, inductive=inductive) for seed in range(3)])


@pytest.mark.parametrize("options", [{"gradient_checkpointing": True}, {"first_order": True}], ids=str)
def test_it_goes_with_the_options_of_the_inner_loop(
    options: dict[str, bool], conv4: md.Conv4, episode: md.Episode
) -> None:
    plain, learner = make(MTNet, conv4), make(MTNet, conv4, **options)
    mine, its = (each.task_gradient(episode, generator=md.SeededNoise(0)) for each in (learner, plain))
    assert torch.equal(mine.loss, its.loss)
    for name, gradient in its.gradients.items():
        same = torch.allclose(mine.gradients[name], gradient, rtol=1e-9, atol=1e-12)
        assert same == ("gradient_checkpointing" in options or gradient.abs().max() < 1e-12), name
        assert name.startswith("network.") or mine.gradients[name].abs().max() > 0, name


def test_for_another_number_of_classes_t_of_the_head_treats_all_of_them_alike(
    conv4: md.Conv4, episode: md.Episode
) -> None:
    learner = make(MTNet, conv4)
    assert learner.for_way(3) is learner
    wider = learner.for_way(5)
    assert isinstance(wider, MTNet)
    (old,), (new,) = learner.warps["head"], wider.warps["head"]
    off = ~torch.eye(3).bool()
    expected = torch.full((5, 5), old[off].mean().item()).double()
    expected.fill_diagonal_(old.diagonal().mean().item())
    torch.testing.assert_close(new, expected)
    assert torch.equal(wider.mask_logits["head"], learner.mask_logits["head"].mean().repeat(5))
    assert torch.equal(wider.warps["blocks/0/conv"], learner.warps["blocks/0/conv"])
    # Before any step all classes are alike; after it the support images tell them apart.
    wide = make_episode(way=5)
    classify = wider.adapt(wide.support_x, wide.support_y, generator=md.SeededNoise(0))
    assert classify(wide.query_x).shape == (10, 5)
    wider.steps = 0
    logits = wider.adapt(wide.support_x, wide.support_y, generator=md.SeededNoise(0))(wide.query_x)
    torch.testing.assert_close(logits, logits[:, :1].expand(-1, 5))


def test_what_t_adds_to_all_logits_alike_has_no_influence(conv4: md.Conv4, episode: md.Episode) -> None:
    """So that of T of the head, a·I + b·11ᵀ by symmetry, only a counts, for any number of classes."""
    learner = make(TNet, conv4)
    set_all(learner.warps.values(), lambda warp: torch.eye(warp.shape[-1]).double()[None] * 1.3)
    before = learner.loss(episode)
    with torch.no_grad():
        learner.warps["head"].add_(0.7)
    torch.testing.assert_close(learner.loss(episode), before, rtol=1e-12, atol=0)
