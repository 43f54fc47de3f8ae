"""Tasks that visitors bring, models adapted to them, and how much of both is kept."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from metadropout.app.problems import RequestError
from metadropout.app.worker import Ticket
from metadropout.classify.estimator import best_start, prepared
from metadropout.classify.module import AdaptedClassifier
from metadropout.data import ImageShape
from metadropout.learners import GradientLearner
from metadropout.noise import CounterNoise, NoiseStream, mix_seed
from metadropout.weights import WeightSet

T = TypeVar("T")

TASK_BYTES = 64 * 2**20
MODEL_BYTES = 128 * 2**20
"""How much is kept of tasks and of adapted models."""
SEED = 0
"""Of the noise, as `FewShotClassifier` has it: the same examples give the same answers."""


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
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._things: OrderedDict[object, tuple[T, int]] = OrderedDict()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._things)

    def get(self, key: object) -> T | None:
        """Return a thing, None where it is not kept."""
        if key not in self._things:
            return None
        self._things.move_to_end(key)
        return self._things[key][0]

    def put(self, key: object, thing: T, size: int) -> None:
        """Keep a thing of a size in bytes, and forget those that have not been used for longest."""
        if key in self._things:
            self.bytes -= self._things.pop(key)[1]
        self._things[key] = thing, size
        self.bytes += size
        while self.bytes > self._limit and len(self._things) > 1:
            _, (_, freed) = self._things.popitem(last=False)
            self.bytes -= freed


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
    """Adapts models to tasks, each only once while it is kept.

    Tasks are brought by one thread and adapted to by another.
    """

    def __init__(self) -> None:
        self._tasks: Kept[Task] = Kept(TASK_BYTES)
        self._models: Kept[AdaptedClassifier] = Kept(MODEL_BYTES)
        self._lock = threading.Lock()

    @property
    def bytes(self) -> int:
        """How much memory it keeps."""
        return self._tasks.bytes + self._models.bytes

    def keep(self, task: Task) -> None:
        """Remember a task, so that requests can name it."""
        with self._lock:
            self._tasks.put(task.name, task, 2000 + sum(len(image) for images in task.classes for image in images))

    def task(self, name: str) -> Task:
        """Return a task that was brought before."""
        with self._lock:
            task = self._tasks.get(name)
        if task is None:
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
        x, y = task.tensors()
        chosen = steps if model.adapts_by_steps else None
        way = len(task.classes)
        # Drawn classes start alike, so that no step of adapting shows no answer; for photos that costs accuracy.
        start = "mean" if model.weights.card.drawings else best_start(model.weights, way)
        learner = prepared(model.weights.learner(), way, steps=chosen, start=start)
        classifier = AdaptedClassifier(
            learner,
            x,
            y,
            mc_samples=samples,
            generator=_Interruptible(mix_seed(SEED), ticket),
            temperature=model.weights.card.temperature("inductive"),
        )
        tensors = (*classifier.buffers(), *learner.parameters(), *learner.buffers())  # it keeps the learner's, too
        self._models.put(key, classifier, sum(tensor.nbytes for tensor in tensors))
        return classifier, False


class _Interruptible(CounterNoise):
    """Noise that ends the computation when nobody waits for it any more."""

    def __init__(self, seed: int, ticket: Ticket) -> None:
        super().__init__(seed)
        self._ticket = ticket

    def stream(self, step: int, sample: int) -> NoiseStream:  # type: ignore[override]
        self._ticket.check()
        return super().stream(step, sample)
