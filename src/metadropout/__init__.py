"""Few-shot learning that learns how to perturb: Meta-dropout and its field of comparison."""

from metadropout.data import ArrayImages, Episode, EpisodeSampler, Splits, open_dataset, split_classes
from metadropout.errors import CheckpointError, ConfigError, DataError, MetadropoutError, TrainingError
from metadropout.learners import MAML, GradientLearner, Learner, MetaSGD, Outcome, TaskGradient
from metadropout.networks import Conv4, ResNet12
from metadropout.noise import NoiseSource, RecordedNoise, SeededNoise
from metadropout.perturbations import MetaDropout, NoPerturbation, Perturbation
from metadropout.registry import register
from metadropout.training.fit import LoadedRun, evaluate, fit, load_run

__version__ = "0.1.0"

__all__ = [
    "MAML",
    "ArrayImages",
    "CheckpointError",
    "ConfigError",
    "Conv4",
    "DataError",
    "Episode",
    "EpisodeSampler",
    "GradientLearner",
    "Learner",
    "LoadedRun",
    "MetaDropout",
    "MetaSGD",
    "MetadropoutError",
    "NoPerturbation",
    "NoiseSource",
    "Outcome",
    "Perturbation",
    "RecordedNoise",
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
