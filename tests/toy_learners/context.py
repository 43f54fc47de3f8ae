"""Context parameters: only a small vector is adapted, fresh for every task and not meta-learned."""

import torch
from torch import nn

import metadropout as md


@md.register("network", "toy-context")
class ContextNetwork(nn.Module):
    """A network whose logits are shifted by a function of its context."""

    def __init__(self, way: int, *, in_channels: int = 1, image_size: int = 28, size: int = 4) -> None:
        super().__init__()
        self.register_buffer("context", torch.zeros(size))
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(in_channels * image_size**2, 8), nn.ReLU())
        self.film = nn.Linear(size, 8)
        self.head = nn.Linear(8, way)

    def forward(self, x):
        return self.head(self.body(x) * (1 + self.film(self.context)))


@md.register("learner", "toy-context")
class ContextLearner(md.MAML):
    """MAML that adapts the context alone."""

    def __init__(self, network, perturbation=None, *, inner_lr: float = 1.0, steps: int = 2) -> None:
        super().__init__(network, perturbation, inner_lr=inner_lr, steps=steps, adapted=["context"])
