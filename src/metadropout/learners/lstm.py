"""Meta-Learner LSTM: the rule of the inner steps is a recurrent network, the same for every weight."""

from __future__ import annotations

import math
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from metadropout.learners.gradient import GradientLearner
from metadropout.networks.functional import trainable_names
from metadropout.noise import NoiseSource
from metadropout.options import Limits, Steps
from metadropout.perturbations import Perturbation
from metadropout.perturbations.base import Weights

SCALE = 10.0
"""Of the inputs: logarithms are divided by it, and numbers below exp(-SCALE) are not taken for their logarithm."""


class MetaLSTM(GradientLearner):
    """Learns the rule of the inner steps: an LSTM whose cell is the weights themselves (Ravi & Larochelle, 2017).

    Adapted: all of the network's parameters θ, normalisation's included, by θ ← σ(f) · θ − σ(i) · ∇L. The gates f and i
    of a weight come from an LSTM that sees the loss and the weight's gradient in all steps so far, from the weight, and
    from the gate before. Meta-learned: that LSTM and the gates' weights, shared by all of the network's parameters, and
    the initial θ. Loss and gradients are constants to the outer gradient.

    Perturbations that are trained through the inner steps would learn nothing from such constants and are refused,
    unless `first_order` is false: the gradient in the step, though not the one that the gates see, then keeps its
    derivative.

    Args:
        network: maps images to logits; any module.
        perturbation: what perturbs it on support images; nothing by default.
        inner_lr: where the input gates σ(i) start: at the authors' b_I ~ U(-5, -4) by default.
        steps: number of inner steps.
        first_order: whether gradients are constants, as in the paper.
        hidden: width of the LSTM.
        divide_again: divide the mean gradient by the number of images once more, as the authors' program does; the
            gates learn for that scale.
    """

    title = "Meta-Learner LSTM"
    citation = "Ravi and Larochelle, 2017"

    def __init__(
        self,
        network: nn.Module,
        perturbation: Perturbation | None = None,
        *,
        inner_lr: Annotated[float, Limits(0, 1, above=True)] = 0.011,
        steps: Steps = 12,
        first_order: bool = True,
        hidden: Annotated[int, Limits(1, 10_000)] = 20,
        divide_again: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(network, perturbation, inner_lr=inner_lr, steps=steps, first_order=first_order, **options)
        self.hidden, self.divide_again = hidden, divide_again
        self.lstm = nn.Linear(4 + hidden, 4 * hidden)  # (loss, gradient, hidden) → input, forget, candidate, output
        self.forget_gate, self.input_gate = nn.Linear(hidden + 2, 1), nn.Linear(hidden + 2, 1)
        for part in (self.lstm, self.forget_gate, self.input_gate):
            for parameter in part.parameters():
                nn.init.uniform_(parameter, -0.01, 0.01)
        start = math.log(inner_lr / (1 - inner_lr)) if inner_lr < 1 else 40.0
        nn.init.uniform_(self.forget_gate.bias, 4, 5)
        nn.init.uniform_(self.input_gate.bias, start - 0.5, start + 0.5)

    def adapted_by_default(self) -> list[str]:
        return trainable_names(self.network)

    def inner_init(self, weights: Weights, noise: NoiseSource | None) -> Weights:
        like = flattened(weights, self.adapted_names)
        zeros = like.new_zeros(len(like), self.hidden)
        return {"hidden": zeros, "cell": zeros, "forget": torch.zeros_like(like), "input": torch.zeros_like(like)}

    def inner_step(
        self, weights: Weights, gradients: Weights, *, loss: Tensor, state: Weights, step: int
    ) -> tuple[Weights, Weights]:
        theta, gradient = (flattened(tensors, self.adapted_names) for tensors in (weights, gradients))  # (D,)
        seen = [preprocessed(loss.detach()).expand(len(theta), 2), preprocessed(gradient.detach())]
        gates = F.linear(torch.cat([*seen, state["hidden"]], dim=1), weights["lstm.weight"], weights["lstm.bias"])
        i, f, candidate, o = gates.chunk(4, dim=1)  # each (D, hidden)
        cell = f.sigmoid() * state["cell"] + i.sigmoid() * candidate.tanh()
        hidden = o.sigmoid() * cell.tanh()

        def gate(which: str) -> Tensor:
            inputs = torch.cat([hidden, theta[:, None], state[which][:, None]], dim=1)  # (D, hidden + 2)
            return F.linear(inputs, weights[f"{which}_gate.weight"], weights[f"{which}_gate.bias"])[:, 0]

        forget, entry = gate("forget"), gate("input")
        theta = forget.sigmoid() * theta - entry.sigmoid() * gradient
        parts = torch.split(theta, [weights[name].numel() for name in self.adapted_names])
        adapted = {name: part.view_as(weights[name]) for name, part in zip(self.adapted_names, parts, strict=True)}
        return adapted, {"hidden": hidden, "cell": cell, "forget": forget, "input": entry}

    def support_gradient(
        self, weights: Weights, x: Tensor, y: Tensor, *rest: Any, **how: Any
    ) -> tuple[Tensor, Weights]:
        loss, gradients = super().support_gradient(weights, x, y, *rest, **how)
        return loss, {n: g / y.shape[-1] for n, g in gradients.items()} if self.divide_again else gradients


def preprocessed(x: Tensor, inside: float = 0.0) -> Tensor:
    """Return (ln|x| / p, sign x) of each number, or (-1, e^p x) where it is small: shape (..., 2).

    Args:
        x: losses or gradients, whose sizes differ by orders of magnitude.
        inside: what a program adds to |x| in the logarithm.
    """
    large = torch.stack([(x.abs() + inside).log() / SCALE, x.sign()], dim=-1)
    small = torch.stack([-torch.ones_like(x), math.exp(SCALE) * x], dim=-1)
    return torch.where((x.abs() > math.exp(-SCALE))[..., None], large, small)


def flattened(tensors: Weights, names: list[str]) -> Tensor:
    """Return all numbers of some tensors as one vector."""
    return torch.cat([tensors[name].reshape(-1) for name in names])
