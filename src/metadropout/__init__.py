"""Few-shot learning that learns how to perturb: Meta-dropout and its field of comparison."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from metadropout.errors import CheckpointError, ConfigError, DataError, MetadropoutError, TrainingError

if TYPE_CHECKING:
    from metadropout.data import ArrayImages, Episode, EpisodeSampler, Splits, open_dataset, split_classes
    from metadropout.learners import (
        ABML,
        FOMAML,
        MAML,
        GradientLearner,
        Learner,
        MatchingNet,
        MetaLSTM,
        MetaSGD,
        MetricLearner,
        Outcome,
        Platipus,
        ProtoNet,
        Reptile,
        TaskGradient,
    )
    from metadropout.networks import Conv4, ResNet12
    from metadropout.noise import CounterNoise, NoiseSource, RecordedNoise, SeededNoise
    from metadropout.perturbations import MetaDropout, NoPerturbation, Perturbation
    from metadropout.registry import register
    from metadropout.training.fit import LoadedRun, evaluate, fit, load_run

__version__ = "0.1.0"

__all__ = [
    "ABML",
    "FOMAML",
    "MAML",
    "ArrayImages",
    "CheckpointError",
    "ConfigError",
    "Conv4",
    "CounterNoise",
    "DataError",
    "Episode",
    "EpisodeSampler",
    "GradientLearner",
    "Learner",
    "LoadedRun",
    "MatchingNet",
    "MetaDropout",
    "MetaLSTM",
    "MetaSGD",
    "MetadropoutError",
    "MetricLearner",
    "NoPerturbation",
    "NoiseSource",
    "Outcome",
    "Perturbation",
    "Platipus",
    "ProtoNet",
    "RecordedNoise",
    "Reptile",
    "ResNet12",
    "SeededNoise",
    "Splits",
    "TaskGradient",
    "TrainingError",
    "__version__",
    "evaluate",
    "fit",
    "load_run",
    "open_dataset",
    "register",
    "split_classes",
]

_MODULES = {
    "data": ("ArrayImages", "Episode", "EpisodeSampler", "Splits", "open_dataset", "split_classes"),
    "learners": (
        "MAML",
        "GradientLearner",
        "Learner",
        "MatchingNet",
        "MetaSGD",
        "MetricLearner",
        "Outcome",
        "ProtoNet",
        "ABML",
        "FOMAML",
        "MetaLSTM",
        "Platipus",
        "Reptile",
        "TaskGradient",
    ),
    "networks": ("Conv4", "ResNet12"),
    "noise": ("CounterNoise", "NoiseSource", "RecordedNoise", "SeededNoise"),
    "perturbations": ("MetaDropout", "NoPerturbation", "Perturbation"),
    "registry": ("register",),
    "training.fit": ("LoadedRun", "evaluate", "fit", "load_run"),
}
"""Where the names above are; they are imported when first used, as PyTorch takes its time to load."""


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            value = globals()[name] = getattr(import_module(f"metadropout.{module}"), name)
            return value
    raise AttributeError(f"module 'metadropout' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
