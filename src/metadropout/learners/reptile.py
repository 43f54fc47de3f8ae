"""Reptile: initial weights move towards weights that fit a task; there are no query images."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from metadropout.data import Episode
from metadropout.learners.base import Classifier, TaskGradient, accuracy, with_class_numbers
from metadropout.learners.gradient import STATE, GradientLearner
from metadropout.networks.functional import cancelled_biases, trainable_names
from metadropout.networks.layers import module_key
from metadropout.noise import NoiseSource
from metadropout.options import Limits, Steps
from metadropout.perturbations import Perturbation
from metadropout.perturbations.base import Weights

BatchSize = Annotated[int, Limits(1, 100_000)]


class Reptile(GradientLearner):
    """Trains on mini-batches of a task and moves the initial weights towards where that leads (Nichol et al., 2018).

    Adapted and meta-learned: all of the network's parameters, normalisation's included, but not biases that a
    normalisation takes away again: their gradient is rounding noise, which Adam would blow up. The outer step is
    θ ← θ + ε (mean W - θ), that is `training.optimizer sgd` at rate ε along "gradients" θ - W. The inner Adam has no
    momentum; its second moments and step count go on from task to task, as in the authors' code, and testing starts
    from those of training. Query images only show how training goes. In the inductive protocol each is normalised in
    one batch with the support images.

    Args:
        network: maps images to logits; any module.
        perturbation: what perturbs it on support images; nothing by default, and nothing that is trained.
        inner_lr: step size of the inner optimiser.
        steps: number of inner steps, each on a mini-batch.
        test_steps: number of inner steps in testing.
        batch: images in a mini-batch; they come from passes over all images, each in a random order.
        test_batch: images in a mini-batch in testing; as many as in training by default.
        optimizer: of the inner steps.
        first_order: always.
    """

    title = "Reptile"
    citation = "Nichol et al., 2018"
    is_random = True
    tasks_in_order = True
    beta2 = 0.999

    def __init__(
        self,
        network: nn.Module,
        perturbation: Perturbation | None = None,
        *,
        inner_lr: Annotated[float, Limits(0, 1000)] = 1e-3,
        steps: Steps = 10,
        test_steps: Steps | None = 50,
        batch: BatchSize = 10,
        test_batch: BatchSize | None = None,
        optimizer: Literal["adam", "sgd"] = "adam",
        first_order: Literal[True] = True,
        **options: Any,
    ) -> None:
        if perturbation is not None and any(p.requires_grad for p in perturbation.parameters()):
            raise ValueError(
                f"Reptile cannot train {type(perturbation).__name__}: there is no query loss and no derivative of the "
                "inner steps to train it by, and as inner weights its own would learn to fit support images. Use noise "
                "that is not trained, or freeze it: perturbation.requires_grad_(False)"
            )
        options |= {"inner_lr": inner_lr, "steps": steps, "test_steps": test_steps, "first_order": first_order}
        super().__init__(network, perturbation, **options)
        self.batch, self.test_batch, self.optimizer = batch, test_batch or batch, optimizer
        self.moments = {name: f"moments/{module_key(name)}" for name in self.adapted_names}
        for name, tensor in self.adapted_tensors().items():
            self.register_buffer(self.moments[name], torch.zeros_like(tensor))
        self.register_buffer("decay", torch.ones(()))  # β2 to the power of the number of steps so far

    def adapted_by_default(self) -> list[str]:
        cancelled = [bias for bias, at in cancelled_biases(self.network).items() if at not in self.perturbation.sites]
        return [name for name in trainable_names(self.network) if name not in cancelled]

    def samples_used(self, asked: int | None = None) -> int:
        return super().samples_used(asked) if self.perturbation.traits.random else 1

    def changed_buffers(self) -> Sequence[str]:
        return (*self.moments.values(), "decay")

    def next_buffer(self, name: str, values: Tensor) -> Tensor:
        return values[-1]  # each task goes on from the one before

    def initial_weights(self) -> Weights:
        return super().initial_weights() | {name: self.get_buffer(name) for name in self.changed_buffers()}

    def inner_init(self, weights: Weights, noise: NoiseSource | None) -> Weights:
        return {name: weights[name] for name in self.changed_buffers()}

    def inner_step(
        self, weights: Weights, gradients: Weights, *, loss: Tensor, state: Weights, step: int
    ) -> tuple[Weights, Weights]:
        if self.optimizer == "sgd":
            return {name: weights[name] - self.inner_lr * g for name, g in gradients.items()}, state
        after = {"decay": self.beta2 * state["decay"]}
        rate = self.inner_lr * (1 - after["decay"]).sqrt()
        gradients = {name: self.batch * g for name, g in gradients.items()}  # theirs is of the sum: 1e-8 is for that
        for name, g in gradients.items():
            after[self.moments[name]] = self.beta2 * state[self.moments[name]] + (1 - self.beta2) * g.square()
        roots = {name: after[self.moments[name]].sqrt() + 1e-8 for name in gradients}  # as TensorFlow writes Adam
        return {name: weights[name] - rate * g / roots[name] for name, g in gradients.items()}, after

    def support_loss(
        self, weights: Weights, x: Tensor, y: Tensor, *, noise: NoiseSource | None, step: int, samples: range
    ) -> Tensor:
        assert noise is not None
        n, places = len(x), np.arange(step * self.batch, (step + 1) * self.batch)
        orders = {p: noise.fork().stream(int(p), 0).numbers().permutation(n) for p in np.unique(places // n)}
        chosen = torch.tensor([int(orders[place // n][place % n]) for place in places], device=x.device)
        return super().support_loss(weights, x[chosen], y[chosen], noise=noise, step=step, samples=samples)

    def task_gradient(
        self, episode: Episode, *, generator: torch.Generator | NoiseSource | None = None
    ) -> TaskGradient:
        return self.task_gradients([episode], [generator])[0]

    def task_gradients(
        self, episodes: Sequence[Episode], generators: Sequence[torch.Generator | NoiseSource | None]
    ) -> list[TaskGradient]:
        results: list[TaskGradient] = []
        for episode, generator in zip(map(with_class_numbers, episodes), generators, strict=True):
            noise = self.noise_from(generator)
            start = self.initial_weights() | (results[-1].buffers if results else {})
            x, y = episode.support_x, episode.support_y
            weights = self.inner_steps(start, x, y, noise, self.train_samples, differentiable=False)
            with torch.no_grad():
                loss, logits = self.query_loss(weights, episode, noise)
                moved = {name: p - weights[name] for name, p in self.named_parameters() if p.requires_grad}
            buffers = {name: weights[STATE + name] for name in self.changed_buffers()}
            results.append(TaskGradient(moved, loss, accuracy(logits, episode.query_y), buffers))
        return results

    def test_steps_from(
        self, weights: Weights, x: Tensor, y: Tensor, samples: int, noise: NoiseSource | None
    ) -> Weights:
        tester = copy.copy(self)  # shares all tensors
        tester.batch = self.test_batch
        return super(Reptile, tester).test_steps_from(weights, x, y, samples, noise)

    def classifier(self, weights: Weights, support_x: Tensor, *, inductive: bool) -> Classifier:
        if inductive:
            return self.perturbed.joint_classifier(weights, support_x, self.images_per_pass)
        return super().classifier(weights, support_x, inductive=False)
