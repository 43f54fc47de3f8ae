"""A learner that is trained without a query loss: weights move towards those that fit the support images."""

import torch
from torch.func import functional_call
from torch.nn.functional import cross_entropy

import metadropout as md
from metadropout.learners import accuracy


@md.register("learner", "toy-no-query")
class NoQuery(md.Learner):
    """Takes plain gradient steps and moves the initial weights towards their end (as Reptile does)."""

    def __init__(self, network, perturbation=None, *, rate: float = 0.1, steps: int = 2) -> None:
        super().__init__()
        self.network, self.rate, self.steps = network, rate, steps

    def fitted(self, x, y):
        weights = {name: p.detach().clone().requires_grad_() for name, p in self.network.named_parameters()}
        for _ in range(self.steps):
            with torch.enable_grad():
                loss = cross_entropy(functional_call(self.network, weights, x), y)
                gradients = torch.autograd.grad(loss, list(weights.values()))
            pairs = zip(weights.items(), gradients, strict=True)
            weights = {n: (w - self.rate * g).detach().requires_grad_() for (n, w), g in pairs}
        return weights, loss.detach()

    def task_gradient(self, episode, *, generator=None):
        weights, loss = self.fitted(episode.support_x, episode.support_y)
        far = {f"network.{n}": p.detach() - weights[n].detach() for n, p in self.network.named_parameters()}
        logits = functional_call(self.network, weights, episode.query_x).detach()
        return md.TaskGradient(far, loss, accuracy(logits, episode.query_y))

    def forward(self, episode, *, generator=None):
        raise NotImplementedError("it has no query loss")

    def adapt(self, x, y, *, inductive=False, mc_samples=None, generator=None):
        weights, _ = self.fitted(x, y)
        return lambda query: functional_call(self.network, weights, query)
