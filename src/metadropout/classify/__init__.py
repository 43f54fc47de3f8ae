"""Classifying images of your own from a few examples of each class, with trained weights."""

from metadropout.classify.estimator import FewShotClassifier
from metadropout.classify.module import AdaptedClassifier
from metadropout.classify.pictures import ImageLike, as_tensor

__all__ = ["AdaptedClassifier", "FewShotClassifier", "ImageLike", "as_tensor"]
