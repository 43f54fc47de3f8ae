"""Learners that adapt by gradient steps on the support loss: the inner loop that all of them share.

The path of one task, top to bottom: `forward` → `learn` → `inner_steps` → `_step` → `support_gradient` → `support_loss`
(a support pass with noise) → `inner_step` → `query_loss` → `classifier` (the query pass, deterministic) → loss.

All tensors of a task are in one dictionary, `Weights`: the learner's parameters, tensors that each task starts afresh,
and the state of the inner optimiser. So gradient checkpointing and batches of tasks treat all of them alike.

The same path runs for several tasks at once (`batched.py`): all tensors then have a leading task axis, and whatever is
said here of one task is lifted over that axis by `over_tasks`.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Annotated

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from metadropout.data import Episode
from metadropout.learners.any_way import with_head_rows, with_way
from metadropout.learners.base import (
    TEST_SAMPLES,
    Classifier,
    Learner,
    Outcome,
    TaskGradient,
    averaged,
    check_samples,
    class_numbers,
    task_noise,
    with_class_numbers,
)
from metadropout.learners.batched import OverTasks, can_be_stacked, one_task, stacked_task_gradients
from metadropout.learners.checkpointing import recomputed
from metadropout.networks.functional import weight_names
from metadropout.networks.layers import PerturbableLayers, find_layers
from metadropout.noise import NoiseSource
from metadropout.ops.precision import Precision
from metadropout.options import Limits, Samples, Share, Steps
from metadropout.perturbations import NoPerturbation, Perturbation, PerturbedNetwork
from metadropout.perturbations.base import Weights
from metadropout.perturbations.layers import LayerPerturbation
from metadropout.perturbations.perturbed_network import labels_explained

STATE = "state."
"""How the names of the inner optimiser's state begin."""


class GradientLearner(Learner):
    """Adapts the network's weights θ by gradient steps on perturbed support images.

    Normalisation parameters are meta-learned but not adapted, and neither are the perturbation's unless it says so.

    Args:
        network: maps images to logits; any module.
        perturbation: what perturbs it on support images; nothing by default.
        inner_lr: step size of the inner steps.
        steps: number of inner steps.
        test_steps: number of inner steps in testing; as many as in training by default.
        train_samples: noise samples per inner step in meta-training, where there is noise.
        first_order: leave the derivative of the inner gradients out: faster, less exact.
        norm_second_order: false treats the gradients that come back through batch normalisations as constants when
            inner gradients are differentiated: no part of the method, but what the authors' program does in effect.
            A share between 0 and 1 keeps that much of their derivative.
        adapted: names of the network's parameters that the inner steps change; the learner's choice by default.
            Buffers can be named, too: each task starts with their values, which are not meta-learned.
        images_per_pass: most images in one support pass; more Monte-Carlo samples than fit are run in turn.
        precision: "bf16" rounds what convolutions multiply to bfloat16, and on CPUs with AVX512-BF16 also stores images
            so between layers; statistics, sums, losses, inner steps and weights stay in float32.
        gradient_checkpointing: keep no graph of inner steps but take each again in the backward pass: the same
            gradients in much less memory, for about a third more time.
    """

    is_random: bool = False
    """Whether it draws numbers itself, beside the perturbation's."""

    def __init__(
        self,
        network: nn.Module,
        perturbation: Perturbation | None = None,
        *,
        inner_lr: Annotated[float, Limits(0, 1000)] = 0.1,
        steps: Steps = 5,
        test_steps: Steps | None = None,
        train_samples: Samples = 1,
        first_order: bool = False,
        norm_second_order: bool | Share = True,
        adapted: Sequence[str] | None = None,
        images_per_pass: Annotated[int, Limits(1, 1_000_000)] = 256,
        precision: Precision = "full",
        gradient_checkpointing: bool = False,
    ) -> None:
        super().__init__()
        self.network = network
        self.perturbation = perturbation or NoPerturbation(network)
        trained = any(p.requires_grad for p in self.perturbation.parameters())
        if first_order and trained and self.perturbation.traits.needs_second_order:
            raise ValueError(
                f"first_order cannot be used with {type(self.perturbation).__name__}: "
                f"{self.perturbation.traits.needs_second_order}"
            )
        has_state = type(self).inner_init is not GradientLearner.inner_init
        if first_order and gradient_checkpointing and not has_state:
            raise ValueError("gradient_checkpointing has no effect with first_order, which keeps no graph of the steps")
        if min(steps, test_steps or 0) < 0 or images_per_pass < 1 or math.isnan(inner_lr):
            raise ValueError(
                f"steps ({steps}) and test_steps ({test_steps}) must be at least 0, images_per_pass "
                f"({images_per_pass}) at least 1, and inner_lr ({inner_lr}) a number"
            )
        self.inner_lr, self.steps, self.test_steps = inner_lr, steps, test_steps
        self.train_samples = check_samples(train_samples)
        self.first_order, self.images_per_pass = first_order, images_per_pass
        self.precision: Precision = precision
        self.gradient_checkpointing = gradient_checkpointing
        self.perturbed = PerturbedNetwork(
            network,
            self.perturbation,
            precision=precision,
            norm_second_order=norm_second_order,
            compose=self.network_weights,
        )
        self.adapted_names = self._names_to_adapt(adapted)
        if not self.adapted_names:
            raise ValueError("there is nothing to adapt: no parameter is listed, or all are frozen")
        self.add_meta_parameters()

    def add_meta_parameters(self) -> None:
        """Make the learner's own meta-learned parameters; called last in the constructor, does nothing by default."""

    # What a learner says of its weights: which are adapted, and what the network runs with.

    def adapted_by_default(self) -> Sequence[str]:
        """Return which of the network's parameters are adapted where nobody names them: all but normalisation's."""
        return weight_names(self.network)

    def network_weights(self, theta: Weights, weights: Mapping[str, Tensor]) -> Weights:
        """Return what the network runs with in every pass; by default its own weights, as adapted.

        Args:
            theta: the network's weights by name.
            weights: all tensors of the task, the learner's meta-parameters among them.
        """
        return theta

    # What a learner says of its inner optimiser: two functions of tensors, and a state that is a dictionary of them.

    def inner_init(self, weights: Weights, noise: NoiseSource | None) -> Weights:
        """Return the inner optimiser's state at the start of a task, by names of its choice; by default none.

        Args:
            weights: all tensors of the task before the first step.
            noise: for draws that belong to the task and not to a pass: `noise.fork()`.
        """
        return {}

    @abstractmethod
    def inner_step(
        self, weights: Weights, gradients: Weights, *, loss: Tensor, state: Weights, step: int
    ) -> tuple[Weights, Weights]:
        """Return the adapted weights and the state after one inner step.

        Args:
            weights: all tensors of the task before the step; to be used in place of the learner's attributes, because
                a learner may hold several values of each.
            gradients: the support loss's gradients at the adapted weights, by name.
            loss: the support loss there.
            state: the inner optimiser's state.
            step: number of the step, from 0.
        """

    # The path of a task.

    def forward(self, episode: Episode, *, generator: torch.Generator | NoiseSource | None = None) -> Outcome:
        return self.learn(self.initial_weights(), with_class_numbers(episode), self.noise_from(generator))

    def learn(
        self, weights: Weights, episode: Episode, noise: NoiseSource | None, over_tasks: OverTasks = one_task
    ) -> Outcome:
        """Return how the task goes from the given weights, differentiable in all of them.

        Args:
            weights: all parameters of the learner, and what each task starts afresh.
            episode: the task; of several tasks, each tensor stacked.
            noise: source of all randomness.
            over_tasks: turns a function of one task into one of as many tasks as are stacked.
        """
        x, y = episode.support_x, episode.support_y
        samples = 1 if noise is None else self.train_samples
        weights = self.inner_steps(weights, x, y, noise, samples, differentiable=True, over_tasks=over_tasks)
        return self.judge(weights, episode, noise, over_tasks)

    def judge(
        self, weights: Weights, episode: Episode, noise: NoiseSource | None, over_tasks: OverTasks = one_task
    ) -> Outcome:
        """Return how well the model of given weights does on query images; arguments as for `learn`."""

        def loss_of(weights: Weights, *tensors: Tensor) -> tuple[Tensor, Tensor]:
            return self.query_loss(weights, Episode(*tensors, inductive=episode.inductive), noise)

        return Outcome(*over_tasks(loss_of)(weights, *episode.tensors()))

    def task_gradients(
        self, episodes: Sequence[Episode], generators: Sequence[torch.Generator | NoiseSource | None]
    ) -> list[TaskGradient]:
        """Run all tasks as one, side by side, where they and the perturbation allow it, and one by one otherwise."""
        if not (self.perturbation.traits.tasks_share_a_batch and can_be_stacked(episodes)):
            return super().task_gradients(episodes, generators)
        episodes = [with_class_numbers(episode) for episode in episodes]
        return stacked_task_gradients(self, episodes, [self.noise_from(generator) for generator in generators])

    def adapt(
        self,
        x: Tensor,
        y: Tensor,
        *,
        inductive: bool = False,
        mc_samples: int | None = None,
        generator: torch.Generator | NoiseSource | None = None,
    ) -> Classifier:
        with torch.inference_mode(False):
            x, y = (t.clone() if t.is_inference() else t for t in (x, y))
            y = class_numbers(y, x)
            models = self.adapted_models(x, y, self.samples_used(mc_samples), self.noise_from(generator))
            return averaged([self.classifier(weights, x, inductive=inductive) for weights in models])

    def adapted_weights(
        self,
        x: Tensor,
        y: Tensor,
        *,
        mc_samples: int | None = None,
        generator: torch.Generator | NoiseSource | None = None,
    ) -> Weights:
        """Return all parameters after the inner steps, without a graph; arguments as for `adapt`."""
        samples, noise = self.samples_used(mc_samples), self.noise_from(generator)
        y = class_numbers(y, x)
        return self.test_steps_from(self.test_start(x, y, samples, noise), x, y, samples, noise)

    def adapted_models(self, x: Tensor, y: Tensor, samples: int, noise: NoiseSource | None) -> list[Weights]:
        """Return the adapted weights whose probabilities testing averages; by default one set of them."""
        return [self.adapted_weights(x, y, mc_samples=samples, generator=noise)]

    def test_start(self, x: Tensor, y: Tensor, samples: int, noise: NoiseSource | None) -> Weights:
        """Return what the inner steps of testing start from, as copies: training may go on beside an adapted model."""
        return {name: p.detach().clone() for name, p in self.initial_weights().items()}

    def test_steps_from(
        self, weights: Weights, x: Tensor, y: Tensor, samples: int, noise: NoiseSource | None
    ) -> Weights:
        """Take the inner steps of testing."""
        return self.inner_steps(weights, x, y, noise, samples, differentiable=False, steps=self.test_steps)

    def for_way(self, way: int) -> GradientLearner:
        return with_way(self, way)

    def with_head_rows(self, change: Callable[[Tensor], Tensor]) -> GradientLearner:
        """Return a copy whose head has other rows.

        Args:
            change: what becomes of each tensor that has a row per class.
        """
        return with_head_rows(self, change)

    def layers(self) -> PerturbableLayers:
        """Return the hidden layers and the head of its network, as its perturbation sees them."""
        for part in self.perturbation.modules():
            if isinstance(part, LayerPerturbation):
                return PerturbableLayers(tuple(part.hidden_names), part.head_name)
        return find_layers(self.network)

    def samples_used(self, asked: int | None = None) -> int:
        asked = check_samples(TEST_SAMPLES if asked is None else asked)
        return asked if self.perturbation.traits.random or self.is_random else 1

    def initial_weights(self) -> Weights:
        """Return what a task starts from: all parameters, and the buffers that it adapts."""
        return dict(self.named_parameters()) | {
            name: buffer.detach().clone().requires_grad_()
            for name, buffer in self.named_buffers()
            if name in self.adapted_names
        }

    def adapted_tensors(self) -> Weights:
        """Return the values from which the adapted weights start, by name."""
        values = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        return {name: values[name] for name in self.adapted_names}

    def inner_steps(
        self,
        weights: Weights,
        x: Tensor,
        y: Tensor,
        noise: NoiseSource | None,
        mc_samples: int,
        differentiable: bool,
        over_tasks: OverTasks = one_task,
        steps: int | None = None,
    ) -> Weights:
        """Take all inner steps and return all weights after them; arguments as for `inner_path`."""
        for after in self.inner_path(weights, x, y, noise, mc_samples, differentiable, over_tasks, steps):
            weights = after
        return weights if differentiable else {name: w.detach() for name, w in weights.items()}

    def inner_path(
        self,
        weights: Weights,
        x: Tensor,
        y: Tensor,
        noise: NoiseSource | None,
        mc_samples: int,
        differentiable: bool,
        over_tasks: OverTasks = one_task,
        steps: int | None = None,
    ) -> Iterator[Weights]:
        """Yield all weights before the first inner step and after each.

        Args:
            weights: all tensors of the task.
            x: support images.
            y: their labels.
            noise: source of all randomness.
            mc_samples: noise samples in each step.
            differentiable: whether the result is to depend on the weights at the start.
            over_tasks: turns a function of one task into one of several.
            steps: how many; by default as many as in training.
        """
        if type(self).inner_init is not GradientLearner.inner_init:
            state = over_tasks(partial(self.inner_init, noise=noise))(weights)
            weights = weights | {STATE + name: tensor for name, tensor in state.items()}
        yield weights
        for number in range(self.steps if steps is None else steps):
            step = partial(self._step, x=x, y=y, step=number, noise=noise, mc_samples=mc_samples, over_tasks=over_tasks)
            if not differentiable:
                weights = weights | {name: weights[name].detach().requires_grad_() for name in self.adapted_names}
            if differentiable and self.gradient_checkpointing:
                changed = [*self.adapted_names, *(name for name in weights if name.startswith(STATE))]
                weights = weights | recomputed(step, weights, self.adapted_names, changed)
            else:
                weights = weights | step(weights, differentiable=differentiable)
            yield weights

    def _step(
        self,
        weights: Weights,
        *,
        x: Tensor,
        y: Tensor,
        step: int,
        noise: NoiseSource | None,
        mc_samples: int,
        differentiable: bool,
        over_tasks: OverTasks,
    ) -> Weights:
        """Return the adapted weights and the state after one inner step."""

        def updated(weights: Weights, gradients: Weights, loss: Tensor) -> Weights:
            state = {name.removeprefix(STATE): w for name, w in weights.items() if name.startswith(STATE)}
            adapted, state = self.inner_step(weights, gradients, loss=loss, state=state, step=step)
            return adapted | {STATE + name: tensor for name, tensor in state.items()}

        with torch.enable_grad():
            loss, gradients = self.support_gradient(
                weights, x, y, step, noise, mc_samples, differentiable=differentiable, over_tasks=over_tasks
            )
            return over_tasks(updated)(weights, gradients, loss)  # type: ignore[no-any-return]

    def support_gradient(
        self,
        weights: Weights,
        x: Tensor,
        y: Tensor,
        step: int,
        noise: NoiseSource | None,
        mc_samples: int,
        *,
        differentiable: bool,
        over_tasks: OverTasks = one_task,
    ) -> tuple[Tensor, Weights]:
        """Return the support loss and its gradient, averaged over images and Monte-Carlo samples."""
        x = over_tasks(self.perturbed.change_images)(weights, x, y)
        adapted = [weights[name] for name in self.adapted_names]
        losses: list[Tensor] = []
        total: list[Tensor] | None = None
        per_pass = max(1, self.images_per_pass // len(x)) if self.samples_share_a_pass else 1
        for first in range(0, mc_samples, per_pass):
            samples = range(first, min(first + per_pass, mc_samples))
            share = len(samples) / mc_samples
            loss = over_tasks(partial(self.support_loss, noise=noise, step=step, samples=samples))(weights, x, y)
            # Tasks do not depend on each other, so the gradient of the sum holds that of each.
            part = torch.autograd.grad(
                loss.sum() * share,
                adapted,
                create_graph=differentiable and not self.first_order,
                materialize_grads=True,
            )
            total = list(part) if total is None else [a + b for a, b in zip(total, part, strict=True)]
            losses.append(loss * share)
        assert total is not None
        return sum(losses[1:], losses[0]), dict(zip(self.adapted_names, total, strict=True))

    @property
    def samples_share_a_pass(self) -> bool:
        """Whether the noise samples of a step may stand in one batch."""
        return self.perturbation.traits.samples_share_a_batch

    def support_loss(
        self, weights: Weights, x: Tensor, y: Tensor, *, noise: NoiseSource | None, step: int, samples: range
    ) -> Tensor:
        """Return the loss of a support pass, averaged over images and noise samples.

        Args:
            weights: all tensors of the task.
            x: support images.
            y: their labels.
            noise: source of all randomness.
            step: number of the inner step.
            samples: numbers of the noise samples that share the pass.
        """
        draws = noise is not None and self.perturbation.traits.random
        streams = [noise.stream(step, sample) for sample in samples] if draws else []  # type: ignore[union-attr]
        return self.perturbed.support_loss(weights, x, y, streams)

    def query_loss(self, weights: Weights, episode: Episode, noise: NoiseSource | None) -> tuple[Tensor, Tensor]:
        """Return the adapted model's loss on query images, to be meta-learned from, and its logits."""
        logits = self.classifier(weights, episode.support_x, inductive=episode.inductive)(episode.query_x)
        with labels_explained(episode.query_y, logits):
            return cross_entropy(logits, episode.query_y), logits

    def classifier(self, weights: Weights, support_x: Tensor, *, inductive: bool) -> Classifier:
        """Return the adapted model as a function of images."""
        return self.perturbed.classifier(weights, support_x, inductive=inductive)

    def noise_from(self, generator: torch.Generator | NoiseSource | None) -> NoiseSource | None:
        """Return the source of a task's randomness; None where nothing is drawn."""
        drawer = self.perturbation if self.perturbation.traits.random else self
        return task_noise(generator, drawer) if self.perturbation.traits.random or self.is_random else None

    def explain_failure(self, episode: Episode, *, generator: torch.Generator | NoiseSource | None = None) -> str:
        """Take the inner steps again, one by one, until something is not finite."""
        noise = self.noise_from(generator)
        weights = {name: p.detach() for name, p in self.initial_weights().items()}
        for name, weight in weights.items():
            if not weight.isfinite().all():
                return f"'{name}' is not finite at the start of the task: lower training.meta_lr"
        episode = with_class_numbers(episode)
        x, y = episode.support_x, episode.support_y
        if not (x.isfinite().all() and episode.query_x.isfinite().all()):
            return "an image has values that are not finite: check the data set"
        for step in range(1, self.steps + 1):
            after = self.inner_steps(dict(weights), x, y, noise, 1, differentiable=False, steps=step)
            for name in self.adapted_names:
                if not after[name].isfinite().all():
                    return (
                        f"the inner loop diverged: '{name}' is not finite after inner step {step} of {self.steps}; "
                        "lower learner.inner_lr"
                    )
        with torch.no_grad():
            after = self.inner_steps(dict(weights), x, y, noise, 1, differentiable=False)
            loss, _ = self.query_loss(after, episode, noise)
        if not loss.isfinite():
            return f"the query loss is {loss.item()} although all inner steps are finite; lower learner.inner_lr"
        return (
            f"the query loss is {loss.item():.4g}, but its gradient through the inner steps is not finite; "
            "lower learner.inner_lr"
        )

    def _names_to_adapt(self, asked: Sequence[str] | None) -> list[str]:
        known = [name for name, _ in (*self.network.named_parameters(), *self.network.named_buffers())]
        if asked is None:
            asked = self.adapted_by_default()
        elif unknown := sorted(set(asked) - set(known)):
            raise ValueError(f"{unknown} are not parameters of {type(self.network).__name__}; it has {known}")
        names = [f"network.{name}" for name in asked]
        names += [f"perturbation.{name}" for name in self.perturbation.adapted_names]
        return names
