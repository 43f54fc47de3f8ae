"""The card of a set of weights: what it was trained on, how, and what was measured of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, FiniteFloat

from metadropout.config import Config, method_name

Protocol = Literal["inductive", "transductive"]
PROTOCOLS: tuple[Protocol, ...] = ("inductive", "transductive")
Side = Literal["train", "validation"]
"""Classes that are no test classes."""
Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[FiniteFloat, Field(ge=0)]
Count = Annotated[int, Field(ge=0, lt=2**63)]
Text = Annotated[str, Field(max_length=2000)]

DRAWINGS = ("omniglot", "glyphs")
"""Data sets of drawings, whose images are ink (1) on paper (0)."""

STARTS = {"mean": "mean of the head's rows", "rows": "head's rows in turn"}

LICENCES = {
    "omniglot": "Trained on Omniglot (Lake et al. 2015), which its authors publish under the MIT licence.",
    "cifar_fs": "Trained on classes of CIFAR-100 (Krizhevsky 2009), which names no licence; it is a part of the "
    "80 Million Tiny Images, photographs that were collected on the web.",
    "fc100": "Trained on classes of CIFAR-100 (Krizhevsky 2009), which names no licence; it is a part of the "
    "80 Million Tiny Images, photographs that were collected on the web.",
    "miniimagenet": "Trained on a part of ImageNet, whose images are for non-commercial research and education only.",
    "glyphs": "Trained on characters that this library draws itself.",
}
"""What users should know of the data; weights that ship with this package are under its own MIT licence."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What `evaluate` has measured in one protocol, on test classes and the tasks that the weights were made for."""

    protocol: Protocol
    accuracy: Share
    """Mean over episodes."""
    interval: Share
    """Half the width of its 95 % interval."""
    nll: Positive
    """Negative log-likelihood of the labels of query images."""
    ece: Share
    """Expected calibration error, before any temperature."""
    episodes: Count
    mc_samples: Count
    """Noise samples that were used; 1 for methods without noise."""

    def __str__(self) -> str:
        return f"{100 * self.accuracy:.2f} ± {100 * self.interval:.2f} %"


@dataclass(frozen=True, kw_only=True)
class Temperature:
    """What logits are divided by, so that probabilities tell how often answers are right, in one protocol.

    It was fitted on classes that are no test classes; what it does was measured on test classes.
    """

    protocol: Protocol
    value: Annotated[FiniteFloat, Field(gt=0, lt=1000)]
    fitted_on: Side
    """The classes that it was fitted on."""
    episodes: Count
    """How many tasks of these, and how many test tasks."""
    ece_before: Share
    ece_after: Share
    nll_before: Positive
    nll_after: Positive


@dataclass(frozen=True, kw_only=True)
class Card:
    """What somebody who uses a set of weights should know of it."""

    name: Text
    method: Text
    """Learner and perturbation, such as "MAML + Meta-dropout"."""
    description: Text
    data: Text
    """Name of the data set."""
    way: Count
    """Classes in a task of meta-training."""
    shot: Count
    query: Count
    """Query images per class in the tasks that were measured."""
    iterations: Count
    """Outer steps that the weights were trained for."""
    planned_iterations: Count
    """How many the run was to have."""
    seed: Count
    gradient: Text
    """How the meta-gradient was computed."""
    parameters: Count
    drawings: bool
    """Whether its images are ink (1) on paper (0), so that dark drawings on a light ground have to be inverted."""
    measured: tuple[Measured, ...]
    temperatures: tuple[Temperature, ...]
    other_ways: Literal["mean", "rows"] = "mean"
    """From where classes start best, where there are more or fewer of them than in training."""
    licence: Text
    version: Text
    """Of metadropout, by which the file was written."""
    checksum: Text = ""
    """SHA-256 of everything in the file; not a part of the card in the file, of course."""

    def result(self, protocol: Protocol) -> Measured | None:
        """Return what was measured in a protocol, None where nothing was."""
        return next((result for result in self.measured if result.protocol == protocol), None)

    def temperature(self, protocol: Protocol) -> float:
        """Return the temperature of a protocol, 1 where none was fitted."""
        return next((fitted.value for fitted in self.temperatures if fitted.protocol == protocol), 1.0)

    def to_markdown(self) -> str:
        """Write the card as a page of text."""
        progress = f"{self.iterations:,} outer steps".replace(",", " ")
        if self.iterations < self.planned_iterations:
            progress += f" of {self.planned_iterations:,} planned".replace(",", " ")
        lines = [
            f"# {self.name}",
            "",
            self.description,
            "",
            "| | |",
            "|---|---|",
            f"| method | {self.method} |",
            f"| data set | {self.data} |",
            f"| trained on | {self.way}-way {self.shot}-shot tasks, {progress}, seed {self.seed} |",
            f"| meta-gradient | {self.gradient} |",
            f"| parameters | {self.parameters:,} |".replace(",", " "),
            f"| images | {'drawings: ink = 1 on paper = 0' if self.drawings else 'photographs, 0 to 1'} |",
            f"| other numbers of classes | start from the {STARTS[self.other_ways]} |",
            f"| licence | MIT. {self.licence} |",
            f"| written by | metadropout {self.version} |",
            f"| SHA-256 | `{self.checksum}` |",
            "",
            f"Measured on test classes, {self.way}-way {self.shot}-shot, {self.query} query images per class:",
            "",
            "| protocol | accuracy | negative log-likelihood | calibration error | episodes | noise samples |",
            "|---|---|---|---|---|---|",
        ]
        for result in self.measured:
            calibration = f"{result.nll:.4f} | {100 * result.ece:.2f} %"
            lines.append(f"| {result.protocol} | {result} | {calibration} | {result.episodes} | {result.mc_samples} |")
        if self.temperatures:
            lines += [
                "",
                "`FewShotClassifier` divides logits by a temperature, fitted on other classes than the test classes,",
                "on which its effect was measured:",
                "",
                "| protocol | temperature | fitted on | calibration error before, after | NLL before, after |",
                "|---|---|---|---|---|",
            ]
        for fitted in self.temperatures:
            tasks = f"{fitted.episodes} tasks of {fitted.fitted_on} classes"
            ece = f"{100 * fitted.ece_before:.2f} %, {100 * fitted.ece_after:.2f} %"
            nll = f"{fitted.nll_before:.4f}, {fitted.nll_after:.4f}"
            lines.append(f"| {fitted.protocol} | {fitted.value:.3f} | {tasks} | {ece} | {nll} |")
        return "\n".join(lines) + "\n"


def describe(
    name: str,
    config: Config,
    *,
    iterations: int,
    parameters: int,
    version: str,
    measured: tuple[Measured, ...] = (),
    temperatures: tuple[Temperature, ...] = (),
) -> Card:
    """Return the card of weights that were trained with a configuration."""
    episode, data = config.episode, config.data["name"]
    return Card(
        name=name,
        method=method_name(config),
        description=config.description,
        data=data,
        way=episode.train_way or episode.way,
        shot=episode.train_shot or episode.shot,
        query=episode.query,
        iterations=iterations,
        planned_iterations=config.training.iterations,
        seed=config.seed,
        gradient=_gradient(config),
        parameters=parameters,
        drawings=data in DRAWINGS,
        measured=measured,
        temperatures=temperatures,
        licence=LICENCES.get(data, "The licence of the images that it was trained on decides."),
        version=version,
    )


def _gradient(config: Config) -> str:
    share = config.learner.get("norm_second_order", True)
    if config.learner.get("first_order"):
        return "first order: without the derivative of the inner gradients"
    if share in (False, 0):
        return "the public code's: without the second derivative of batch normalisation"
    return "exact" if share in (True, 1) else f"{share} of the second derivative of batch normalisation"
