"""Perturbations, by the names that recipes use."""

from metadropout.perturbations.additive import Additive
from metadropout.perturbations.adversarial import Adversarial
from metadropout.perturbations.base import Pass, Perturbation, Traits
from metadropout.perturbations.combined import Combined
from metadropout.perturbations.deterministic import Deterministic, MoreParameters
from metadropout.perturbations.fixed_gaussian import FixedGaussian
from metadropout.perturbations.independent_gaussian import IndependentGaussian
from metadropout.perturbations.information_dropout import InformationDropout
from metadropout.perturbations.learned_variance import LearnedVariance
from metadropout.perturbations.metadropout import MetaDropout
from metadropout.perturbations.mixup import Mixup
from metadropout.perturbations.none import NoPerturbation
from metadropout.perturbations.perturbed_network import PerturbedNetwork
from metadropout.perturbations.vib import VariationalBottleneck
from metadropout.perturbations.weight_gaussian import WeightGaussian
from metadropout.registry import Registry

PERTURBATIONS = Registry(
    "perturbation",
    {
        "none": NoPerturbation,
        "metadropout": MetaDropout,
        "additive": Additive,
        "fixed-gaussian": FixedGaussian,
        "weight-gaussian": WeightGaussian,
        "independent-gaussian": IndependentGaussian,
        "deterministic": Deterministic,
        "more-parameters": MoreParameters,
        "learned-variance": LearnedVariance,
        "mixup": Mixup,
        "vib": VariationalBottleneck,
        "information-dropout": InformationDropout,
        "adversarial": Adversarial,
        "combined": Combined,
    },
)

__all__ = [
    "PERTURBATIONS",
    "Additive",
    "Adversarial",
    "Combined",
    "Deterministic",
    "FixedGaussian",
    "IndependentGaussian",
    "InformationDropout",
    "LearnedVariance",
    "MetaDropout",
    "Mixup",
    "MoreParameters",
    "NoPerturbation",
    "Pass",
    "Perturbation",
    "PerturbedNetwork",
    "Traits",
    "VariationalBottleneck",
    "WeightGaussian",
]


def __dir__() -> list[str]:
    return __all__
