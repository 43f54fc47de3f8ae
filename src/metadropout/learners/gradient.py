"""Learners that adapt by gradient steps on the support loss: the inner loop that all of them share.

The path of one task, top to bottom: `forward` → `_inner_steps` → `_step` → `_support_gradient` → `_logits` (a support
pass with noise) → `update` → `_query_loss` → `_classifier` → `_logits` (the query pass, deterministic) → loss.

The same path runs for several tasks at once (`batched.py`): all tensors then have a leading task axis, and whatever is
said here of one task is lifted over that axis by `over_tasks`.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from metadropout.data import Episode
from metadropout.learners.base import Classifier, Learner, Outcome, TaskGradient
from metadropout.learners.batched import OverTasks, can_be_stacked, one_task, stacked_task_gradients
from metadropout.learners.recomputation import recomputed
from metadropout.networks.functional import FunctionalNetwork, LayerStatistics, Normalisation, weight_names
from metadropout.noise import NoiseSource, NoiseStream, as_noise_source
from metadropout.ops.precision import Precision
from metadropout.perturbations import NoPerturbation, Pass, Perturbation

Weights = dict[str, Tensor]
"""All parameters of a learner by name; the adapted ones among them change from step to step."""

TEST_SAMPLES = 30
"""Noise samples per inner step in meta-testing, as in the paper."""


class GradientLearner(Learner):
    """Adapts the network's weights θ by gradient steps on perturbed support images.

    Normalisation parameters are meta-learned but not adapted, and neither are the perturbation's unless it says so.

    Args:
        network: maps images to logits; any module.
        perturbation: what perturbs it on support images; nothing by default.
        inner_lr: step size of the inner steps.
        steps: number of inner steps.
        first_order: leave the derivative of the inner gradients out: faster, less exact.
        norm_second_order: false takes the gradients that come back through batch normalisations for constants when
            inner gradients are differentiated: no part of the method, but what the authors' program does in effect.
        inductive: normalise query images one by one with statistics of the support images, not with those of
            the query batch (transductive, as MAML and the paper do).
        adapted: names of the network's parameters that the inner steps change; by default all but normalisation's.
        images_per_pass: most images in one support pass; more Monte-Carlo samples than fit are run in turn.
        precision: "bf16" rounds what convolutions multiply to bfloat16; statistics, losses, inner steps and weights
            stay in float32.
        checkpoint_steps: keep no graph of inner steps but take each again in the backward pass: the same gradients in
            much less memory, for about a third more time.
    """

    def __init__(
        self,
        network: nn.Module,
        perturbation: Perturbation | None = None,
        *,
        inner_lr: float = 0.1,
        steps: int = 5,
        first_order: bool = False,
        norm_second_order: bool = True,
        inductive: bool = False,
        adapted: Sequence[str] | None = None,
        images_per_pass: int = 256,
        precision: Precision = "full",
        checkpoint_steps: bool = False,
    ) -> None:
        super().__init__()
        self.network = network
        self.perturbation = perturbation or NoPerturbation(network)
        if first_order and self.perturbation.needs_second_order:
            raise ValueError(
                f"first_order cannot be used with {type(self.perturbation).__name__}: "
                f"{self.perturbation.needs_second_order}"
            )
        if first_order and checkpoint_steps:
            raise ValueError("checkpoint_steps is of no use with first_order, which keeps no graph of inner steps")
        if steps < 0 or images_per_pass < 1 or math.isnan(inner_lr):
            raise ValueError(
                f"steps ({steps}) must be at least 0, images_per_pass ({images_per_pass}) at least 1, "
                f"and inner_lr ({inner_lr}) a number"
            )
        self.inner_lr, self.steps = inner_lr, steps
        self.first_order, self.inductive, self.images_per_pass = first_order, inductive, images_per_pass
        self.precision: Precision = precision
        self.checkpoint_steps = checkpoint_steps
        self._function = FunctionalNetwork(
            network, self.perturbation.sites, self.perturbation.input_sites, precision, norm_second_order
        )
        if self.perturbation.support_only:  # layers that nothing acts on can be run together
            self._unperturbed = FunctionalNetwork(network, (), (), precision, norm_second_order)
        self._calls_checked = False
        self.adapted_names = self._names_to_adapt(adapted)
        if not self.adapted_names:
            raise ValueError("there is nothing to adapt: no parameter is listed, or all are frozen")
        self.add_meta_parameters()

    def add_meta_parameters(self) -> None:
        """Make the learner's own meta-learned parameters; called last in the constructor, does nothing by default."""

    @property
    def is_transductive(self) -> bool:  # type: ignore[override]
        """Whether query images are normalised together."""
        return not self.inductive

    @abstractmethod
    def update(self, name: str, gradient: Tensor, weights: Weights) -> Tensor:
        """Return a weight after one inner step.

        Args:
            name: the weight's name among the learner's parameters.
            gradient: the support loss's gradient at the weight's value before the step.
            weights: all parameters of the learner before the step; to be used in place of its attributes, because a
                learner may hold several values of each.
        """

    def forward(self, episode: Episode, *, generator: torch.Generator | NoiseSource | None = None) -> Outcome:
        return self.learn(dict(self.named_parameters()), episode, self._noise_from(generator))

    def learn(
        self, weights: Weights, episode: Episode, noise: NoiseSource | None, over_tasks: OverTasks = one_task
    ) -> Outcome:
        """Return how the task goes from the given weights, differentiable in all of them.

        Args:
            weights: all parameters of the learner.
            episode: the task; of several tasks, each tensor stacked.
            noise: source of all randomness.
            over_tasks: turns a function of one task into one of as many tasks as are stacked.
        """
        x, y = episode.support_x, episode.support_y
        weights = self._inner_steps(weights, x, y, noise, 1, differentiable=True, over_tasks=over_tasks)
        loss, logits = over_tasks(self._query_loss)(weights, x, episode.query_x, episode.query_y)
        return Outcome(loss, logits)

    def task_gradients(
        self, episodes: Sequence[Episode], generators: Sequence[torch.Generator | NoiseSource | None]
    ) -> list[TaskGradient]:
        """Run all tasks as one, side by side, where they and the perturbation allow it, and one by one otherwise."""
        if not (self.perturbation.tasks_share_a_batch and can_be_stacked(episodes)):
            return super().task_gradients(episodes, generators)
        return stacked_task_gradients(self, episodes, [self._noise_from(generator) for generator in generators])

    def adapt(
        self,
        x: Tensor,
        y: Tensor,
        *,
        mc_samples: int | None = None,
        generator: torch.Generator | NoiseSource | None = None,
    ) -> Classifier:
        with torch.inference_mode(False):
            x, y = (t.clone() if t.is_inference() else t for t in (x, y))
            return self._classifier(self.adapted_weights(x, y, mc_samples=mc_samples, generator=generator), x)

    def adapted_weights(
        self,
        x: Tensor,
        y: Tensor,
        *,
        mc_samples: int | None = None,
        generator: torch.Generator | NoiseSource | None = None,
    ) -> Weights:
        """Return all parameters after the inner steps, without a graph; arguments as for `adapt`."""
        samples = self.samples_used(TEST_SAMPLES if mc_samples is None else mc_samples)
        noise = self._noise_from(generator)
        # Copies, so that the adapted model stays what it is when training goes on.
        weights = {name: p.detach().clone() for name, p in self.named_parameters()}
        return self._inner_steps(weights, x, y, noise, samples, differentiable=False)

    def samples_used(self, mc_samples: int) -> int:
        """Return how many noise samples an inner step takes if so many are asked for: one where all would be alike."""
        if mc_samples < 1:
            raise ValueError(f"mc_samples is {mc_samples}; it must be at least 1")
        return mc_samples if self.perturbation.random else 1

    def explain_failure(self, episode: Episode, *, generator: torch.Generator | NoiseSource | None = None) -> str:
        """Take the inner steps again, one by one, until something is not finite."""
        noise = self._noise_from(generator)
        weights = {name: p.detach() for name, p in self.named_parameters()}
        for name, weight in weights.items():
            if not weight.isfinite().all():
                return f"'{name}' is not finite at the start of the task: lower training.meta_lr"
        x, y = episode.support_x, episode.support_y
        if not (x.isfinite().all() and episode.query_x.isfinite().all()):
            return "an image has values that are not finite: check the data set"
        for step in range(self.steps):
            weights |= {name: weights[name].requires_grad_() for name in self.adapted_names}
            gradients = self._support_gradient(weights, x, y, step, noise, 1, differentiable=False)
            weights |= {n: self.update(n, g, weights).detach() for n, g in gradients.items()}
            for name in self.adapted_names:
                if not weights[name].isfinite().all():
                    return (
                        f"the inner loop diverged: '{name}' is not finite after inner step {step + 1} of {self.steps}; "
                        "lower learner.inner_lr"
                    )
        with torch.no_grad():
            loss = cross_entropy(self._classifier(weights, x)(episode.query_x), episode.query_y)
        if not loss.isfinite():
            return f"the query loss is {loss.item()} although all inner steps are finite; lower learner.inner_lr"
        return (
            f"the query loss is {loss.item():.4g}, but its gradient through the inner steps is not finite; "
            "lower learner.inner_lr"
        )

    def _inner_steps(
        self,
        weights: Weights,
        x: Tensor,
        y: Tensor,
        noise: NoiseSource | None,
        mc_samples: int,
        differentiable: bool,
        over_tasks: OverTasks = one_task,
    ) -> Weights:
        """Take all inner steps; if differentiable, the result depends on the weights at the start."""
        for number in range(self.steps):
            step = partial(self._step, x=x, y=y, step=number, noise=noise, mc_samples=mc_samples, over_tasks=over_tasks)
            if not differentiable:
                weights |= {name: weights[name].detach().requires_grad_() for name in self.adapted_names}
            if differentiable and self.checkpoint_steps:
                weights = weights | recomputed(step, weights, self.adapted_names)
            else:
                weights = weights | step(weights, differentiable=differentiable)
        return weights if differentiable else {name: w.detach() for name, w in weights.items()}

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
        """Return the adapted weights after one inner step."""

        def updated(weights: Weights, gradients: Weights) -> Weights:
            return {name: self.update(name, gradient, weights) for name, gradient in gradients.items()}

        with torch.enable_grad():
            gradients = self._support_gradient(weights, x, y, step, noise, mc_samples, differentiable, over_tasks)
            return over_tasks(updated)(weights, gradients)  # type: ignore[no-any-return]

    def _support_gradient(
        self,
        weights: Weights,
        x: Tensor,
        y: Tensor,
        step: int,
        noise: NoiseSource | None,
        mc_samples: int,
        differentiable: bool,
        over_tasks: OverTasks = one_task,
    ) -> Weights:
        """Return the gradient of the support loss, averaged over images and Monte-Carlo samples."""
        x = over_tasks(self._changed_images)(weights, x, y)
        adapted = [weights[name] for name in self.adapted_names]
        total: list[Tensor] | None = None
        per_pass = max(1, self.images_per_pass // len(x)) if self.perturbation.samples_share_a_batch else 1
        for first in range(0, mc_samples, per_pass):
            samples = range(first, min(first + per_pass, mc_samples))

            def loss_of(weights: Weights, x: Tensor, y: Tensor, samples: range = samples) -> Tensor:
                streams = [noise.stream(step, sample) for sample in samples] if noise is not None else []
                return self._support_loss(weights, x, y, streams)

            # Tasks do not depend on each other, so the gradient of the sum holds that of each.
            loss = over_tasks(loss_of)(weights, x, y).sum() * (len(samples) / mc_samples)
            part = torch.autograd.grad(
                loss, adapted, create_graph=differentiable and not self.first_order, materialize_grads=True
            )
            total = list(part) if total is None else [a + b for a, b in zip(total, part, strict=True)]
        assert total is not None
        return dict(zip(self.adapted_names, total, strict=True))

    def _changed_images(self, weights: Weights, x: Tensor, y: Tensor) -> Tensor:
        """Let the perturbation change the images of an inner step; the change counts as a constant."""
        constant = {name: w.detach() for name, w in weights.items()}

        def classify(images: Tensor) -> Tensor:
            return self._logits(constant, images, self._query_pass(constant), Normalisation())

        return self.perturbation.change_images(x, y, classify)

    def _support_loss(self, weights: Weights, x: Tensor, y: Tensor, streams: Sequence[NoiseStream]) -> Tensor:
        """Return the loss of one support pass, averaged over images and the noise samples that share the pass."""
        # The samples stand one after the other in one batch, each normalised by its own statistics.
        repeat = max(1, len(streams))
        this = Pass(_with_prefix(weights, "perturbation."), streams, support=True, precision=self.precision)
        logits = self._logits(weights, x.repeat(repeat, *[1] * (x.dim() - 1)), this, Normalisation(repeat))
        y = y.repeat(repeat)
        try:
            loss = self.perturbation.label_loss(logits, y, this)
        except IndexError:
            if y.max() < logits.shape[1]:
                raise
            raise ValueError(f"a label is {int(y.max())}, but the network has {logits.shape[1]} outputs") from None
        penalty = self.perturbation.penalty(this)
        return loss if penalty is None else loss + penalty

    def _query_loss(
        self, weights: Weights, support_x: Tensor, query_x: Tensor, query_y: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the adapted model's loss on query images, and its logits."""
        logits = self._classifier(weights, support_x)(query_x)
        return cross_entropy(logits, query_y), logits

    def _query_pass(self, weights: Weights) -> Pass:
        return Pass(_with_prefix(weights, "perturbation."), precision=self.precision)

    def _logits(self, weights: Weights, x: Tensor, this: Pass, normalisation: Normalisation) -> Tensor:
        """Run the network on images, with the perturbation's say in a support pass or a deterministic one."""
        theta = _with_prefix(weights, "network.")
        if self.perturbation.support_only and not this.support:
            return self._unperturbed(theta, x, normalisation=normalisation)
        theta = self.perturbation.change_weights(theta, this)
        outputs: list[str] = []
        inputs: list[str] = []

        def on_output(name: str, h: Tensor, f: Tensor) -> Tensor:
            outputs.append(name)
            return self.perturbation.after(name, h, f, this)

        def on_input(name: str, h: Tensor) -> Tensor:
            inputs.append(name)
            return self.perturbation.before(name, h, this)

        logits = self._function(theta, x, on_output, normalisation, on_input)
        if not self._calls_checked:  # once: a network runs its layers in the same way every time
            self.perturbation.check_calls(outputs, inputs)
            self._calls_checked = True
        return logits

    def _classifier(self, weights: Weights, support_x: Tensor) -> Classifier:
        """Return the adapted model as a function of images."""
        this = self._query_pass(weights)
        statistics: LayerStatistics | None = None
        if self.inductive:
            statistics = {}
            self._logits(weights, support_x, this, Normalisation(collected=statistics))

        def classify(x: Tensor) -> Tensor:
            return self._logits(weights, x, this, Normalisation(given=statistics))

        return classify

    def _noise_from(self, generator: torch.Generator | NoiseSource | None) -> NoiseSource | None:
        if not self.perturbation.random:
            return None
        if generator is None:
            raise ValueError(f"{type(self.perturbation).__name__} draws noise: pass a generator")
        return as_noise_source(generator)

    def _names_to_adapt(self, asked: Sequence[str] | None) -> list[str]:
        if asked is None:
            asked = weight_names(self.network)
        elif unknown := sorted(set(asked) - {name for name, _ in self.network.named_parameters()}):
            known = [name for name, _ in self.network.named_parameters()]
            raise ValueError(f"{unknown} are not parameters of {type(self.network).__name__}; it has {known}")
        names = [f"network.{name}" for name in asked]
        names += [f"perturbation.{name}" for name in self.perturbation.adapted_names]
        return names


def _with_prefix(weights: Weights, prefix: str) -> Weights:
    """Pick the weights whose names start with a prefix, under their names without it."""
    return {name.removeprefix(prefix): w for name, w in weights.items() if name.startswith(prefix)}
