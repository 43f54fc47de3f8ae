"""The estimator: a few-shot classifier of images with the interface that scikit-learn's users know."""

from __future__ import annotations

import inspect
import math
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from metadropout.classify.module import AdaptedClassifier
from metadropout.classify.pictures import Invert, Target, as_tensor, split_up
from metadropout.errors import ConfigError, DataError, MetadropoutError, shortened
from metadropout.learners import GradientLearner, Learner
from metadropout.noise import CounterNoise, mix_seed
from metadropout.training.workers import on_one_thread
from metadropout.weights import WeightSet, load_weights

DEFAULT_WEIGHTS = "omniglot-5way-1shot-metadropout"

IMAGES_PER_PASS = 64
"""How many images are classified at once; more take more memory, not less time."""

MOST_TOGETHER = 1000
"""How many images may be normalised together, for which all of their features have to be in memory."""

Start = Literal["auto", "mean", "rows"]


class FewShotClassifier:
    """Classifies images after a few examples of each class, in the manner of scikit-learn's estimators.

    `fit` adapts trained weights to the examples, which takes well under a second; `predict` and `predict_proba` answer
    for new images. There may be more or fewer classes than the weights were trained on, and any number of examples of
    each. scikit-learn itself is not needed.

    Args:
        weights: a name that `metadropout weights` lists, a file, or a `WeightSet`.
        inductive: answer for each image by itself. False normalises the images of a call together (transductive), as
            the paper does: more accurate where a call has many images of all classes, wrong where it has few.
        mc_samples: noise samples per step of adapting, for weights that were trained with noise; None means as many
            as the learner takes in testing.
        steps: steps of adapting; None means as many as in testing the weights.
        start: from where classes start: "rows", from the rows of the trained head in turn, which are interchangeable,
            as training gives labels at random; or "mean", all of them from the mean of the rows, so that the order of
            classes is of no importance. "auto" takes the rows for as many classes as in training, and for other
            numbers what the card of the weights says to be better.
        invert: for weights of drawings (ink = 1 on paper = 0): "auto" inverts each image whose edge is mostly light, as
            of dark ink on light paper; True inverts all, False none.
        threshold: `predict` says None, which means not sure, where the largest probability is below it; None never.
        seed: of the noise.

    Attributes:
        classes_: the labels, sorted.
        module_: the adapted classifier as an `nn.Module`, from images to logarithms of probabilities.
        weights_: the weights that it was adapted from.
        n_support_: how many examples of each class there were.
    """

    classes_: NDArray[Any]
    module_: AdaptedClassifier
    weights_: WeightSet
    n_support_: NDArray[np.int64]

    def __init__(
        self,
        weights: str | Path | WeightSet = DEFAULT_WEIGHTS,
        *,
        inductive: bool = True,
        mc_samples: int | None = 30,
        steps: int | None = None,
        start: Start = "auto",
        invert: Invert = "auto",
        threshold: float | None = None,
        seed: int = 0,
    ) -> None:
        self.weights = weights
        self.inductive = inductive
        self.mc_samples = mc_samples
        self.steps = steps
        self.start = start
        self.invert = invert
        self.threshold = threshold
        self.seed = seed

    # Learning and answering.

    def fit(self, images: Any, labels: Any) -> Self:
        """Adapt to examples, and return this classifier.

        Args:
            images: arrays, tensors, PIL images or paths, of any size, grey or colour. An array of three axes is
                (n, height, width), or one image (height, width, channels); one of four is (n, channels, height, width)
                or (n, height, width, channels).
            labels: one per image: numbers, texts or anything else that can be told apart.
        """
        weights = self.load()
        given = split_up(images)
        class_numbers(labels, len(given))  # before images are read, which takes longer
        return self.fit_prepared(weights, as_tensor(given, self.target(weights)), labels)

    def load(self) -> WeightSet:
        """Check the parameters, and return the weights that they name."""
        self._check()
        return self.weights if isinstance(self.weights, WeightSet) else load_weights(self.weights)

    def target(self, weights: WeightSet) -> Target:
        """Return what images are brought to for these weights."""
        return Target(weights.image_shape, weights.card.drawings, self.invert)

    def fit_prepared(self, weights: WeightSet, x: Tensor, labels: Any) -> Self:
        """Adapt weights to examples that have been brought to their shape, shape (n, channels, height, width)."""
        classes, numbers = class_numbers(labels, len(x))
        with on_one_thread():  # tasks are so small that more threads would wait for each other
            start = best_start(weights, len(classes)) if self.start == "auto" else self.start
            learner = prepared(weights.learner(), len(classes), steps=self.steps, start=start)
            self.module_ = AdaptedClassifier(
                learner,
                x,
                torch.from_numpy(numbers),
                inductive=self.inductive,
                mc_samples=self.mc_samples,
                generator=CounterNoise(mix_seed(self.seed)),
                temperature=weights.card.temperature("inductive" if self.inductive else "transductive"),
            )
        self.weights_, self.classes_ = weights, classes
        self.n_support_ = np.bincount(numbers, minlength=len(classes))
        return self

    def predict_proba(self, images: Any) -> NDArray[np.float64]:
        """Return the probability of each class, in the order of `classes_`, for each image: shape (n, classes)."""
        if not self.__sklearn_is_fitted__():
            raise not_fitted(self)
        given, target = split_up(images), self.target(self.weights_)
        # Images that are normalised together cannot be taken in parts.
        size = IMAGES_PER_PASS if self.module_.inductive else max(1, len(given))
        if size > MOST_TOGETHER:
            raise DataError(
                f"{size} images are too many to be normalised together; give at most {MOST_TOGETHER} in a call, or "
                "answer for each by itself: inductive=True"
            )
        parts = [given[first : first + size] for first in range(0, len(given), size)]
        found = [self.proba_of_prepared(as_tensor(part, target)) for part in parts]
        return np.concatenate([np.zeros((0, len(self.classes_))), *found])

    def proba_of_prepared(self, x: Tensor) -> NDArray[np.float64]:
        """Return the probabilities for images that have been brought to the shape of the weights, all at once."""
        with on_one_thread(), torch.no_grad():
            probabilities: NDArray[np.float64] = self.module_(x).double().exp().numpy()
        probabilities /= probabilities.sum(axis=1, keepdims=True)  # to more digits than float32 has
        return probabilities

    def predict_log_proba(self, images: Any) -> NDArray[np.float64]:
        """Return the logarithms of the probabilities."""
        return np.log(self.predict_proba(images))

    def predict(self, images: Any) -> NDArray[Any]:
        """Return the label of each image; None where its probability is below the threshold, if there is one."""
        return self.decide(self.predict_proba(images))

    def decide(self, probabilities: NDArray[np.float64]) -> NDArray[Any]:
        """Return the labels that `predict` gives where `predict_proba` has given these probabilities."""
        answers = self.classes_[probabilities.argmax(axis=1)] if len(probabilities) else self.classes_[:0]
        if self.threshold is None:
            return answers
        answers = answers.astype(object)
        answers[probabilities.max(axis=1, initial=0) < self.threshold] = None
        return answers

    def score(self, images: Any, labels: Any, sample_weight: Any = None) -> float:
        """Return the share of images whose label is predicted; one that it is not sure of counts as wrong."""
        answers = self.predict(images)
        labels = as_objects(labels)
        if len(labels) != len(answers):
            raise DataError(f"there are {len(answers)} images, but {len(labels)} labels")
        right = [bool(answer == label) for answer, label in zip(as_objects(answers), labels, strict=True)]
        return float(np.average(right, weights=sample_weight))

    def _check(self) -> None:
        """Refuse parameters that mean nothing; here, as scikit-learn wants constructors to accept anything."""
        if self.start not in ("auto", "mean", "rows"):
            raise ConfigError(f"start is {shortened(self.start)}; choose 'auto', 'mean' or 'rows'")
        if self.invert not in (True, False, "auto"):
            raise ConfigError(f"invert is {shortened(self.invert)}; choose True, False or 'auto'")
        if self.threshold is not None and not 0 <= self.threshold <= 1:
            raise ConfigError(f"threshold is {self.threshold}; a probability is between 0 and 1")
        for name, value, least in (
            ("mc_samples", self.mc_samples, 1),
            ("steps", self.steps, 0),
            ("seed", self.seed, 0),
        ):
            if value is not None and (not isinstance(value, int | np.integer) or value < least):
                raise ConfigError(f"{name} is {shortened(value)}; it has to be a whole number of at least {least}")

    # What scikit-learn asks of an estimator; by its own base class this would need scikit-learn.

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Return the parameters of the constructor by name."""
        return {name: getattr(self, name) for name in _parameters()}

    def set_params(self, **parameters: Any) -> Self:
        """Set parameters of the constructor; they count from the next `fit` on, the threshold at once."""
        for name, value in parameters.items():
            if name not in _parameters():
                raise ConfigError(f"FewShotClassifier has no parameter '{name}'; it has {', '.join(_parameters())}")
            setattr(self, name, value)
        return self

    def __repr__(self) -> str:
        changed = {
            name: value
            for name, value in self.get_params().items()
            if isinstance(value, WeightSet) or value != inspect.signature(type(self)).parameters[name].default
        }
        shown = (f"{k}={v.name if isinstance(v, WeightSet) else v!r}" for k, v in changed.items())
        return f"{type(self).__name__}({', '.join(shown)})"

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "module_")

    def __sklearn_tags__(self) -> Any:
        from sklearn.utils import ClassifierTags, InputTags, Tags, TargetTags  # noqa: PLC0415 - only it calls this

        return Tags(
            estimator_type="classifier",
            target_tags=TargetTags(required=True, one_d_labels=True),
            classifier_tags=ClassifierTags(),
            input_tags=InputTags(two_d_array=False, three_d_array=True),
        )


def best_start(weights: WeightSet, way: int) -> Literal["mean", "rows"]:
    """Return from where classes start best, where there are that many of them."""
    return "rows" if way == weights.card.way else weights.card.other_ways


def prepared(
    learner: Learner, way: int, *, steps: int | None = None, start: Literal["mean", "rows"] = "rows"
) -> Learner:
    """Return a learner for tasks with that many classes.

    Args:
        learner: a trained one; it may be changed.
        way: how many classes.
        steps: of adapting; None means its own choice.
        start: from where classes start: see `FewShotClassifier`.
    """
    if steps is not None:
        if not isinstance(learner, GradientLearner):
            raise ConfigError(f"{type(learner).__name__} takes no steps to adapt: leave steps out")
        learner.test_steps = int(steps)
    if not isinstance(learner, GradientLearner):
        return learner.for_way(way)
    same = learner.for_way(way)  # which refuses what cannot be, and is the learner itself for its own number of classes
    head = learner.network.get_submodule(learner.layers().head)
    trained = getattr(head, "weight", None)
    if not isinstance(trained, Tensor) or (same is learner and len(trained) != way):
        return same  # no head with a row for each class
    if start == "rows":
        return learner.with_head_rows(lambda rows: rows[torch.arange(way) % len(rows)].clone())
    return learner.with_head_rows(lambda rows: rows.mean(dim=0, keepdim=True).repeat(way, *[1] * (rows.dim() - 1)))


def class_numbers(labels: Any, images: int) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Return the distinct labels, sorted, and for each image the number of its label among them.

    Raises:
        DataError: if there are not as many labels as images, or fewer than two classes.
    """
    given = as_objects(labels)
    if len(given) != images:
        raise DataError(f"there are {images} images, but {len(given)} labels")
    if not given:
        raise DataError("there are no examples to learn from: give images of at least two classes")
    try:
        distinct = list(dict.fromkeys(given))
    except TypeError:
        raise DataError("labels have to be numbers, texts or other things that can be told apart (hashable)") from None
    if any(isinstance(label, float) and not math.isfinite(label) for label in distinct):
        raise DataError("a label is NaN or infinite; every example needs the label of its class")
    if len(distinct) < 2:
        raise DataError(
            f"all {images} examples are of one class, {shortened(distinct[0])}: a classifier needs at least two classes"
        )
    try:
        distinct = sorted(distinct)  # type: ignore[type-var]
    except TypeError:  # of different kinds
        distinct = sorted(distinct, key=lambda label: (type(label).__name__, repr(label)))
    places = {label: number for number, label in enumerate(distinct)}
    return _as_labels(distinct, labels), np.asarray([places[label] for label in given], dtype=np.int64)


def as_objects(labels: Any) -> list[Hashable]:
    """Return labels as plain Python objects, whatever they come in."""
    if isinstance(labels, Tensor | np.ndarray) or hasattr(labels, "__array__"):
        array = np.asarray(labels)
        if array.ndim == 2 and array.shape[1] == 1:
            array = array[:, 0]
        if array.ndim != 1:
            raise DataError(f"labels have shape {array.shape}; there has to be one for each image, shape (n,)")
        return array.tolist()  # type: ignore[no-any-return]
    if isinstance(labels, str) or not isinstance(labels, Sequence):
        raise DataError(f"labels are a {type(labels).__name__}; give a list or an array with one for each image")
    return [label.item() if isinstance(label, np.generic | Tensor) else label for label in labels]


def _as_labels(distinct: list[Any], given: Any) -> NDArray[Any]:
    """Return labels as an array of the kind in which they were given, or else of objects."""
    if isinstance(given, np.ndarray) and given.dtype.kind != "O":
        return np.asarray(distinct, dtype=given.dtype)
    kinds = {type(label) for label in distinct}
    if len(kinds) == 1 and kinds <= {int, float, bool, str}:
        return np.asarray(distinct)
    array = np.empty(len(distinct), dtype=object)
    array[:] = distinct
    return array


def not_fitted(estimator: object) -> Exception:
    """Return the error that says that `fit` has to come first: scikit-learn's, where it is installed."""
    message = f"this {type(estimator).__name__} has learned no classes yet: call fit(images, labels) first"
    try:
        from sklearn.exceptions import NotFittedError  # noqa: PLC0415 - an extra
    except ImportError:
        return MetadropoutError(message)
    return NotFittedError(message)  # type: ignore[no-any-return]


def _parameters() -> list[str]:
    return list(inspect.signature(FewShotClassifier).parameters)
