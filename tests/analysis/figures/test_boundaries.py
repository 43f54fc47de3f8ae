"""Decision boundaries: the drawn line is the classifier's own decision, for every point."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from toys import make_episode, randomise

import metadropout as md
from metadropout.analysis.figures import (
    boundaries_over_steps,
    boundaries_over_tasks,
    decision_boundaries,
    draw_boundaries,
)
from metadropout.analysis.figures.boundaries import ADAPTING, PERTURBED, QUERY, SUPPORT, Panel, cut_head, project
from metadropout.learners import LEARNERS
from metadropout.noise import SeededNoise
from metadropout.perturbations import PERTURBATIONS

pytest.importorskip("sklearn")
TASK = make_episode(way=2, shot=2, query=5)
QUICK = {"copies": 2, "mc_samples": 2}


def make_learner(network: nn.Module, perturbation: str, learner: str = "maml", **options: bool) -> md.MAML:
    noise = PERTURBATIONS[perturbation](network)
    randomise(noise)
    return LEARNERS[learner](network, noise, steps=2, **options)  # type: ignore[call-arg, return-value]


def assert_line_is_decision(panel: Panel) -> None:
    assert np.array_equal(np.where(panel.distance > 0, 0, 1), panel.predicted)
    assert np.isfinite(panel.height).all()


@pytest.mark.parametrize("perturbation", ["none", "metadropout"])
@pytest.mark.parametrize("inductive", [False, True])
def test_the_side_of_the_line_is_the_predicted_class_on_any_network(
    network: nn.Module, perturbation: str, inductive: bool
) -> None:
    learner, task = make_learner(network, perturbation), replace(TASK, inductive=inductive)
    (panel,) = decision_boundaries({"it": learner}, task, **QUICK).panels[0]
    assert_line_is_decision(panel)
    # The query points are classified as the adapted model itself does it.
    noise = SeededNoise(0, 0, ADAPTING)
    classify = cut_head(learner).adapt(
        task.support_x, task.support_y, inductive=inductive, mc_samples=2, generator=noise
    )
    assert np.array_equal(panel.predicted[panel.kind == QUERY], classify(TASK.query_x).argmax(1).numpy())
    assert np.array_equal(panel.true[panel.kind == QUERY], TASK.query_y.numpy())


@pytest.mark.parametrize(
    ("perturbation", "learner", "copies"),
    [("weight-gaussian", "maml", 2), ("vib", "maml", 2), ("metadropout", "metasgd", 2), ("mixup", "maml", 0)],
)
def test_other_methods_have_lines_and_perturbed_copies_where_features_are_perturbed(
    conv4: md.Conv4, perturbation: str, learner: str, copies: int
) -> None:
    (panel,) = decision_boundaries({"it": make_learner(conv4, perturbation, learner)}, TASK, **QUICK).panels[0]
    assert_line_is_decision(panel)
    assert [(panel.kind == kind).sum() for kind in (SUPPORT, PERTURBED, QUERY)] == [4, 4 * copies, 10]


def test_the_line_belongs_to_the_points(conv4: md.Conv4) -> None:
    """A line that is moved by more than the nearest point's distance no longer agrees: the test above can fail."""
    (panel,) = decision_boundaries({"it": make_learner(conv4, "none")}, TASK, **QUICK).panels[0]
    moved = panel.distance - 1.01 * panel.distance[np.argmax(np.abs(panel.distance))]
    assert not np.array_equal(np.where(moved > 0, 0, 1), panel.predicted)


def test_distance_is_along_the_normal_and_the_rest_across_it() -> None:
    features = torch.tensor([[3.0, 4.0, 7.0], [0.0, 0.0, 1.0]])
    weight, bias = torch.tensor([[3.0, 4.0, 0.0], [0.0, 0.0, 0.0]]), torch.tensor([10.0, 0.0])
    distance, rest = project(features, weight, bias)
    torch.testing.assert_close(distance, torch.tensor([7.0, 2.0]))  # (25 + 10) / 5 and 10 / 5
    torch.testing.assert_close(rest, torch.tensor([[0.0, 0.0, 7.0], [0.0, 0.0, 1.0]]))


def test_cutting_the_head_leaves_the_learner_alone_and_cuts_what_belongs_to_the_head(conv4: md.Conv4) -> None:
    learner = make_learner(conv4, "weight-gaussian", "metasgd")
    before = {name: p.detach().clone() for name, p in learner.named_parameters()}
    cut = dict(cut_head(learner, (2, 0)).named_parameters())
    for name, value in learner.named_parameters():
        assert torch.equal(value, before[name])
        ours = cut[name]
        assert torch.equal(ours, value[[2, 0]] if "head" in name else value), name


def test_over_steps_the_first_panel_is_before_adapting_and_the_last_after_it(conv4: md.Conv4) -> None:
    learner = make_learner(conv4, "metadropout")
    data = boundaries_over_steps({"it": learner}, TASK, **QUICK)
    (row,) = data.panels
    assert [panel.moment for panel in row] == ["step 0", "step 1", "step 2"]
    assert learner.steps == 2
    (last,) = decision_boundaries({"it": learner}, TASK, **QUICK).panels[0]
    np.testing.assert_array_equal(row[-1].distance, last.distance)
    untouched = cut_head(learner)
    untouched.steps = 0
    classify = untouched.adapt(TASK.support_x, TASK.support_y, generator=SeededNoise(0))
    assert np.array_equal(row[0].predicted[row[0].kind == QUERY], classify(TASK.query_x).argmax(1).numpy())
    for panel in row:
        assert_line_is_decision(panel)


def test_all_three_are_drawn_with_words_that_give_their_results(conv4: md.Conv4) -> None:
    learners = {"MAML": make_learner(conv4, "none"), "noisy": make_learner(conv4, "metadropout")}
    tasks = [TASK, make_episode(way=2, shot=2, query=5, seed=1)]
    one = decision_boundaries(learners, TASK, **QUICK)
    for data in (one, boundaries_over_steps(learners, TASK, **QUICK), boundaries_over_tasks(learners, tasks, **QUICK)):
        figure = draw_boundaries(data)
        legend = [text.get_text() for text in figure.legends[0].get_texts()]
        kinds = ("support", "perturbed support", "query")
        assert legend == [f"class {number}: {kind}" for kind in kinds for number in (1, 2)]
        right = data.panels[1][-1].right(QUERY)[0]
        assert f"{right} of 10 query images right" in data.caption
        assert f"{right} of 10 query images right" in data.alt
    assert "2 perturbed copies of each support" in one.caption


def test_the_same_seed_gives_the_same_picture(conv4: md.Conv4) -> None:
    learner = {"it": make_learner(conv4, "metadropout")}
    first, again = (decision_boundaries(learner, TASK, **QUICK, seed=3).panels[0][0] for _ in range(2))
    np.testing.assert_array_equal(first.distance, again.distance)
    np.testing.assert_array_equal(first.height, again.height)
    other = decision_boundaries(learner, TASK, **QUICK, seed=4).panels[0][0]
    assert not np.array_equal(first.distance, other.distance)
