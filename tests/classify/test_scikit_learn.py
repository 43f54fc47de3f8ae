"""scikit-learn's conventions: cloning, cross-validation, and its own checks of estimators.

The checks make tables of numbers. Here a table's rows become images, the numbers squeezed into 0 to 1, so that all of
them run; those that cannot hold for a classifier of images are listed with the reason.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
from numpy.typing import NDArray
from toy_weights import drawings, toy_weights

import metadropout as md

sklearn = pytest.importorskip("sklearn")

from sklearn.base import clone, is_classifier  # noqa: E402
from sklearn.exceptions import NotFittedError  # noqa: E402
from sklearn.model_selection import GridSearchCV, cross_val_score  # noqa: E402
from sklearn.pipeline import make_pipeline  # noqa: E402
from sklearn.preprocessing import FunctionTransformer  # noqa: E402
from sklearn.utils.estimator_checks import check_estimator  # noqa: E402
from sklearn.utils.validation import check_is_fitted, validate_data  # noqa: E402

IMAGES, LABELS = drawings(12)

REASONS = {
    "check_n_features_in_after_fitting": "images are no table with a fixed number of columns: sizes may differ",
    "check_classifiers_train": "blobs of two or three numbers are no images: weights cannot tell them apart",
    "check_classifiers_one_label": "one class only is refused, as there is nothing to tell apart",
    "check_classifiers_regression_target": "labels may be of any kind, floating-point numbers among them",
    "check_fit2d_1sample": "one example is one class only, which is refused with another message than it looks for",
    "check_fit_score_takes_y": "arguments are called images and labels; scikit-learn itself passes them by position",
    "check_supervised_y_no_nan": "labels that are not finite are refused, but by an error of this library's own",
    "check_supervised_y_2d": "a column of labels is taken without a warning",
}
"""Checks that are expected to fail, and why."""


class OnTables(md.FewShotClassifier):
    """Takes tables in place of images: a row becomes an image of one line of its numbers, repeated."""

    def _pictures(self, X: Any, **options: Any) -> NDArray[np.float64]:
        table = np.asarray(validate_data(self, X, dtype=np.float64, **options))
        squeezed = 1 / (1 + np.exp(-np.clip(table, -30, 30)))
        return np.repeat(squeezed[:, None, :], 28, axis=1)  # (n, 28, columns)

    def fit(self, X: Any, y: Any) -> Self:
        if y is None:
            raise ValueError("this estimator requires y to be passed, but the target y is None")
        return super().fit(list(self._pictures(X)), np.asarray(y))

    def predict_proba(self, X: Any) -> NDArray[np.float64]:
        check_is_fitted(self)
        return super().predict_proba(list(self._pictures(X, reset=False)))

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.two_d_array = True
        tags.classifier_tags.poor_score = True
        return tags


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    toy_weights(folder := tmp_path_factory.mktemp("weights"), perturbation="none")
    return folder / "toy.safetensors"


@pytest.mark.filterwarnings("default")
def test_scikit_learns_checks_pass_but_for_those_with_a_reason(weights: Path) -> None:
    results = check_estimator(
        OnTables(str(weights), steps=1), expected_failed_checks=REASONS, on_skip=None, on_fail=None
    )
    failed = {r["check_name"]: repr(r["exception"]) for r in results if r["status"] == "failed"}
    assert not failed
    expected = {r["check_name"] for r in results if r["status"] == "xfail"}
    assert expected == set(REASONS)
    assert sum(r["status"] == "passed" for r in results) >= 40


def test_it_is_a_classifier_that_can_be_cloned(weights: Path) -> None:
    classifier = md.FewShotClassifier(weights, steps=3, threshold=0.4)
    assert is_classifier(classifier)
    other = clone(classifier.fit(IMAGES, LABELS))
    assert other.get_params() == classifier.get_params()
    with pytest.raises(NotFittedError, match="call fit"):
        other.predict(IMAGES)
    assert clone(md.FewShotClassifier(md.load_weights(weights))).weights.name == "toy"


def test_it_can_be_cross_validated_searched_over_and_put_into_a_pipeline(weights: Path) -> None:
    classifier = md.FewShotClassifier(weights)
    assert cross_val_score(classifier, IMAGES, LABELS, cv=2).shape == (2,)
    assert cross_val_score(classifier, list(IMAGES), LABELS, cv=2, scoring="neg_log_loss").shape == (2,)
    search = GridSearchCV(classifier, {"steps": [0, 5]}, cv=2).fit(IMAGES, LABELS)
    assert search.best_params_["steps"] in (0, 5)
    pipeline = make_pipeline(FunctionTransformer(lambda images: 1 - images), classifier).fit(IMAGES, LABELS)
    assert pipeline.predict(IMAGES).shape == (12,)
