"""The inner loop: what it adapts, what it leaves alone, and its meta-gradient."""

from __future__ import annotations

import copy
import gc
import math

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from toys import UsersModel, assert_finite_differences, make_episode, randomise

import metadropout as md
from metadropout.learners.base import averaged
from metadropout.networks.functional import BATCH_NORMS
from metadropout.perturbations import Pass

LEARNERS = {"maml": md.MAML, "metasgd": md.MetaSGD}


def groups(learner: md.GradientLearner) -> dict[str, list[str]]:
    """The learner's parameters by what the paper calls them."""
    names = [name for name, _ in learner.named_parameters()]
    rest = [name for name in names if name.startswith("network.") and name not in learner.adapted_names]
    return {
        "θ": learner.adapted_names,
        "φ": [name for name in names if name.startswith("perturbation.")],
        "b": rest,
        "step sizes": [name for name in names if name.startswith("step_sizes.")],
    }


@pytest.mark.parametrize("inductive", [False, True], ids=["transductive", "inductive"])
@pytest.mark.parametrize("kind", LEARNERS)
def test_meta_gradient_equals_finite_differences(network: nn.Module, kind: str, inductive: bool) -> None:
    episode = make_episode(inductive=inductive)
    noise = md.MetaDropout(network).double()
    randomise(noise, seed=1)
    learner = LEARNERS[kind](network, noise, inner_lr=0.01, steps=2).double()
    if kind == "metasgd":
        randomise(learner.step_sizes, scale=0.002, seed=2)
    checked = {group: names for group, names in groups(learner).items() if names}
    assert_finite_differences(learner, episode, checked, md.SeededNoise(5))
    assert list(checked) == ["θ", "φ", "b", *(["step sizes"] if kind == "metasgd" else [])]


def test_adaptation_changes_theta_only(conv4: md.Conv4, episode: md.Episode) -> None:
    noise = md.MetaDropout(conv4).double()
    learner = md.MAML(conv4, noise)
    before = {name: p.detach().clone() for name, p in learner.named_parameters()}
    weights = learner.inner_steps(
        dict(before), episode.support_x, episode.support_y, md.SeededNoise(0), 1, differentiable=False
    )
    changed = {name for name in before if not torch.equal(before[name], weights[name])}
    assert changed == set(learner.adapted_names)
    assert changed == {n for n in before if n.startswith("network.") and ".norm." not in n}
    for name, parameter in learner.named_parameters():
        assert torch.equal(parameter, before[name]), f"{name} of the learner itself must not change"


def test_every_meta_parameter_gets_gradient(conv4: md.Conv4, episode: md.Episode) -> None:
    learner = md.MetaSGD(conv4, md.MetaDropout(conv4).double()).double()
    gradients = learner.task_gradient(episode, generator=md.SeededNoise(0)).gradients
    assert gradients.keys() == dict(learner.named_parameters()).keys()
    silent = [name for name, g in gradients.items() if not g.abs().max() > 0]
    assert silent == []


def test_query_pass_is_deterministic_and_support_passes_are_not(conv4: md.Conv4, episode: md.Episode) -> None:
    learner = md.MAML(conv4, md.MetaDropout(conv4).double())
    weights = dict(learner.named_parameters())

    def support(seed: int) -> torch.Tensor:
        context = Pass(dict(learner.perturbation.named_parameters()), [md.SeededNoise(seed).stream(0, 0)], support=True)
        return learner.perturbed.run(weights, episode.support_x, context)

    assert torch.equal(support(0), support(0))
    assert not torch.allclose(support(0), support(1))
    weights = learner.inner_steps(
        dict(weights), episode.support_x, episode.support_y, md.SeededNoise(0), 1, differentiable=False
    )
    # The query pass by hand: every block multiplied by softplus(μ), the head clean.
    h = episode.query_x
    for i in range(4):
        theta, phi = f"network.blocks.{i}.conv", f"perturbation.generators.blocks/{i}/conv"
        f = F.conv2d(h, weights[f"{theta}.weight"], weights[f"{theta}.bias"], padding=1)
        z = F.softplus(F.conv2d(h, weights[f"{phi}.weight"], weights[f"{phi}.bias"], padding=1))
        offset = weights[f"network.blocks.{i}.norm.bias"]
        h = F.max_pool2d(F.relu(F.batch_norm(f * z, None, None, None, offset, training=True, eps=1e-3)), 2)
    by_hand = F.linear(h.flatten(1), weights["network.head.weight"], weights["network.head.bias"])
    classifier = learner.adapt(episode.support_x, episode.support_y, generator=md.SeededNoise(0), mc_samples=1)
    torch.testing.assert_close(classifier(episode.query_x), by_hand)


@pytest.mark.parametrize("images_per_pass", [1, 13, 1000], ids=["one by one", "in chunks", "in one batch"])
def test_a_step_with_many_samples_is_the_mean_of_single_recorded_passes(
    conv4: md.Conv4, episode: md.Episode, images_per_pass: int
) -> None:
    noise = md.MetaDropout(conv4).double()
    randomise(noise)
    n, samples = len(episode.support_x), 5
    shapes = [(n, 4, 16, 16), (n, 4, 8, 8), (n, 4, 4, 4), (n, 4, 2, 2), (n, 3)]
    g = torch.Generator().manual_seed(0)
    draws = [torch.randn(shape, generator=g, dtype=torch.float64) for _ in range(samples) for shape in shapes]

    def one_step(source: md.RecordedNoise, mc_samples: int) -> dict[str, torch.Tensor]:
        learner = md.MAML(conv4, noise, inner_lr=0.1, steps=1, images_per_pass=images_per_pass)
        weights = {name: p.detach() for name, p in learner.named_parameters()}
        return learner.inner_steps(
            weights, episode.support_x, episode.support_y, source, mc_samples, differentiable=False
        )

    together = one_step(md.RecordedNoise(draws, per_pass=5, mc_samples=samples), samples)
    singles = [one_step(md.RecordedNoise(draws[5 * s : 5 * s + 5], per_pass=5), 1) for s in range(samples)]
    assert not torch.allclose(singles[0]["network.head.weight"], singles[1]["network.head.weight"])
    for name in together:
        torch.testing.assert_close(
            together[name], torch.stack([s[name] for s in singles]).mean(0), rtol=1e-10, atol=1e-12
        )


def test_fresh_noise_is_drawn_in_every_step(conv4: md.Conv4) -> None:
    asked = []

    class Spy(md.SeededNoise):
        def stream(self, step: int, sample: int):  # type: ignore[no-untyped-def]
            asked.append((step, sample))
            return super().stream(step, sample)

    learner = md.MAML(conv4, md.MetaDropout(conv4).double(), steps=3)
    episode = make_episode()
    learner.adapt(episode.support_x, episode.support_y, generator=Spy(0), mc_samples=2)
    assert asked == [(step, sample) for step in range(3) for sample in range(2)]
    draws = {tuple(md.SeededNoise(0).stream(*key).normal((4,), torch.zeros(())).tolist()) for key in asked}
    assert len(draws) == 6


def test_inductive_answers_do_not_depend_on_the_other_query_images(conv4: md.Conv4, episode: md.Episode) -> None:
    for inductive in (False, True):
        learner = md.MAML(conv4, md.MetaDropout(conv4).double())
        classifier = learner.adapt(
            episode.support_x, episode.support_y, inductive=inductive, generator=md.SeededNoise(0), mc_samples=1
        )
        together = classifier(episode.query_x)
        one_by_one = torch.cat([classifier(x[None]) for x in episode.query_x])
        assert torch.allclose(together, one_by_one) is inductive


def test_inductive_statistics_are_those_of_a_deterministic_support_pass_after_the_last_step(
    conv4: md.Conv4, episode: md.Episode
) -> None:
    learner = md.MAML(conv4, md.MetaDropout(conv4).double())
    classifier, on_support = (
        learner.adapt(
            episode.support_x, episode.support_y, inductive=inductive, generator=md.SeededNoise(0), mc_samples=1
        )
        for inductive in (True, False)
    )
    torch.testing.assert_close(classifier(episode.support_x), on_support(episode.support_x))


def test_first_order_is_refused_with_the_reason_where_the_noise_could_not_be_learned(conv4: md.Conv4) -> None:
    with pytest.raises(ValueError, match="first_order cannot be used with MetaDropout: the noise acts only through"):
        md.MAML(conv4, md.MetaDropout(conv4), first_order=True)


def test_first_order_maml_is_the_gradient_at_the_adapted_weights(conv4: md.Conv4, episode: md.Episode) -> None:
    learner = md.MAML(conv4, first_order=True, inner_lr=0.1, steps=2)
    gradients = learner.task_gradient(episode).gradients
    weights = {name: p.detach() for name, p in learner.named_parameters()}
    weights = learner.inner_steps(weights, episode.support_x, episode.support_y, None, 1, differentiable=False)
    weights = {name: w.requires_grad_() for name, w in weights.items()}
    loss = nn.functional.cross_entropy(
        learner.classifier(weights, episode.support_x, inductive=False)(episode.query_x), episode.query_y
    )
    for name, expected in zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True):
        torch.testing.assert_close(gradients[name], expected)
    second_order = md.MAML(conv4, inner_lr=0.1, steps=2).task_gradient(episode).gradients
    assert not torch.allclose(gradients["network.blocks.1.conv.weight"], second_order["network.blocks.1.conv.weight"])


def test_without_their_second_derivative_what_comes_back_through_normalisations_is_constant(network: nn.Module) -> None:
    episode = make_episode()
    learner = md.MAML(network, inner_lr=0.1, steps=2, norm_second_order=False)
    result = learner.task_gradient(episode)

    def cut(_: nn.Module, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        x = inputs[0].clone()
        x.register_hook(lambda g: g.detach())
        return x

    model = copy.deepcopy(network).eval()
    for module in model.modules():
        if isinstance(module, BATCH_NORMS):
            module.train().register_forward_pre_hook(cut)
    start = dict(model.named_parameters())
    weights = dict(start)
    names = [name.removeprefix("network.") for name in learner.adapted_names]
    for _ in range(learner.steps):
        loss = F.cross_entropy(functional_call(model, weights, (episode.support_x,)), episode.support_y)
        gradients = torch.autograd.grad(loss, [weights[name] for name in names], create_graph=True)
        weights |= {name: weights[name] - 0.1 * g for name, g in zip(names, gradients, strict=True)}
    loss = F.cross_entropy(functional_call(model, weights, (episode.query_x,)), episode.query_y)
    torch.testing.assert_close(result.loss, loss.detach())
    for name, expected in zip(start, torch.autograd.grad(loss, list(start.values())), strict=True):
        torch.testing.assert_close(result.gradients[f"network.{name}"], expected, rtol=1e-7, atol=1e-9)
    exact = md.MAML(network, inner_lr=0.1, steps=2).task_gradient(episode)
    assert torch.equal(exact.loss, result.loss)
    assert any(not torch.allclose(exact.gradients[n], g, rtol=1e-3) for n, g in result.gradients.items())


def test_a_share_of_the_second_derivative_lies_between_none_and_all_of_it(episode: md.Episode) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 14 * 14, 3))
    none, half, whole = (
        md.MAML(network.double(), inner_lr=0.1, steps=1, norm_second_order=share).task_gradient(episode).gradients
        for share in (False, 0.5, True)
    )
    for name, gradient in half.items():  # one normalisation and one step: a mean of the two
        torch.testing.assert_close(gradient, (none[name] + whole[name]) / 2, rtol=1e-9, atol=1e-12)
    assert not torch.allclose(none["network.0.weight"], whole["network.0.weight"], rtol=1e-3)


def test_noise_without_a_source_is_an_error(conv4: md.Conv4, episode: md.Episode) -> None:
    learner = md.MAML(conv4, md.MetaDropout(conv4).double())
    with pytest.raises(ValueError, match="draws noise: pass a generator"):
        learner.loss(episode)
    md.MAML(conv4).loss(episode)  # nothing random: no source needed


def test_a_torch_generator_is_a_source_and_moves_on(conv4: md.Conv4, episode: md.Episode) -> None:
    learner = md.MAML(conv4, md.MetaDropout(conv4).double())
    g = torch.Generator().manual_seed(1)
    first, second = learner.loss(episode, generator=g), learner.loss(episode, generator=g)
    assert first != second
    assert learner.loss(episode, generator=torch.Generator().manual_seed(1)) == first


def test_adapting_leaves_no_graph_and_no_growing_memory(conv4: md.Conv4, episode: md.Episode) -> None:
    def live_tensors_after(steps: int, episodes: int) -> int:
        learner = md.MAML(conv4, md.MetaDropout(conv4).double(), steps=steps)
        with torch.no_grad():
            for i in range(episodes):
                classifier = learner.adapt(
                    episode.support_x, episode.support_y, generator=md.SeededNoise(i), mc_samples=2
                )
                logits = classifier(episode.query_x)
        assert logits.grad_fn is None
        gc.collect()
        return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())

    live_tensors_after(1, 1)
    few = live_tensors_after(steps=1, episodes=1)
    assert live_tensors_after(steps=8, episodes=5) == few


def test_images_of_an_adapted_model_can_be_differentiated(conv4: md.Conv4, episode: md.Episode) -> None:
    learner = md.MAML(conv4, md.MetaDropout(conv4).double())
    classifier = learner.adapt(episode.support_x, episode.support_y, generator=md.SeededNoise(0), mc_samples=1)
    x = episode.query_x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(classifier(x).sum(), x)
    assert gradient.abs().max() > 0


def test_a_users_model_is_used_without_being_changed(episode: md.Episode) -> None:
    model = UsersModel().double().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    noise = md.MetaDropout(model).double()
    learner = md.MAML(model, noise)
    learner.task_gradient(episode, generator=md.SeededNoise(0))
    learner.adapt(episode.support_x, episode.support_y, generator=md.SeededNoise(0))(episode.query_x)
    assert model.training
    assert not model.stem._forward_hooks
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name  # running averages included
    assert list(noise.generators) == ["stem", "body/0", "hidden", "fc"]
    assert {n for n, _ in model.named_parameters()} - {n.removeprefix("network.") for n in learner.adapted_names} == {
        "bn.weight",
        "bn.bias",
        "body.1.weight",
        "body.1.bias",
    }


def test_layers_and_adapted_parameters_can_be_named(episode: md.Episode) -> None:
    model = UsersModel().double()
    noise = md.MetaDropout(model, layers=["hidden"], head="fc").double()
    learner = md.MAML(model, noise, adapted=["fc.weight"])
    assert list(noise.generators) == ["hidden", "fc"]
    assert learner.adapted_names == ["network.fc.weight"]
    learner.task_gradient(episode, generator=md.SeededNoise(0))
    with pytest.raises(ValueError, match=r"'nothing' is not a convolution or hidden linear layer of UsersModel"):
        md.MetaDropout(model, layers=["nothing"])
    with pytest.raises(ValueError, match=r"the head 'nothing' is not a module of UsersModel; it has \['stem', "):
        md.MetaDropout(model, head="nothing")
    with pytest.raises(ValueError, match=r"'stem' is assumed to be the head, but 'fc' runs after it; .* head='fc'"):
        md.MAML(model, md.MetaDropout(model, head="stem").double()).loss(episode, generator=md.SeededNoise(0))
    with pytest.raises(ValueError, match=r"\['fc.wait'\] are not parameters of UsersModel"):
        md.MAML(model, adapted=["fc.wait"])


def test_steps_on_the_support_loss_lower_it(network: nn.Module) -> None:
    episode = make_episode()
    losses = []
    for steps in (0, 10):
        learner = md.MAML(network, inner_lr=0.05, steps=steps)
        classifier = learner.adapt(episode.support_x, episode.support_y)
        losses.append(nn.functional.cross_entropy(classifier(episode.support_x), episode.support_y).item())
    assert losses[1] < losses[0]


def test_a_diverging_inner_loop_is_explained(conv4: md.Conv4, episode: md.Episode) -> None:
    learner = md.MAML(conv4, inner_lr=math.inf, steps=3)
    assert "the inner loop diverged" in learner.explain_failure(episode)
    assert "lower learner.inner_lr" in learner.explain_failure(episode)
    with torch.no_grad():
        conv4.head.bias[0] = torch.nan
    assert "'network.head.bias' is not finite at the start" in learner.explain_failure(episode)


def test_a_copied_learner_does_the_same(conv4: md.Conv4, episode: md.Episode) -> None:
    learner = md.MAML(conv4, md.MetaDropout(conv4).double())
    copied = copy.deepcopy(learner)
    a, b = (part.task_gradient(episode, generator=md.SeededNoise(0)) for part in (learner, copied))
    assert torch.equal(a.loss, b.loss)
    assert all(torch.equal(a.gradients[name], b.gradients[name]) for name in a.gradients)


def test_a_classifier_stays_what_it_is_when_training_goes_on(conv4: md.Conv4, episode: md.Episode) -> None:
    learner = md.MAML(conv4, md.MetaDropout(conv4).double())
    classifier = learner.adapt(episode.support_x, episode.support_y, generator=md.SeededNoise(0), mc_samples=1)
    before = classifier(episode.query_x)
    with torch.no_grad():
        for parameter in learner.parameters():
            parameter.add_(1)
    assert torch.equal(classifier(episode.query_x), before)


def test_adapting_works_in_inference_mode(conv4: md.Conv4, episode: md.Episode) -> None:
    learner = md.MAML(conv4)
    expected = learner.adapt(episode.support_x, episode.support_y)(episode.query_x)
    with torch.inference_mode():
        got = learner.adapt(episode.support_x.clone(), episode.support_y)(episode.query_x)
    torch.testing.assert_close(got, expected)


def test_frozen_parameters_are_not_adapted(conv4: md.Conv4, episode: md.Episode) -> None:
    conv4.blocks[0].conv.requires_grad_(False)
    learner = md.MAML(conv4)
    assert not any("blocks.0.conv" in name for name in learner.adapted_names)
    assert not any("blocks.0.conv" in name for name in learner.task_gradient(episode).gradients)


class Odd(nn.Module):
    """A model whose layers are not registered in the order in which they run."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.last = nn.Linear(8, 3)
        self.first = nn.Linear(256, 8)
        self.body = nn.Linear(8, 8)
        if kind == "tied":
            self.again = nn.Linear(8, 8)
            self.again.weight = self.body.weight
            self.out = nn.Linear(8, 3)
        if kind == "subclass":
            self.norm = type("NormWithReLU", (nn.BatchNorm1d,), {})(8)
        if kind == "lazy":
            self.body = nn.LazyLinear(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.body(torch.tanh(self.first(x.flatten(1)))))
        if self.kind == "tied":
            return self.out(self.again(h)) + self.last(h)
        if self.kind == "functional":
            return F.linear(h, self.last.weight, self.last.bias)
        return (self.last(h), h) if self.kind == "tuple" else self.last(h)  # type: ignore[return-value]


def test_parameters_under_two_names_are_used_under_both(episode: md.Episode) -> None:
    model = Odd("tied").double()
    classifier = md.MAML(model, steps=0).adapt(episode.support_x, episode.support_y)
    torch.testing.assert_close(classifier(episode.query_x), model(episode.query_x))


ODD_MODELS = {
    "tuple": (TypeError, r"Odd must return logits of shape \(n, way\), not tuple"),
    "order": (ValueError, r"'body' is assumed to be the head, but 'last' runs after it; .* head='last'"),
    "functional": (ValueError, r"'body' is assumed to be the head, but it does not give as many values as there are"),
    "subclass": (ValueError, r"'norm' is a NormWithReLU: what it does beyond batch normalisation"),
    "lazy": (ValueError, r"'body.weight' has no shape yet: run one batch"),
}


@pytest.mark.parametrize("kind", ODD_MODELS)
def test_a_model_that_cannot_be_perturbed_is_refused_with_the_reason(kind: str, episode: md.Episode) -> None:
    error, message = ODD_MODELS[kind]
    model = Odd(kind).double()

    def use() -> None:
        noise = md.MetaDropout(model).double() if kind in ("order", "functional") else None
        md.MAML(model, noise).loss(episode, generator=md.SeededNoise(0))

    with pytest.raises(error, match=message):
        use()


def test_mistakes_of_callers_are_named(conv4: md.Conv4, episode: md.Episode) -> None:
    learner = md.MAML(conv4)
    with pytest.raises(ValueError, match="mc_samples is 0; it must be at least 1"):
        learner.adapt(episode.support_x, episode.support_y, mc_samples=0)
    with pytest.raises(ValueError, match="a label is 5, but the network has 3 outputs"):
        learner.adapt(episode.support_x, episode.support_y + 3)
    with pytest.raises(ValueError, match="there is nothing to adapt"):
        md.MAML(conv4, adapted=[])
    query_y = episode.query_y - 1
    with pytest.raises(ValueError, match="a label is -1, but the network has 3 outputs"):
        learner.loss(md.Episode(episode.support_x, episode.support_y, episode.query_x, query_y))


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8])
def test_labels_may_be_integers_of_any_kind(dtype: torch.dtype, conv4: md.Conv4, episode: md.Episode) -> None:
    learner, x, y = md.MAML(conv4), episode.support_x, episode.support_y
    other = md.Episode(x, y.to(dtype), episode.query_x, episode.query_y.to(dtype))
    expected = learner.task_gradient(episode)
    for result in (learner.task_gradient(other), learner.task_gradients([other, other], [None, None])[1]):
        torch.testing.assert_close(result.loss, expected.loss)
        assert result.accuracy == expected.accuracy
    assert torch.equal(learner.adapt(x, y.to(dtype))(x), learner.adapt(x, y)(x))
    assert learner.explain_failure(other) == learner.explain_failure(episode)


def test_labels_that_are_no_class_numbers_are_refused_with_the_way_out(conv4: md.Conv4, episode: md.Episode) -> None:
    learner, x, y = md.MAML(conv4), episode.support_x, episode.support_y
    one_hot = (
        r"labels have shape \(6, 3\), but 6 images need a class number each, shape \(6,\), which y.argmax\(dim=1\)"
    )
    for labels in (F.one_hot(y), F.one_hot(y).double()):
        with pytest.raises(ValueError, match=one_hot):
            learner.adapt(x, labels)
        with pytest.raises(ValueError, match=one_hot):
            learner.loss(md.Episode(x, y, episode.query_x, labels))
    with pytest.raises(
        ValueError, match=r"labels are of type torch.float64, but class numbers are integers: y.long\(\)"
    ):
        learner.adapt(x, y.double())
    with pytest.raises(ValueError, match=r"labels have shape \(5,\), but 6 images need a class number each"):
        learner.adapt(x, y[:5])


def test_training_may_take_more_noise_samples_than_one(conv4: md.Conv4, episode: md.Episode) -> None:
    asked = []

    class Spy(md.SeededNoise):
        def stream(self, step: int, sample: int):  # type: ignore[no-untyped-def]
            asked.append((step, sample))
            return super().stream(step, sample)

    md.MAML(conv4, md.MetaDropout(conv4).double(), steps=2, train_samples=2).loss(episode, generator=Spy(0))
    assert asked == [(0, 0), (0, 1), (1, 0), (1, 1)]
    one, two = (md.MAML(conv4, steps=2, train_samples=samples).loss(episode) for samples in (1, 2))
    assert torch.equal(one, two)  # nothing is random


def test_the_mean_of_probabilities_is_given_as_logarithms() -> None:
    g = torch.Generator().manual_seed(0)
    logits = [torch.randn(4, 3, generator=g, dtype=torch.float64) * 5 for _ in range(3)]
    classify = averaged([lambda x, i=i: logits[i] for i in range(3)])
    expected = torch.stack([each.softmax(dim=1) for each in logits]).mean(dim=0)
    torch.testing.assert_close(classify(torch.zeros(4)).exp(), expected)
    assert averaged([classify]) is classify
