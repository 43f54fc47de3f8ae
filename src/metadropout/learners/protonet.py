"""Prototypical Networks: the nearest class mean."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from metadropout.learners.metric import MetricLearner


class ProtoNet(MetricLearner):
    """Answers by the distance from the mean features of each class (Snell, Swersky and Zemel, 2017).

    The prototype of a class is the mean of its support images' features, over noise samples as well; the logit of a
    class is minus the squared Euclidean distance from its prototype, without root, mean or temperature. Nothing is
    adapted; the network is meta-learned. A task may have any number of classes: the paper trains with more of them than
    it tests with (`episode.train_way`).
    """

    title = "Prototypical Networks"
    citation = "Snell, Swersky and Zemel, 2017"

    def logits(self, weights: Mapping[str, Tensor], support: Tensor, members: Tensor, query: Tensor) -> Tensor:
        return -squared_distances(query.mean(dim=0), prototypes(support.mean(dim=0), members))


def prototypes(support: Tensor, members: Tensor) -> Tensor:
    """Return each class's mean features, shape (way, features), from those of support images, (n, features)."""
    return members.T @ support / members.sum(dim=0)[:, None]


def squared_distances(a: Tensor, b: Tensor) -> Tensor:
    """Return ‖a_i − b_j‖², shape (..., i, j), of vectors in rows."""
    return (a.unsqueeze(-2) - b.unsqueeze(-3)).square().sum(dim=-1)
