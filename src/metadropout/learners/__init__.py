"""Learners, by the names that recipes use."""

from metadropout.learners.abml import ABML
from metadropout.learners.anil import ANIL
from metadropout.learners.base import Classifier, Learner, Outcome, TaskGradient, accuracy
from metadropout.learners.cavia import CAVIA
from metadropout.learners.fomaml import FOMAML
from metadropout.learners.gradient import GradientLearner
from metadropout.learners.lstm import MetaLSTM
from metadropout.learners.maml import MAML
from metadropout.learners.mamlpp import MAMLPlusPlus
from metadropout.learners.matching import MatchingNet
from metadropout.learners.metasgd import MetaSGD
from metadropout.learners.metric import MetricLearner
from metadropout.learners.mtnet import MTNet
from metadropout.learners.platipus import Platipus
from metadropout.learners.protonet import ProtoNet
from metadropout.learners.reptile import Reptile
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
        "fomaml": FOMAML,
        "reptile": Reptile,
        "lstm": MetaLSTM,
        "abml": ABML,
        "platipus": Platipus,
    },
)

__all__ = [
    "ABML",
    "ANIL",
    "CAVIA",
    "FOMAML",
    "LEARNERS",
    "MAML",
    "Classifier",
    "GradientLearner",
    "Learner",
    "MAMLPlusPlus",
    "MTNet",
    "MatchingNet",
    "MetaLSTM",
    "MetaSGD",
    "MetricLearner",
    "Outcome",
    "Platipus",
    "ProtoNet",
    "Reptile",
    "TNet",
    "TaskGradient",
    "Unicorn",
    "UnicornMetaSGD",
    "accuracy",
]


def __dir__() -> list[str]:
    return __all__
