"""MAML++: learned step sizes per layer and step, and a loss after every inner step."""

from __future__ import annotations

from typing import Annotated, Any

import torch
from torch import Tensor, nn

from metadropout.data import Episode
from metadropout.learners.base import Outcome
from metadropout.learners.batched import OverTasks, one_task
from metadropout.learners.gradient import GradientLearner
from metadropout.networks.layers import module_key
from metadropout.noise import NoiseSource
from metadropout.options import Limits
from metadropout.perturbations import Perturbation
from metadropout.perturbations.base import Weights


class MAMLPlusPlus(GradientLearner):
    """MAML with a learned step size for each layer and inner step, and a loss after every step (Antoniou et al., 2019).

    Adapted: all weights but normalisation's. Meta-learned: their initial values, and for each adapted tensor one step
    size per inner step, all of which start at `inner_lr`; steps of testing beyond those of training use the last one.

    At first the query losses after all inner steps count alike. Their weights then move to the last one's, in a line.
    The other parts of MAML++ are not here, or not of the learner: its cosine schedule is an option of training.

    Args:
        network: maps images to logits; any module.
        perturbation: what perturbs it on support images; nothing by default.
        multi_step_iterations: outer steps until only the loss after the last inner step counts; 0 for none.
    """

    title = "MAML++"
    citation = "Antoniou et al., 2019"
    outer_steps: Tensor

    def __init__(
        self,
        network: nn.Module,
        perturbation: Perturbation | None = None,
        *,
        multi_step_iterations: Annotated[int, Limits(0, 99_999_999)] = 5000,
        **options: Any,
    ) -> None:
        super().__init__(network, perturbation, **options)
        self.multi_step_iterations = multi_step_iterations
        self.register_buffer("outer_steps", torch.zeros(()))

    def add_meta_parameters(self) -> None:
        tensors = self.adapted_tensors().items()
        self.step_sizes = nn.ParameterDict(
            {module_key(name): value.new_full((max(1, self.steps),), self.inner_lr) for name, value in tensors}
        )

    def inner_step(
        self, weights: Weights, gradients: Weights, *, loss: Tensor, state: Weights, step: int
    ) -> tuple[Weights, Weights]:
        after = {}
        for name, gradient in gradients.items():
            sizes = weights[f"step_sizes.{module_key(name)}"]
            after[name] = weights[name] - sizes[min(step, len(sizes) - 1)] * gradient
        return after, state

    def learn(
        self, weights: Weights, episode: Episode, noise: NoiseSource | None, over_tasks: OverTasks = one_task
    ) -> Outcome:
        x, y = episode.support_x, episode.support_y
        samples = 1 if noise is None else self.train_samples
        path = list(self.inner_path(weights, x, y, noise, samples, differentiable=True, over_tasks=over_tasks))
        last = self.judge(path[-1], episode, noise, over_tasks)
        loss, share = last.loss, self.share_of_each_step()
        if share:
            early = [self.judge(weights, episode, noise, over_tasks).loss for weights in path[1:-1]]
            loss = (1 - len(early) * share) * loss + share * sum(early, torch.zeros_like(loss))
        steps = (self.outer_steps + 1).expand(loss.shape)
        return Outcome(loss, last.logits, {"outer_steps": steps})

    def share_of_each_step(self) -> float:
        """Return the weight of the query loss after each inner step but the last."""
        if not (self.multi_step_iterations and self.steps):
            return 0.0
        left = 1 - self.outer_steps.item() / self.multi_step_iterations
        return max(0.0, left) / self.steps

    def changed_buffers(self) -> tuple[str, ...]:
        return ("outer_steps",)
