"""Curves: the noise over training as it was logged, and accuracy over noise samples and inner steps."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

import metadropout as md
from metadropout.analysis.figures import (
    FigureError,
    accuracy_over_settings,
    draw_accuracies,
    draw_noise,
    noise_over_training,
)
from metadropout.analysis.figures.accuracies import settings_to_evaluate
from metadropout.data import EpisodeSampler, open_dataset
from metadropout.evaluation import evaluate


def test_the_noise_is_drawn_from_the_lines_that_log_it() -> None:
    lines = [
        {"kind": "training", "iteration": 10, "loss": 1.0},
        {"kind": "noise", "iteration": 10, "strength/a": 0.5, "strength/b": 0.6, "multiplier/a": 0.7},
        {"kind": "noise", "iteration": 20, "strength/a": 0.4, "strength/b": 0.8, "multiplier/a": 0.9},
    ]
    data = noise_over_training({"with": lines, "without": lines[:1]})
    (run,) = data.runs
    assert run.iterations.tolist() == [10, 20]
    assert list(run.strength) == ["a", "b"]
    np.testing.assert_allclose(run.strength["b"], [0.6, 0.8])
    np.testing.assert_allclose(run.multiplier["a"], [0.7, 0.9])
    assert "with: strength of layer 1 0.50 to 0.40 and layer 2 0.60 to 0.80" in data.caption
    assert data.caption.endswith("without logged no noise.")
    left, right = draw_noise(data).axes
    assert [len(axis.get_lines()) for axis in (left, right)] == [2, 1]


def test_lines_may_lack_layers() -> None:
    lines = [{"kind": "noise", "iteration": 1}, {"kind": "noise", "iteration": 2, "strength/a": 0.5}]
    (run,) = noise_over_training({"run": lines}).runs
    np.testing.assert_array_equal(run.strength["a"], np.float32([np.nan, 0.5]))
    with pytest.raises(FigureError, match="run logged none"):
        noise_over_training({"run": lines[:1]})


def test_runs_that_logged_no_noise_are_named() -> None:
    with pytest.raises(FigureError, match="old and older logged none: trained by an earlier version"):
        noise_over_training({"old": [{"kind": "training", "iteration": 1}], "older": []})


def test_accuracies_are_those_of_an_evaluation_with_the_same_samples_and_steps() -> None:
    torch.manual_seed(0)
    glyphs = open_dataset("glyphs", train_classes=3, validation_classes=1, test_classes=6)
    sampler = EpisodeSampler(glyphs.test, way=3, shot=1, query=2, seed=0)
    network = md.Conv4(way=3, channels=2)
    learners = {
        "plain": md.MAML(network, inner_lr=0.5, steps=2),
        "noisy": md.MAML(network, md.MetaDropout(network), inner_lr=0.5, steps=1),
    }
    calls: list[None] = []
    data = accuracy_over_settings(
        learners, sampler, episodes=4, samples=(1, 3), steps=(0, 1), on_episode=partial(calls.append, None)
    )
    assert [curve.values for curve in data.over_samples] == [
        (1,),
        (1, 3),
    ]  # without noise, one sample is as good as any
    assert [curve.values for curve in data.over_steps] == [(0, 1), (0, 1)]
    expected = sum(settings_to_evaluate(learner, (1, 3), (0, 1)) for learner in learners.values())
    assert len(calls) == 4 * expected
    assert (learners["plain"].steps, learners["noisy"].steps) == (2, 1)
    by_hand = evaluate(learners["noisy"], sampler, episodes=4, mc_samples=3, seed=0)
    assert data.over_samples[1].mean[1] == by_hand.mean
    assert data.over_samples[1].interval[1] == by_hand.interval
    one_step = md.MAML(network, inner_lr=0.5, steps=1)
    by_hand = evaluate(one_step, sampler, episodes=4, mc_samples=1, seed=0)
    assert data.over_steps[0].mean[1] == by_hand.mean
    left, right = draw_accuracies(data).axes
    assert left.get_xlabel() == "noise samples per inner step, S"
    assert f"noisy {100 * data.over_samples[1].mean[0]:.1f} % with 1 and" in data.caption
    assert "3-way 1-shot" in data.caption
    assert right.get_legend() is not None
