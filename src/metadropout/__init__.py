"""Few-shot learning that learns how to perturb: Meta-dropout and its field of comparison.

All there is on each axis is in `md.learners`, `md.perturbations`, `md.networks` and `md.data`; classes are here, too.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from metadropout.errors import CheckpointError, ConfigError, DataError, MetadropoutError, TrainingError

if TYPE_CHECKING:
    from metadropout import data, learners, networks, perturbations, weights
    from metadropout.classify import AdaptedClassifier, FewShotClassifier
    from metadropout.data import ArrayImages, Episode, EpisodeSampler, Splits, open_dataset, split_classes
    from metadropout.learners import (
        ABML,
        ANIL,
        CAVIA,
        FOMAML,
        MAML,
        GradientLearner,
        Learner,
        MAMLPlusPlus,
        MatchingNet,
        MetaLSTM,
        MetaSGD,
        MetricLearner,
        MTNet,
        Outcome,
        Platipus,
        ProtoNet,
        Reptile,
        TaskGradient,
        TNet,
        Unicorn,
        UnicornMetaSGD,
    )
    from metadropout.networks import Conv4, ResNet12
    from metadropout.noise import CounterNoise, NoiseSource, RecordedNoise, SeededNoise
    from metadropout.perturbations import (
        Additive,
        Adversarial,
        Combined,
        Deterministic,
        FixedGaussian,
        IndependentGaussian,
        InformationDropout,
        LearnedVariance,
        MetaDropout,
        Mixup,
        MoreParameters,
        NoPerturbation,
        Pass,
        Perturbation,
        PerturbedNetwork,
        Traits,
        VariationalBottleneck,
        WeightGaussian,
    )
    from metadropout.recipes import load_recipe
    from metadropout.registry import register
    from metadropout.training.fit import LoadedRun, evaluate, fit, load_run
    from metadropout.weights import WeightSet, load_weights

__version__ = "0.1.0"

__all__ = [
    "ABML",
    "ANIL",
    "CAVIA",
    "FOMAML",
    "MAML",
    "AdaptedClassifier",
    "Additive",
    "Adversarial",
    "ArrayImages",
    "CheckpointError",
    "Combined",
    "ConfigError",
    "Conv4",
    "CounterNoise",
    "DataError",
    "Deterministic",
    "Episode",
    "EpisodeSampler",
    "FewShotClassifier",
    "FixedGaussian",
    "GradientLearner",
    "IndependentGaussian",
    "InformationDropout",
    "LearnedVariance",
    "Learner",
    "LoadedRun",
    "MAMLPlusPlus",
    "MTNet",
    "MatchingNet",
    "MetaDropout",
    "MetaLSTM",
    "MetaSGD",
    "MetadropoutError",
    "MetricLearner",
    "Mixup",
    "MoreParameters",
    "NoPerturbation",
    "NoiseSource",
    "Outcome",
    "Pass",
    "Perturbation",
    "PerturbedNetwork",
    "Platipus",
    "ProtoNet",
    "RecordedNoise",
    "Reptile",
    "ResNet12",
    "SeededNoise",
    "Splits",
    "TNet",
    "TaskGradient",
    "TrainingError",
    "Traits",
    "Unicorn",
    "UnicornMetaSGD",
    "VariationalBottleneck",
    "WeightGaussian",
    "WeightSet",
    "__version__",
    "data",
    "evaluate",
    "fit",
    "learners",
    "load_recipe",
    "load_run",
    "load_weights",
    "networks",
    "open_dataset",
    "perturbations",
    "register",
    "split_classes",
    "weights",
]

_NAMESPACES = ("data", "learners", "networks", "perturbations", "weights")
_MODULES = (
    "registry",
    "recipes",
    "data",
    "noise",
    "networks",
    "perturbations",
    "learners",
    "training.fit",
    "weights",
    "classify",
)
"""Where the names above are looked for when first used, as PyTorch takes its time to load; the light ones first."""


def __getattr__(name: str) -> Any:
    if name in _NAMESPACES:
        return import_module(f"metadropout.{name}")
    if name in __all__:
        for module in map(import_module, (f"metadropout.{module}" for module in _MODULES)):
            if hasattr(module, name):
                value = globals()[name] = getattr(module, name)
                return value
    raise AttributeError(f"module 'metadropout' has no attribute '{name}'")


def __dir__() -> list[str]:
    return list(__all__)
