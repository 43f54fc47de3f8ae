"""Few-shot learning that learns how to perturb: Meta-dropout and its field of comparison."""

from metadropout.data import Episode, EpisodeSampler
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
    "TaskGradient",
    "TrainingError",
    "__version__",
    "evaluate",
    "fit",
    "load_run",
    "register",
]
