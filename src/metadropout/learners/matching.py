"""Matching Networks: attention over the support images."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from metadropout.learners.metric import MetricLearner
from metadropout.noise import NoiseSource
from metadropout.options import Limits
from metadropout.perturbations import Perturbation
from metadropout.perturbations.perturbed_network import with_prefix


class MatchingNet(MetricLearner):
    """Answers by a vote of the support images, each weighted by its cosine with the query image (Vinyals et al., 2016).

    The weights of the votes are a softmax over cosines without a temperature, so with features that are not negative no
    probability is far from even: at one shot the largest is e/(e + way − 1). The probabilities, and not the features,
    are averaged over noise samples, as a cosine is not linear. Nothing is adapted; the network is meta-learned, and
    with full context embeddings so are the LSTMs. A task may have any number of classes.

    Args:
        network: maps images to features; any module.
        perturbation: what perturbs it on support images; nothing by default.
        fce: full context embeddings: features of support images that depend on all support images, in an order drawn at
            random, and features of query images that depend on them, too.
        reads: how many times the LSTM of a query image reads the support images.
        class_sum: what is summed over the images of a class: their attention ("attention", as in the paper) or, before
            a softmax over classes, their cosines ("cosines", as in the code of Ravi and Larochelle, 2017, from which
            the figures on miniImageNet are quoted). At one shot both are the same.
        **options: those of all metric-based learners.
    """

    title = "Matching Networks"
    citation = "Vinyals et al., 2016"

    def __init__(
        self,
        network: nn.Module,
        perturbation: Perturbation | None = None,
        *,
        fce: bool = False,
        reads: Annotated[int, Limits(1, 1000)] = 3,
        class_sum: Literal["attention", "cosines"] = "attention",
        **options: Any,
    ) -> None:
        super().__init__(network, perturbation, **options)
        if class_sum not in ("attention", "cosines"):
            raise ValueError(f"class_sum is '{class_sum}', but only 'attention' and 'cosines' are known")
        self.class_sum, self.is_random = class_sum, fce
        self.context = FullContext(_features_of(network), reads) if fce else None

    def arranged(self, x: Tensor, y: Tensor, noise: NoiseSource | None) -> tuple[Tensor, Tensor]:
        if self.context is None or noise is None:
            return x, y
        order = torch.from_numpy(noise.fork().stream(0, 0).numbers().permutation(len(x))).to(y.device)
        return x[order], y[order]

    def logits(self, weights: Mapping[str, Tensor], support: Tensor, members: Tensor, query: Tensor) -> Tensor:
        if self.context is not None:
            support, query = functional_call(self.context, with_prefix(weights, "context."), (support, query))
        similarity = self.similarity(query, support)  # (samples, m, n)
        if self.class_sum == "attention":
            probabilities = similarity.softmax(dim=2) @ members
        else:
            probabilities = (similarity @ members).softmax(dim=2)
        return probabilities.mean(dim=0).log()

    def similarity(self, query: Tensor, support: Tensor) -> Tensor:
        """Return the cosine of each query image with each support image, shape (samples, m, n)."""
        return F.normalize(query, dim=2) @ F.normalize(support, dim=2).mT


class FullContext(nn.Module):
    """Lets the features of each image depend on all support images, by two LSTMs over them and one that reads them.

    Support image i becomes g_i = g'_i + →h_i + ←h_i. A query image f' starts with h = 0, and each read gives
    r = Σ_i softmax_i(h·g_i) g_i and h = LSTM([f', r], h) + f'; the last h is its features. With zero weights the LSTMs
    give zeros, and nothing is changed.

    Args:
        features: how many the network gives; the LSTMs have as many.
        reads: how many times a query image reads the support images.
    """

    def __init__(self, features: int, reads: int) -> None:
        super().__init__()
        self.onward, self.back = nn.LSTMCell(features, features), nn.LSTMCell(features, features)
        self.reader, self.reads = nn.LSTMCell(2 * features, features), reads

    def forward(self, support: Tensor, query: Tensor) -> tuple[Tensor, Tensor]:
        """Return the features in context, of (samples, n, features) and (samples, m, features), in the same shapes."""
        support = support + _outputs(self.onward, support) + _outputs(self.back, support.flip(1)).flip(1)
        h = c = torch.zeros_like(query)
        for _ in range(self.reads):
            read = (h @ support.mT).softmax(dim=2) @ support  # the first is the mean
            inputs = torch.cat([query, read], dim=2).flatten(0, 1)  # (samples * m, 2 * features)
            h, c = (state.view_as(query) for state in self.reader(inputs, (h.flatten(0, 1), c.flatten(0, 1))))
            h = h + query
        return support, h


def _outputs(cell: nn.LSTMCell, sequences: Tensor) -> Tensor:
    """Run a cell along sequences of shape (samples, n, features) and return its outputs, in the same shape."""
    state, outputs = None, []
    for inputs in sequences.unbind(dim=1):
        state = cell(inputs, state)
        outputs.append(state[0])
    return torch.stack(outputs, dim=1)


def _features_of(network: nn.Module) -> int:
    features = getattr(network, "features", None)
    if not isinstance(features, int):
        raise ValueError(
            f"full context embeddings have as many features as the network gives, but {type(network).__name__} does "
            "not say how many: give it an attribute features"
        )
    return features
