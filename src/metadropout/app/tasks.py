"""Tasks that visitors bring, models adapted to them, and how much of both is kept."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from metadropout.app.problems import RequestError
from metadropout.app.worker import Ticket
from metadropout.classify.estimator import FewShotClassifier, prepared
from metadropout.classify.module import AdaptedClassifier
from metadropout.data import ImageShape
from metadropout.learners import GradientLearner, Learner
from metadropout.noise import CounterNoise, NoiseStream, mix_seed
from metadropout.weights import WeightSet

T = TypeVar("T")

TASK_BYTES = 64 * 2**20
MODEL_BYTES = 256 * 2**20
"""How much is kept of tasks and of adapted models."""


@dataclass(frozen=True)
class Task:
    """Support images of several classes."""

    classes: tuple[tuple[bytes, ...], ...]
    """Of each class its images, as bytes in the shape of the weights."""
    shape: ImageShape

    @cached_property
    def name(self) -> str:
        """What the task is called: a digest of all that is in it."""
        digest = hashlib.sha256(repr((tuple(self.shape), [len(images) for images in self.classes])).encode())
        for images in self.classes:
            for image in images:
                digest.update(image)
        return digest.hexdigest()

    @property
    def images(self) -> int:
        """How many there are in all classes together."""
        return sum(map(len, self.classes))

    def tensors(self, classes: Sequence[int] | None = None) -> tuple[Tensor, Tensor]:
        """Return the images, shape (n, channels, height, width), and their class numbers, shape (n,).

        Args:
            classes: which classes, numbered from 0 in this order; all by default.
        """
        chosen = self.classes if classes is None else [self.classes[number] for number in classes]
        x = as_images([image for images in chosen for image in images], self.shape)
        y = [number for number, images in enumerate(chosen) for _ in images]
        return x, torch.tensor(y)


def as_images(images: Sequence[bytes], shape: ImageShape) -> Tensor:
    """Return images of given bytes as floats in [0, 1], shape (n, channels, height, width)."""
    array = np.frombuffer(b"".join(images), dtype=np.uint8).reshape(len(images), *shape)
    return torch.from_numpy(array.astype(np.float32)).mul_(1 / 255)


class Kept(Generic[T]):
    """The things used last, as many as fit into some memory.

    Args:
        limit: of the memory, in bytes; the newest thing is kept even if it is larger.
        size: of a thing, in bytes.
    """

    def __init__(self, limit: int, size: Callable[[T], int]) -> None:
        self._limit, self._size = limit, size
        self._things: OrderedDict[object, T] = OrderedDict()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._things)

    def get(self, key: object) -> T | None:
        """Return a thing, None where it is not kept."""
        if (thing := self._things.get(key)) is not None:
            self._things.move_to_end(key)
        return thing

    def put(self, key: object, thing: T) -> None:
        """Keep a thing, and forget those that have not been used for longest."""
        if (before := self._things.pop(key, None)) is not None:
            self.bytes -= self._size(before)
        self._things[key] = thing
        self.bytes += self._size(thing)
        while self.bytes > self._limit and len(self._things) > 1:
            _, oldest = self._things.popitem(last=False)
            self.bytes -= self._size(oldest)


class Model:
    """A set of weights that the page offers."""

    def __init__(self, weights: WeightSet) -> None:
        self.weights = weights
        self.learner = weights.learner()

    @property
    def adapts_by_steps(self) -> bool:
        """Whether there are inner steps, so that their number can be chosen and the model be looked into."""
        return isinstance(self.learner, GradientLearner)

    @property
    def draws_noise(self) -> bool:
        """Whether noise samples mean anything to it."""
        return self.learner.samples_used(2) > 1

    @property
    def steps(self) -> int:
        """How many steps of adapting it was tested with."""
        if not isinstance(self.learner, GradientLearner):
            return 0
        return self.learner.steps if self.learner.test_steps is None else self.learner.test_steps

    def with_steps(self, steps: int) -> GradientLearner:
        """Return the trained learner with another number of steps, for looking into it."""
        learner = self.weights.learner()
        if not isinstance(learner, GradientLearner):
            raise RequestError(400, "method", f"{self.weights.name} takes no inner steps, so there is nothing to see")
        learner.steps, learner.test_steps = steps, None
        return learner


class Tasks:
    """Adapts models to tasks, each only once while it is kept. Used by one thread at a time."""

    def __init__(self) -> None:
        self._tasks: Kept[Task] = Kept(TASK_BYTES, lambda task: sum(len(i) for c in task.classes for i in c) + 1000)
        self._models: Kept[AdaptedClassifier] = Kept(MODEL_BYTES, _bytes)

    def keep(self, task: Task) -> None:
        """Remember a task, so that requests can name it."""
        self._tasks.put(task.name, task)

    def task(self, name: str) -> Task:
        """Return a task that was brought before."""
        if (task := self._tasks.get(name)) is None:
            raise RequestError(410, "forgotten", "these examples are not kept any more: send them again")
        return task

    def adapted(
        self, model: Model, task: Task, *, samples: int, steps: int | None, ticket: Ticket
    ) -> tuple[AdaptedClassifier, bool]:
        """Return a model adapted to a task, as `FewShotClassifier` does it, and whether that was done before.

        Args:
            model: the weights.
            task: the examples.
            samples: noise samples per step.
            steps: of adapting; None means as many as in testing.
            ticket: of the request; it is asked between steps whether anybody still waits.
        """
        key = (model.weights.name, task.name, model.learner.samples_used(samples), steps)
        if (known := self._models.get(key)) is not None:
            return known, True
        usual = FewShotClassifier(model.weights)
        x, y = task.tensors()
        classifier = AdaptedClassifier(
            _for_task(model.weights.learner(), len(task.classes), steps),
            x,
            y,
            mc_samples=samples,
            generator=_Interruptible(mix_seed(usual.seed), ticket),
            temperature=model.weights.card.temperature("inductive"),
        )
        self._models.put(key, classifier)
        return classifier, False


def _for_task(learner: Learner, way: int, steps: int | None) -> Learner:
    return prepared(learner, way, steps=steps if isinstance(learner, GradientLearner) else None)


def _bytes(model: AdaptedClassifier) -> int:
    """Return how much memory an adapted model takes: its own weights and those of the learner that it keeps."""
    learner = model._learner[0]
    tensors = (*model.buffers(), *learner.parameters(), *learner.buffers())
    return sum(tensor.nbytes for tensor in tensors)


class _Interruptible(CounterNoise):
    """Noise that ends the computation when nobody waits for it any more."""

    def __init__(self, seed: int, ticket: Ticket) -> None:
        super().__init__(seed)
        self._ticket = ticket

    def stream(self, step: int, sample: int) -> NoiseStream:  # type: ignore[override]
        self._ticket.check()
        return super().stream(step, sample)
