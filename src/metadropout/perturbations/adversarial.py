"""Adversarial training in the inner loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import torch
from torch import Tensor, nn

from metadropout.options import Limits
from metadropout.perturbations.base import Perturbation, Traits
from metadropout.robustness.attacks import NORMS, Norm, projected_gradient_descent


class Adversarial(Perturbation):
    """Learns from support images moved against the current weights by projected gradient descent (Madry et al., 2018).

    Before each inner step the images take 10 steps within a ball, starting from themselves (our choice; attacks on
    trained models start at random); the movement is treated as a constant, and the outer loss is on clean images. The
    normalisation makes images depend on each other, so the batch is attacked jointly.

    Args:
        network: any module.
        norm: which ball: "l1", "l2" or "linf".
        radius: its radius, for images in [0, 1].
        attack_steps: steps of the attack.
    """

    title = "adversarial training"
    citation = "Madry et al., 2018"
    traits = Traits(changes=("images",), tasks_share_a_batch=False, support_only=True)

    def __init__(
        self,
        network: nn.Module,
        *,
        norm: Norm = "linf",
        radius: Annotated[float, Limits(0, 1e6)] = 0.1,
        attack_steps: Annotated[int, Limits(1, 10_000)] = 10,
    ) -> None:
        super().__init__(network)
        if radius < 0 or attack_steps < 1:
            raise ValueError(f"radius ({radius}) must not be negative and attack_steps ({attack_steps}) at least 1")
        if norm not in NORMS:
            raise ValueError(f"norm is '{norm}', but only {', '.join(NORMS)} are known")
        self.norm, self.radius, self.attack_steps = norm, radius, attack_steps

    def change_images(self, x: Tensor, y: Tensor, classify: Callable[[Tensor], Tensor]) -> Tensor:
        if x.min() < 0 or x.max() > 1:
            raise ValueError(
                f"adversarial moves images within [0, 1], but these reach from {x.min():.4g} to {x.max():.4g}; "
                "standardise them inside of the network"
            )
        with torch.enable_grad():
            return projected_gradient_descent(
                classify, x, y, norm=self.norm, radius=self.radius, steps=self.attack_steps, start=None
            )
