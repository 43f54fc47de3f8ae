"""A plain PyTorch loop, as anybody would write it: functional operations and `autograd.grad(create_graph=True)`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from metadropout.bench.problem import Problem, Work
from metadropout.noise import NoiseStream


def prepare(problem: Problem) -> Work:
    """Return one meta-iteration up to the averaged gradient."""
    weights, adapted = weights_and_adapted_names(problem)
    episodes, setting = problem.episodes(), problem.setting

    def iterate() -> dict[str, Tensor]:
        for weight in weights.values():
            weight.grad = None
        for task, episode in enumerate(episodes):
            fast = dict(weights)
            for step in range(setting.steps):
                noise = problem.noise(task).stream(step, 0) if problem.method == "metadropout" else None
                loss = F.cross_entropy(logits(fast, episode.support_x, noise), episode.support_y)
                gradients = torch.autograd.grad(loss, [fast[name] for name in adapted], create_graph=True)
                for name, gradient in zip(adapted, gradients, strict=True):
                    fast[name] = fast[name] - setting.inner_lr * gradient
            loss = F.cross_entropy(logits(fast, episode.query_x, None), episode.query_y)
            (loss / len(episodes)).backward()  # type: ignore[no-untyped-call]
        return {name: weight.grad for name, weight in weights.items() if weight.grad is not None}

    return iterate


def weights_and_adapted_names(problem: Problem) -> tuple[dict[str, Tensor], list[str]]:
    """Return all weights, and the names of those that the inner loop adapts."""
    weights = {name: p.detach().requires_grad_() for name, p in problem.learner().named_parameters()}
    return weights, [name for name in weights if name.startswith("network.") and ".norm." not in name]


def logits(w: dict[str, Tensor], x: Tensor, noise: NoiseStream | None) -> Tensor:
    """Run Conv4, with Meta-dropout where the weights have a generator; noise is for support images only."""
    perturbed = "perturbation.generators.head.weight" in w
    for i in range(4):
        block, twin = f"network.blocks.{i}", f"perturbation.generators.blocks/{i}/conv"
        f = F.conv2d(x, w[f"{block}.conv.weight"], w[f"{block}.conv.bias"], padding=1)
        if perturbed:
            mean = F.conv2d(x, w[f"{twin}.weight"], w[f"{twin}.bias"], padding=1)
            if noise is not None:
                mean = mean + noise.normal(mean.shape, like=mean)
            f = f * F.softplus(mean)
        f = F.batch_norm(f, None, None, None, w[f"{block}.norm.bias"], training=True, eps=1e-3)
        x = F.max_pool2d(F.relu(f), 2)
    x = x.flatten(1)
    out = F.linear(x, w["network.head.weight"], w["network.head.bias"])
    if noise is not None:
        sigma = F.linear(x, w["perturbation.generators.head.weight"], w["perturbation.generators.head.bias"])
        out = out + F.softplus(sigma) * noise.normal(out.shape, like=out)
    return out
