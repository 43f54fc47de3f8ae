"""A learned update rule with a state: momentum whose rate and decay are meta-learned, and which sees the loss."""

import torch
from torch import nn

import metadropout as md


@md.register("learner", "toy-rule")
class LearnedRule(md.GradientLearner):
    """Steps along a running sum of gradients; rate and decay are learned, the rate grows with the loss."""

    def add_meta_parameters(self) -> None:
        self.rate = nn.Parameter(torch.tensor(self.inner_lr))
        self.decay = nn.Parameter(torch.tensor(0.5))

    def inner_init(self, weights, noise):
        return {name: torch.zeros_like(weights[name]) for name in self.adapted_names}

    def inner_step(self, weights, gradients, *, loss, state, step):
        state = {name: weights["decay"] * state[name] + gradient for name, gradient in gradients.items()}
        rate = weights["rate"] * (1 + loss.detach())
        return {name: weights[name] - rate * state[name] for name in gradients}, state
