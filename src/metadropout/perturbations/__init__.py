"""Perturbations, by the names that recipes use."""

from metadropout.perturbations.base import Pass, Perturbation
from metadropout.perturbations.metadropout import MetaDropout
from metadropout.perturbations.none import NoPerturbation

PERTURBATIONS: dict[str, type[Perturbation]] = {
    "none": NoPerturbation,
    "metadropout": MetaDropout,
}

__all__ = ["PERTURBATIONS", "MetaDropout", "NoPerturbation", "Pass", "Perturbation"]
