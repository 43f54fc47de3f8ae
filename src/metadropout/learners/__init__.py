"""Learners, by the names that recipes use."""

from metadropout.learners.base import Classifier, Learner, Outcome, TaskGradient, accuracy
from metadropout.learners.gradient import GradientLearner
from metadropout.learners.maml import MAML
from metadropout.learners.metasgd import MetaSGD
from metadropout.registry import Registry

LEARNERS = Registry(
    "learner",
    {
        "maml": MAML,
        "metasgd": MetaSGD,
    },
)

__all__ = [
    "LEARNERS",
    "MAML",
    "Classifier",
    "GradientLearner",
    "Learner",
    "MetaSGD",
    "Outcome",
    "TaskGradient",
    "accuracy",
]
