"""Learners, by the names that recipes use."""

from metadropout.learners.base import Classifier, Learner, Outcome, TaskGradient, accuracy
from metadropout.learners.gradient import GradientLearner
from metadropout.learners.maml import MAML
from metadropout.learners.matching import MatchingNet
from metadropout.learners.metasgd import MetaSGD
from metadropout.learners.metric import MetricLearner
from metadropout.learners.protonet import ProtoNet
from metadropout.registry import Registry

LEARNERS = Registry(
    "learner",
    {
        "maml": MAML,
        "metasgd": MetaSGD,
        "protonet": ProtoNet,
        "matching": MatchingNet,
    },
)

__all__ = [
    "LEARNERS",
    "MAML",
    "Classifier",
    "GradientLearner",
    "Learner",
    "MatchingNet",
    "MetaSGD",
    "MetricLearner",
    "Outcome",
    "ProtoNet",
    "TaskGradient",
    "accuracy",
]
