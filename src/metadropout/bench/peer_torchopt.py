"""`TorchOpt`, used as in its own MAML example (examples/few-shot/maml_omniglot.py): MetaSGD, one backward pass."""

from __future__ import annotations

import torch
import torchopt
from torch import Tensor, nn
from torch.nn import functional as F

from metadropout.bench.problem import Problem, Work


def prepare(problem: Problem) -> Work:
    """Return one meta-iteration up to the averaged gradient."""
    network, parameters = problem.module()
    episodes, setting = problem.episodes(), problem.setting
    # All layers but the normalisations, whose offsets are not adapted.
    adapted = nn.ModuleList(layer for layer in network.modules() if isinstance(layer, (nn.Conv2d, nn.Linear)))
    inner = torchopt.MetaSGD(adapted, lr=setting.inner_lr)

    def iterate() -> dict[str, Tensor]:
        network.zero_grad()
        losses = []
        initial = torchopt.extract_state_dict(network, by="reference", detach_buffers=True)
        inner_initial = torchopt.extract_state_dict(inner, by="reference")
        for episode in episodes:
            for _ in range(setting.steps):
                inner.step(F.cross_entropy(network(episode.support_x), episode.support_y))
            losses.append(F.cross_entropy(network(episode.query_x), episode.query_y))
            torchopt.recover_state_dict(network, initial)
            torchopt.recover_state_dict(inner, inner_initial)
        torch.stack(losses).mean().backward()  # type: ignore[no-untyped-call]
        return {name: p.grad for name, p in parameters.items() if p.grad is not None}

    return iterate
