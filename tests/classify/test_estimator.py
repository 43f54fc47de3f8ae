"""The estimator: it learns from a few examples, answers for each image by itself, and takes labels of any kind."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from toy_weights import TEMPERATURE, drawings, toy_weights

import metadropout as md
from metadropout.classify.estimator import MOST_TOGETHER, prepared
from metadropout.weights import WeightSet

IMAGES, LABELS = drawings(6)
NEW, TRUTH = drawings(12, seed=1)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> WeightSet:
    return toy_weights(tmp_path_factory.mktemp("weights"))


def fitted(weights: WeightSet, **options: Any) -> md.FewShotClassifier:
    return md.FewShotClassifier(weights, **{"mc_samples": 2, **options}).fit(IMAGES, LABELS)


@pytest.mark.parametrize("name", [name for name in md.weights.available() if name.startswith("omniglot")])
def test_shipped_weights_learn_drawings_from_one_example_of_each(name: str) -> None:
    classifier = md.FewShotClassifier(name, mc_samples=5).fit(IMAGES[:3], LABELS[:3])
    assert classifier.score(NEW, TRUTH) == 1
    assert classifier.score(IMAGES[:3], LABELS[:3]) == 1


def test_an_answer_does_not_depend_on_the_other_images(weights: WeightSet) -> None:
    classifier = fitted(weights)
    together = classifier.predict_proba(NEW)
    alone = np.concatenate([classifier.predict_proba(image) for image in NEW])
    assert np.abs(together - alone).max() < 1e-6


def test_transductive_answers_do_depend_on_each_other(weights: WeightSet) -> None:
    classifier = fitted(weights, inductive=False)
    assert np.abs(classifier.predict_proba(NEW)[:1] - classifier.predict_proba(NEW[:1])).max() > 1e-3
    with pytest.raises(md.DataError, match="too many to be normalised together"):
        classifier.predict(np.zeros((MOST_TOGETHER + 1, 28, 28), np.uint8))


def test_probabilities_are_probabilities_in_the_order_of_the_classes(weights: WeightSet) -> None:
    classifier = fitted(weights)
    found = classifier.predict_proba(NEW)
    assert found.shape == (12, 3)
    assert np.allclose(found.sum(axis=1), 1, atol=1e-12)
    assert classifier.classes_.tolist() == ["kind 0", "kind 1", "kind 2"]
    assert (classifier.predict(NEW) == classifier.classes_[found.argmax(axis=1)]).all()
    assert np.allclose(np.exp(classifier.predict_log_proba(NEW)), found)
    assert classifier.n_support_.tolist() == [2, 2, 2]


@pytest.mark.parametrize(
    "kinds",
    [
        [0, 1, 2],
        [10, -3, 7],
        ["b", "a", "c"],
        [True, False],
        [0.5, 1.5, 2.5],
        [(1, 2), (0, 1), (5, 5)],
        [None, "a", 3],
        [date(2020, 1, 1), date(2019, 1, 1)],
    ],
)
@pytest.mark.parametrize("container", [list, tuple, np.asarray, torch.tensor])
def test_labels_may_be_of_any_kind(weights: WeightSet, kinds: list[Any], container: Any) -> None:
    labels = [kinds[number % len(kinds)] for number in range(6)]
    if container is torch.tensor and not all(isinstance(kind, int | float) for kind in kinds):
        pytest.skip("tensors hold numbers")
    if container is np.asarray and isinstance(kinds[0], tuple):
        pytest.skip("NumPy makes a table of tuples")
    classifier = md.FewShotClassifier(weights, mc_samples=2).fit(IMAGES, container(labels))
    assert set(classifier.predict(NEW).tolist()) <= set(kinds)
    assert len(classifier.classes_) == len(kinds)


@pytest.mark.parametrize("start", ["rows", "mean"])
@pytest.mark.parametrize("classes", [2, 3, 5, 6, 12])
def test_there_may_be_fewer_or_more_classes_than_in_training(weights: WeightSet, classes: int, start: Any) -> None:
    images, labels = drawings(classes, kinds=classes)
    classifier = md.FewShotClassifier(weights, start=start, mc_samples=2).fit(images, labels)
    assert classifier.predict_proba(NEW).shape == (12, classes)


def test_classes_start_from_the_rows_in_turn_or_from_their_mean(weights: WeightSet) -> None:
    rows = weights.learner().network.head.weight.detach()  # type: ignore[union-attr]
    turn = prepared(weights.learner(), 7, start="rows").network.head.weight  # type: ignore[union-attr]
    assert torch.equal(turn, rows[[0, 1, 2, 3, 4, 0, 1]])  # type: ignore[arg-type]
    few = prepared(weights.learner(), 2, start="rows").network.head.weight  # type: ignore[union-attr]
    assert torch.equal(few, rows[:2])  # type: ignore[arg-type]
    for way in (3, 5):
        mean = prepared(weights.learner(), way, start="mean").network.head.weight  # type: ignore[union-attr]
        assert torch.allclose(mean, rows.mean(dim=0).expand(way, -1))  # type: ignore[arg-type]


def test_from_the_mean_the_order_of_classes_is_of_no_importance(tmp_path: Path) -> None:
    weights = toy_weights(tmp_path, perturbation="none")
    one = md.FewShotClassifier(weights, start="mean").fit(IMAGES, LABELS)
    renamed = {"kind 0": "z", "kind 1": "y", "kind 2": "x"}
    other = md.FewShotClassifier(weights, start="mean").fit(IMAGES, [renamed[label] for label in LABELS])
    assert np.allclose(one.predict_proba(NEW), other.predict_proba(NEW)[:, ::-1], atol=1e-5)


def test_below_the_threshold_it_is_not_sure(weights: WeightSet) -> None:
    classifier = fitted(weights)
    certainty = np.sort(classifier.predict_proba(NEW).max(axis=1))
    classifier.set_params(threshold=float(certainty[5:7].mean()))
    answers = classifier.predict(NEW)
    assert sum(answer is None for answer in answers) == 6
    assert set(answers.tolist()) <= {None, *LABELS}


def test_the_temperature_of_the_card_is_used(tmp_path: Path) -> None:
    plain, warm = toy_weights(tmp_path), toy_weights(tmp_path, name="warm", temperatures=(TEMPERATURE,))
    cold, tempered = (fitted(weights).predict_proba(NEW) for weights in (plain, warm))
    assert tempered.max() < cold.max()
    assert (tempered.argmax(axis=1) == cold.argmax(axis=1)).all()


def test_the_seed_decides_the_noise(weights: WeightSet) -> None:
    once, again, other = (fitted(weights, seed=seed).predict_proba(NEW) for seed in (0, 0, 1))
    assert np.array_equal(once, again)
    assert not np.array_equal(once, other)


def test_more_steps_fit_the_examples_better(weights: WeightSet) -> None:
    none, many = (fitted(weights, steps=steps).predict_proba(IMAGES) for steps in (0, 30))
    truth = [LABELS.index(label) for label in LABELS]
    own = np.arange(6), truth
    assert many[own].mean() > none[own].mean() + 0.1


def test_no_images_get_no_answers(weights: WeightSet) -> None:
    classifier = fitted(weights, threshold=0.5)
    assert classifier.predict_proba([]).shape == (0, 3)
    assert classifier.predict([]).shape == (0,)


def test_images_are_read_from_files_of_any_size(weights: WeightSet, tmp_path: Path) -> None:
    paths = []
    for number, image in enumerate(IMAGES):
        paths.append(tmp_path / f"{number}.png")
        Image.fromarray((255 - 255 * image).astype(np.uint8)).resize((60 + number, 60 + number)).save(paths[-1])
    classifier = md.FewShotClassifier(weights, mc_samples=2).fit(paths, LABELS)
    assert classifier.predict([str(path) for path in paths]).shape == (6,)


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (IMAGES, LABELS[:5], "6 images, but 5 labels"),
        (IMAGES, ["a"] * 6, "one class, a"),
        ([], [], "no examples"),
        (IMAGES, "abcabc", "give a list"),
        (IMAGES, [[1], [2]] * 3, "told apart"),
        (IMAGES, [0.0, np.nan] * 3, "NaN"),
        (IMAGES, np.zeros((6, 2)), "one for each image"),
    ],
)
def test_examples_that_cannot_be_learned_from_are_refused(
    weights: WeightSet, images: Any, labels: Any, message: str
) -> None:
    with pytest.raises(md.DataError, match=message):
        md.FewShotClassifier(weights).fit(images, labels)


@pytest.mark.parametrize(
    "options",
    [
        {"start": "prototypes"},
        {"invert": "maybe"},
        {"threshold": 2},
        {"mc_samples": 0},
        {"steps": -1},
        {"seed": 0.5},
        {"weights": "none-such"},
    ],
)
def test_parameters_that_mean_nothing_are_refused_when_fitting(weights: WeightSet, options: dict[str, Any]) -> None:
    classifier = md.FewShotClassifier(**{"weights": weights, **options})
    with pytest.raises(md.ConfigError, match=next(iter(options))):
        classifier.fit(IMAGES, LABELS)


def test_learners_that_take_no_steps_say_so(tmp_path: Path) -> None:
    weights = toy_weights(tmp_path, learner="protonet", perturbation="none")
    assert md.FewShotClassifier(weights).fit(IMAGES, LABELS).predict_proba(NEW).shape == (12, 3)
    with pytest.raises(md.ConfigError, match="takes no steps"):
        md.FewShotClassifier(weights, steps=3).fit(IMAGES, LABELS)


def test_parameters_can_be_read_and_set_but_none_that_do_not_exist() -> None:
    classifier = md.FewShotClassifier(threshold=0.5)
    assert classifier.get_params()["threshold"] == 0.5
    assert repr(classifier) == "FewShotClassifier(threshold=0.5)"
    assert classifier.set_params(steps=3).steps == 3
    with pytest.raises(md.ConfigError, match="no parameter 'sept'"):
        classifier.set_params(sept=3)


def test_a_fitted_classifier_can_be_copied_and_pickled(weights: WeightSet) -> None:
    classifier = fitted(weights)
    for other in (copy.deepcopy(classifier), pickle.loads(pickle.dumps(classifier))):
        assert np.array_equal(other.predict_proba(NEW), classifier.predict_proba(NEW))


def test_scikit_learn_is_not_needed() -> None:
    program = (
        "import sys; sys.modules['sklearn'] = None\n"
        "import numpy as np, metadropout as md\n"
        "c = md.FewShotClassifier('omniglot-5way-1shot-maml')\n"
        "try: c.predict(np.zeros((1, 28, 28)))\n"
        "except md.MetadropoutError as error: print(error)\n"
        "c.fit(np.eye(28)[None].repeat(2, 0), [0, 1]).predict(np.eye(28))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "call fit(images, labels) first" in done.stdout
