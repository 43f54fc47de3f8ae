"""`higher`, used as in its own MAML example (examples/maml-omniglot.py)."""

from __future__ import annotations

import higher
import torch
from torch import Tensor
from torch.nn import functional as F

from metadropout.bench.problem import Problem, Work


def prepare(problem: Problem) -> Work:
    """Return one meta-iteration up to the averaged gradient."""
    network, parameters = problem.module()
    episodes, setting = problem.episodes(), problem.setting
    adapted = [parameter for name, parameter in parameters.items() if ".norm." not in name]
    inner = torch.optim.SGD(adapted, lr=setting.inner_lr)

    def iterate() -> dict[str, Tensor]:
        network.zero_grad()
        for episode in episodes:
            with higher.innerloop_ctx(network, inner, copy_initial_weights=False) as (fast, differentiable):
                for _ in range(setting.steps):
                    differentiable.step(F.cross_entropy(fast(episode.support_x), episode.support_y))
                loss = F.cross_entropy(fast(episode.query_x), episode.query_y)
                (loss / len(episodes)).backward()  # type: ignore[no-untyped-call]
        return {name: p.grad for name, p in parameters.items() if p.grad is not None}

    return iterate
