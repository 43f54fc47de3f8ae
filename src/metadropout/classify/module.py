"""An adapted classifier as a module: images in, logarithms of probabilities out; it can be saved and exported."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from metadropout.learners import GradientLearner, Learner
from metadropout.learners.base import Classifier, mean_log_probabilities
from metadropout.networks.functional import Normalisation
from metadropout.noise import NoiseSource
from metadropout.ops.normalisation import Statistics
from metadropout.perturbations import PerturbedNetwork

STATE = "state."


class AdaptedClassifier(nn.Module):
    """Gives the logarithms of the classes' probabilities, shape (n, classes), for images (n, channels, height, width).

    Its `state_dict()` holds the adapted weights and, in the inductive protocol, the statistics of the support images,
    for learners that adapt by gradient steps. Learners that compare images, such as prototypical networks, keep the
    support images' features as constants instead: these are a part of an exported model, but of no `state_dict()`.

    Args:
        learner: of which every class starts as it should; none of its weights are changed.
        x: support images.
        y: their class numbers.
        inductive: normalise each image by itself, with the statistics of the support images.
        mc_samples: noise samples per inner step; None means the learner's choice.
        generator: source of all randomness.
        temperature: what logits are divided by.
    """

    def __init__(
        self,
        learner: Learner,
        x: Tensor,
        y: Tensor,
        *,
        inductive: bool = True,
        mc_samples: int | None = None,
        generator: torch.Generator | NoiseSource | None = None,
        temperature: float = 1.0,
    ) -> None:
        super().__init__()
        self.inductive, self.temperature = inductive, temperature
        self._perturbed: list[PerturbedNetwork] = []  # in a list, so that its network is not taken for the module's
        self._classify: Classifier | None = None
        self._models: list[list[str]] = []
        self._norms: list[str] = []
        if not isinstance(learner, GradientLearner) or type(learner).classifier is not GradientLearner.classifier:
            self._classify = learner.adapt(x, y, inductive=inductive, mc_samples=mc_samples, generator=generator)
            return
        self._perturbed.append(learner.perturbed)
        noise = learner.noise_from(generator)
        for number, weights in enumerate(learner.adapted_models(x, y, learner.samples_used(mc_samples), noise)):
            kept = {name: w.detach() for name, w in weights.items() if not name.startswith(STATE)}
            self._models.append(list(kept))
            for name, tensor in kept.items():
                self.register_buffer(_key(number, name), tensor)
            if inductive:
                with torch.no_grad():
                    collected = learner.perturbed.statistics(kept, x)
                self._norms = list(collected)
                for name, statistics in collected.items():
                    self.register_buffer(_key(number, name, "mean"), statistics.mean.detach())
                    self.register_buffer(_key(number, name, "variance"), statistics.variance.detach())

    def forward(self, images: Tensor) -> Tensor:
        if self._classify is not None:
            logits = self._classify(images)
        else:
            logits = mean_log_probabilities([self._logits(number, images) for number in range(len(self._models))])
        return torch.log_softmax(logits / self.temperature, dim=1)

    @property
    def keeps_weights(self) -> bool:
        """Whether adapted weights are kept, so that the protocol can change without adapting again."""
        return self._classify is None

    def transductive(self, images: Tensor) -> Tensor:
        """Return what the classifier gives where images are normalised together, whatever its own protocol."""
        if not self.keeps_weights:
            raise ValueError("only learners that adapt by gradient steps can change the protocol after adapting")
        own, self.inductive = self.inductive, False
        try:
            return self.forward(images)
        finally:
            self.inductive = own

    def _logits(self, number: int, images: Tensor) -> Tensor:
        (perturbed,) = self._perturbed
        weights = {name: self.get_buffer(_key(number, name)) for name in self._models[number]}
        given = None
        if self.inductive:
            given = {
                name: Statistics(
                    self.get_buffer(_key(number, name, "mean")), self.get_buffer(_key(number, name, "variance"))
                )
                for name in self._norms
            }
        return perturbed.run(weights, images, perturbed.query_pass(weights), Normalisation(given=given))


def _key(number: int, name: str, part: str = "weight") -> str:
    """Return the name of a buffer, which may not contain dots."""
    return f"{part}-{number}-{name.replace('.', '/')}"
