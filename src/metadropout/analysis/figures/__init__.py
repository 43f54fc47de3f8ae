"""The paper's figures: one function computes the data of each (arrays that describe themselves), another draws it."""

from metadropout.analysis.figures.accuracies import AccuracyData, accuracy_over_settings, draw_accuracies
from metadropout.analysis.figures.activations import ActivationData, activation_samples, draw_activations, draw_frames
from metadropout.analysis.figures.base import FigureData, FigureError
from metadropout.analysis.figures.boundaries import (
    BoundaryData,
    boundaries_over_steps,
    boundaries_over_tasks,
    decision_boundaries,
    draw_boundaries,
)
from metadropout.analysis.figures.decoder import DecoderOptions
from metadropout.analysis.figures.drawing import save_gif, save_png
from metadropout.analysis.figures.multipliers import MultiplierData, draw_multipliers, multiplier_maps
from metadropout.analysis.figures.noise import NoiseData, draw_noise, noise_over_training
from metadropout.analysis.figures.reconstructions import ReconstructionData, draw_reconstructions, reconstructions

__all__ = [
    "AccuracyData",
    "ActivationData",
    "BoundaryData",
    "DecoderOptions",
    "FigureData",
    "FigureError",
    "MultiplierData",
    "NoiseData",
    "ReconstructionData",
    "accuracy_over_settings",
    "activation_samples",
    "boundaries_over_steps",
    "boundaries_over_tasks",
    "decision_boundaries",
    "draw_accuracies",
    "draw_activations",
    "draw_boundaries",
    "draw_frames",
    "draw_multipliers",
    "draw_noise",
    "draw_reconstructions",
    "multiplier_maps",
    "noise_over_training",
    "reconstructions",
    "save_gif",
    "save_png",
]
