"""Adapted classifiers as modules: the learner's own answers, saved and loaded, image by image."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from toy_weights import drawings, toy_weights

from metadropout.classify import AdaptedClassifier
from metadropout.learners import LEARNERS
from metadropout.noise import CounterNoise

X = torch.from_numpy(drawings(10, kinds=5)[0])[:, None]
Y = torch.arange(10) % 5


@pytest.mark.parametrize("perturbation", ["none", "metadropout", "vib", "weight-gaussian"])
@pytest.mark.parametrize("inductive", [True, False])
def test_a_module_answers_as_the_adapted_learner(tmp_path: Path, perturbation: str, inductive: bool) -> None:
    learner = toy_weights(tmp_path, perturbation=perturbation).learner()
    options = {"inductive": inductive, "mc_samples": 2}
    wanted = learner.adapt(X, Y, **options, generator=CounterNoise(1))(X)  # type: ignore[arg-type]
    module = AdaptedClassifier(learner, X, Y, **options, generator=CounterNoise(1))  # type: ignore[arg-type]
    assert torch.allclose(module(X), wanted.log_softmax(dim=1), atol=1e-6)


@pytest.mark.parametrize("learner", [name for name in LEARNERS if name not in ("cavia", "metalstm", "unicorn")])
def test_every_learner_becomes_a_module(tmp_path: Path, learner: str) -> None:
    built = toy_weights(tmp_path, perturbation="none", learner=learner).learner()
    module = AdaptedClassifier(built, X, Y, mc_samples=2, generator=CounterNoise(1))
    found = module(X[:3])
    assert found.shape == (3, 5)
    assert torch.allclose(found.exp().sum(dim=1), torch.ones(3), atol=1e-5)


def test_the_protocol_can_change_without_adapting_again(tmp_path: Path) -> None:
    learner = toy_weights(tmp_path).learner()
    inductive, transductive = (
        AdaptedClassifier(learner, X, Y, inductive=inductive, mc_samples=2, generator=CounterNoise(1))
        for inductive in (True, False)
    )
    assert torch.equal(inductive.transductive(X), transductive(X))
    assert not torch.allclose(inductive(X[:2]), transductive(X[:2]))  # of all, statistics are those of the support


def test_a_saved_module_gives_the_same_answers_when_loaded(tmp_path: Path) -> None:
    learner = toy_weights(tmp_path).learner()
    module = AdaptedClassifier(learner, X, Y, mc_samples=2, generator=CounterNoise(1))
    torch.save(module.state_dict(), tmp_path / "state.pt")
    other = AdaptedClassifier(learner, X.flip(0), Y, mc_samples=2, generator=CounterNoise(2))
    assert not torch.allclose(other(X), module(X))
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert torch.equal(other(X), module(X))


def test_a_copy_has_weights_of_its_own(tmp_path: Path) -> None:
    module = AdaptedClassifier(toy_weights(tmp_path).learner(), X, Y, mc_samples=2, generator=CounterNoise(1))
    before, other = module(X), copy.deepcopy(module)
    for buffer in other.buffers():
        buffer.zero_()
    assert torch.equal(module(X), before)


def test_the_temperature_divides_the_logits(tmp_path: Path) -> None:
    learner = toy_weights(tmp_path, perturbation="none").learner()
    plain, warm = (AdaptedClassifier(learner, X, Y, temperature=t) for t in (1.0, 3.0))
    assert torch.allclose(warm(X), (plain(X) / 3).log_softmax(dim=1), atol=1e-6)
