"""Prototypical Networks: the authors' own code number by number, and what defines them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from toys import Given, given_task, make_episode

import metadropout as md
from metadropout.learners.protonet import prototypes

GOLDEN = Path(__file__).parent.parent / "golden" / "learners"


def load(name: str) -> dict[str, Any]:
    return json.loads((GOLDEN / f"{name}.json").read_text())  # type: ignore[no-any-return]


def parameter_name(name: str) -> str:
    """`encoder.2.1.weight` → `network.blocks.2.norm.weight`."""
    _, block, part, kind = name.split(".")
    return f"network.blocks.{block}.{('conv', 'norm')[int(part)]}.{kind}"


def build(case: dict[str, Any]) -> tuple[md.ProtoNet, md.Episode]:
    """Rebuild the inputs of a golden case with NumPy's legacy generator, as its `recipe` says."""
    norm: Literal["offset", "running"] = "offset" if case["frozen"] else "running"
    learner = md.ProtoNet(md.Conv4(None, norm=norm)).double()
    r = np.random.RandomState(case["seed"])
    with torch.no_grad():
        for variable in case["variables"]:
            value = (r.randn(*variable["shape"]) * case["scale"]).astype("float32").astype("float64")
            if variable["name"] not in case["frozen"]:  # of those the draw is made, and 1 is used
                scale = variable["name"].endswith(".1.weight")
                learner.get_parameter(parameter_name(variable["name"])).copy_(torch.from_numpy(value + scale))
    way, shot, query = case["way"], case["shot"], case["query"]
    r = np.random.RandomState(case["seed"] + 1)
    images = torch.from_numpy(r.rand(way * (shot + query), *case["image"]).astype("float32")).double()
    labels = torch.arange(way)
    n = way * shot
    return learner, md.Episode(
        images[:n], labels.repeat_interleave(shot), images[n:], labels.repeat_interleave(query), inductive=True
    )


def check(value: Tensor, golden: dict[str, Any], scale: float | None = None) -> None:
    """Hold a tensor against its stored norm, sum and first entries, relative to its norm."""
    size = scale or max(golden["norm"], 1e-3)
    assert float(value.norm()) == pytest.approx(golden["norm"], abs=1e-8 * size)
    assert float(value.sum()) == pytest.approx(golden["sum"], abs=1e-8 * size * value.numel() ** 0.5)
    assert value.flatten()[:5].tolist() == pytest.approx(golden["first"], abs=1e-8 * size)


@pytest.mark.parametrize("name", ["protonet_authors_encoder", "protonet_offset_norm"])
def test_episode_is_that_of_the_authors_code(name: str) -> None:
    case = load(name)
    learner, episode = build(case)
    if case["frozen"]:  # without running averages, one batch is the transductive protocol
        episode = md.Episode(*episode.tensors())
    outcome = learner(episode)
    assert outcome.loss.item() == pytest.approx(case["query_loss"], rel=1e-8)
    assert float(md.learners.accuracy(outcome.logits, episode.query_y)) == pytest.approx(case["query_accuracy"])
    task = learner.task_gradient(episode)
    names = {parameter_name(name): name for name in case["grads"]}
    assert task.gradients.keys() == names.keys()
    largest = max(golden["norm"] for golden in case["grads"].values())
    for mine, theirs in names.items():
        # Convolution biases have no gradient before a normalisation: what is there is rounding.
        bias = mine.endswith("conv.bias")
        check(task.gradients[mine], case["grads"][theirs], largest if bias else None)

    x, n = torch.cat([episode.support_x, episode.query_x]), len(episode.support_x)
    features = learner.network.train()(x)[:n].detach()
    members = torch.nn.functional.one_hot(episode.support_y).double()
    check(prototypes(features, members), case["prototypes"])


def test_running_averages_and_the_inductive_loss_are_those_of_the_authors_code() -> None:
    case = load("protonet_authors_encoder")
    learner, episode = build(case)
    buffers = learner(episode).buffers
    names = {parameter_name(name): name for name in case["running_after_one_pass"]}
    assert buffers.keys() == names.keys() == set(learner.changed_buffers())
    for mine, theirs in names.items():
        check(buffers[mine], case["running_after_one_pass"][theirs])
        learner.get_buffer(mine).copy_(buffers[mine])
    logits = learner.adapt(episode.support_x, episode.support_y, inductive=True)(episode.query_x)
    loss = nn.functional.cross_entropy(logits, episode.query_y)
    assert float(loss) == pytest.approx(case["loss_eval_mode_after_one_training_pass"], rel=1e-8)


def test_loss_and_gradients_of_given_features_are_those_of_the_authors_code() -> None:
    case = load("protonet_head")
    way, shot, query, dim = (case[name] for name in ("way", "shot", "query", "dim"))
    r = np.random.RandomState(case["seed"])
    support = torch.from_numpy(r.randn(way * shot, dim).astype("float32")).double().requires_grad_()
    queries = torch.from_numpy(r.randn(way * query, dim).astype("float32")).double().requires_grad_()
    labels = torch.arange(way)
    episode = md.Episode(support, labels.repeat_interleave(shot), queries, labels.repeat_interleave(query))
    outcome = md.ProtoNet(Given()).double()(episode)
    assert outcome.loss.item() == pytest.approx(case["query_loss"], rel=1e-10)
    assert float(md.learners.accuracy(outcome.logits, episode.query_y)) == pytest.approx(case["query_accuracy"])
    gradients = torch.autograd.grad(outcome.loss, [support, queries])
    for gradient, name in zip(gradients, ("grad_support", "grad_query"), strict=True):
        assert gradient.flatten().tolist() == pytest.approx(case[name], abs=1e-10)


# What defines it, on features that are given.


def means(episode: md.Episode) -> Tensor:
    return torch.stack([episode.support_x[episode.support_y == k].mean(0) for k in episode.support_y.unique()])


def test_logits_are_minus_the_squared_distance_without_root_mean_or_temperature() -> None:
    episode = given_task()
    logits = md.ProtoNet(Given())(episode).logits
    for j, feature in enumerate(episode.query_x):
        for k, centre in enumerate(means(episode)):
            expected = -sum((a - b) ** 2 for a, b in zip(feature.tolist(), centre.tolist(), strict=True))
            assert float(logits[j, k]) == pytest.approx(expected)


def test_it_is_a_linear_layer_with_weight_2c_and_bias_minus_c_squared() -> None:
    episode = given_task()
    c = means(episode)
    linear = nn.functional.linear(episode.query_x, 2 * c, -c.square().sum(1))
    torch.testing.assert_close(md.ProtoNet(Given())(episode).logits.softmax(1), linear.softmax(1))


def test_the_gradient_at_a_prototype_is_the_cards() -> None:
    """∂L/∂c_k = (2/NQ) Σ_j (p_k(x_j) − [y_j = k]) (f(x_j) − c_k); each image of a class gets 1/K of it."""
    episode = given_task()
    support = episode.support_x.requires_grad_()
    outcome = md.ProtoNet(Given())(episode)
    (gradient,) = torch.autograd.grad(outcome.loss, support)
    c = means(episode).detach()
    errors = outcome.logits.softmax(1).detach() - nn.functional.one_hot(episode.query_y)  # (m, way)
    expected = 2 / len(errors) * (errors.T @ episode.query_x - errors.sum(0)[:, None] * c)
    torch.testing.assert_close(gradient, expected[episode.support_y] / 2)  # two shots


def test_doubling_every_support_image_changes_nothing_where_statistics_are_fixed() -> None:
    torch.manual_seed(0)
    learner = md.ProtoNet(md.Conv4(None, image_size=16, channels=4, norm="running")).double()
    episode = make_episode()
    x, y, query_x, _ = episode.tensors()
    once = learner.adapt(x, y, inductive=True)(query_x)
    twice = learner.adapt(torch.cat([x, x]), torch.cat([y, y]), inductive=True)(query_x)
    torch.testing.assert_close(once, twice)


def test_nothing_depends_on_the_order_of_support_images_and_classes() -> None:
    episode = given_task()
    learner = md.ProtoNet(Given())
    order = torch.randperm(len(episode.support_x), generator=torch.Generator().manual_seed(0))
    logits = learner.adapt(episode.support_x, episode.support_y)(episode.query_x)
    shuffled = learner.adapt(episode.support_x[order], episode.support_y[order])(episode.query_x)
    torch.testing.assert_close(logits, shuffled)
    renamed = torch.tensor([2, 0, 1])[episode.support_y]
    torch.testing.assert_close(learner.adapt(episode.support_x, renamed)(episode.query_x), logits[:, [1, 2, 0]])


def test_one_learner_takes_tasks_of_any_way() -> None:
    learner = md.ProtoNet(Given())
    for way in (2, 7):
        episode = given_task(way=way)
        assert learner.for_way(way) is learner
        assert learner(episode).logits.shape == (way * 4, way)


def test_a_class_without_support_images_is_named() -> None:
    with pytest.raises(ValueError, match="no support image has label 1, but one has 2"):
        md.ProtoNet(Given()).adapt(torch.rand(2, 5), torch.tensor([0, 2]))
