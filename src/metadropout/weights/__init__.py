"""Trained weights to use: sets that come with the package, or files that `metadropout export` has made of runs."""

from metadropout.weights.card import Card, Measured, Temperature
from metadropout.weights.sets import WeightSet, available, load_weights, save_weights, write_card

__all__ = [
    "Card",
    "Measured",
    "Temperature",
    "WeightSet",
    "available",
    "load_weights",
    "save_weights",
    "write_card",
]
