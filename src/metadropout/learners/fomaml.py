"""First-order MAML: MAML without the derivative of its inner gradients."""

from __future__ import annotations

from typing import Any, Literal

from torch import nn

from metadropout.learners.maml import MAML
from metadropout.perturbations import Perturbation


class FOMAML(MAML):
    """MAML that takes the query gradient at the adapted weights for that at the initial ones (Finn et al., 2017).

    Adapted: the network's weights. Meta-learned: their initial values and normalisation's offsets. The inner gradients
    are constants to the outer one, so the Jacobian of the steps is the identity, and nothing is learned from what
    a perturbation does in them: perturbations that are trained by that are refused.

    Args:
        network: maps images to logits; any module.
        perturbation: what perturbs it on support images; nothing by default.
        first_order: always.
    """

    title = "first-order MAML"
    citation = "Finn et al., 2017"

    def __init__(
        self,
        network: nn.Module,
        perturbation: Perturbation | None = None,
        *,
        first_order: Literal[True] = True,
        **options: Any,
    ) -> None:
        super().__init__(network, perturbation, first_order=first_order, **options)
