"""Learners, by the names that recipes use."""

from metadropout.learners.anil import ANIL
from metadropout.learners.base import Classifier, Learner, Outcome, TaskGradient, accuracy
from metadropout.learners.cavia import CAVIA
from metadropout.learners.gradient import GradientLearner
from metadropout.learners.maml import MAML
from metadropout.learners.mamlpp import MAMLPlusPlus
from metadropout.learners.matching import MatchingNet
from metadropout.learners.metasgd import MetaSGD
from metadropout.learners.metric import MetricLearner
from metadropout.learners.mtnet import MTNet
from metadropout.learners.protonet import ProtoNet
from metadropout.learners.tnet import TNet
from metadropout.learners.unicorn import Unicorn, UnicornMetaSGD
from metadropout.registry import Registry

LEARNERS = Registry(
    "learner",
    {
        "maml": MAML,
        "metasgd": MetaSGD,
        "protonet": ProtoNet,
        "matching": MatchingNet,
        "tnet": TNet,
        "mtnet": MTNet,
        "cavia": CAVIA,
        "anil": ANIL,
        "mamlpp": MAMLPlusPlus,
        "unicorn": Unicorn,
        "unicorn-metasgd": UnicornMetaSGD,
    },
)

__all__ = [
    "ANIL",
    "CAVIA",
    "LEARNERS",
    "MAML",
    "Classifier",
    "GradientLearner",
    "Learner",
    "MAMLPlusPlus",
    "MTNet",
    "MatchingNet",
    "MetaSGD",
    "MetricLearner",
    "Outcome",
    "ProtoNet",
    "TNet",
    "TaskGradient",
    "Unicorn",
    "UnicornMetaSGD",
    "accuracy",
]
