"""Robustness: the accuracy of adapted models on query images that were moved to fool them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field, FiniteFloat, TypeAdapter

from metadropout.config import build_learner, resolve_device
from metadropout.data import Episode, EpisodeSampler, Splits
from metadropout.errors import ConfigError, MetadropoutError, RunFileError
from metadropout.evaluation import Evaluation
from metadropout.files import write_atomically
from metadropout.learners import Classifier, Learner, accuracy
from metadropout.learners.base import TEST_SAMPLES
from metadropout.noise import SOURCES, mix_seed
from metadropout.ops import kernels
from metadropout.robustness.attacks import NORMS, Norm, random_movement, strongest_attack
from metadropout.runs.folder import Run
from metadropout.runs.reading import read_checked
from metadropout.training.checkpoints import read_checkpoint
from metadropout.training.loop import TESTING, load_state

GREY_RADII: dict[Norm, tuple[float, ...]] = {
    "l1": (0, 20, 40, 60, 80, 100),
    "l2": (0, 1, 2, 3, 4, 5),
    "linf": (0, 0.02, 0.04, 0.06, 0.08, 0.1),
}
"""The paper's radii for Omniglot, where most of an image is empty paper."""

COLOUR_RADII: dict[Norm, tuple[float, ...]] = {
    "l1": (0, 2.4, 4.8, 7.2, 9.6, 12),
    "l2": (0, 0.1, 0.2, 0.3, 0.4, 0.5),
    "linf": (0, 0.004, 0.008, 0.012, 0.016, 0.02),
}
"""Radii for photographs. The paper's for miniImageNet are not known, so these are ours."""

ATTACK = 1
"""Key that keeps the attack's random starts apart from the noise of the inner steps."""

RadiiByNorm = Mapping[Norm, Sequence[float]]
"""For each norm its radii in rising order. A radius starts from the one below, so results depend on all of them."""

Curves = dict[Norm, dict[float, Evaluation]]
"""Accuracies of a run by norm and radius; radius 0 is the clean accuracy."""


@dataclass(frozen=True)
class Attack:
    """How models are attacked.

    Args:
        radii: for each norm those that are asked for, above 0 and in rising order.
        steps: steps of projected gradient descent.
        restarts: random starts at each radius.
        mc_samples: noise samples per inner step when adapting.
        seed: seed of the episodes, of the noise and of the random starts.
    """

    radii: RadiiByNorm
    steps: int = 200
    restarts: int = 1
    mc_samples: int = TEST_SAMPLES
    seed: int = 0

    def on(
        self,
        classify: Classifier,
        episode: Episode,
        number: int,
        norm: Norm,
        radii: Sequence[float],
        *,
        jointly: bool,
        on_radius: Callable[[], None] = lambda: None,
    ) -> dict[float, float]:
        """Attack the query images of an episode; return the accuracy that is left at each radius.

        Each radius starts also from the result of the one below it (the smallest from the images themselves), which
        lies inside its ball: so a larger radius is never a weaker attack. It depends on the radii below, therefore.

        Args:
            classify: the model adapted to the episode.
            episode: the task.
            number: its number, on which the random starts depend.
            norm: which ball.
            radii: its radii, above 0 and in rising order.
            jointly: whether the answer for one image depends on the others.
            on_radius: called after each radius, for showing progress.
        """
        x, y = episode.query_x, episode.query_y
        left: dict[float, float] = {}
        below = torch.zeros_like(x)
        for radius in radii:
            seeds = [mix_seed(self.seed, TESTING, ATTACK, number, NORMS.index(norm), k) for k in range(self.restarts)]
            drawn = [random_movement(x, norm, radius, torch.Generator().manual_seed(seed)) for seed in seeds]
            result = strongest_attack(
                classify, x, y, norm=norm, radius=radius, steps=self.steps, starts=[below, *drawn], jointly=jointly
            )
            left[radius], below = result.accuracy, result.moved
            on_radius()
        return left


Fraction = Annotated[float, Field(ge=0, le=1)]
Radius = Annotated[FiniteFloat, Field(gt=0)]


@dataclass
class EpisodeResult:
    """What is left of a run's accuracy on one episode."""

    clean: Fraction
    attacked: dict[Norm, dict[Radius, Fraction]] = field(default_factory=dict)
    """Accuracy by norm and radius."""


@dataclass(frozen=True)
class AttackRequest:
    """What the latest command wants to be measured in one norm."""

    episodes: Annotated[int, Field(ge=1, lt=2**31)]
    radii: tuple[Radius, ...]


@dataclass
class AttackResults:
    """What has been measured of a run so far, in a JSON file that is rewritten after each attack."""

    run: str
    measured: dict[str, int | str]
    """What the accuracies depend on, radii aside."""
    episodes: list[EpisodeResult] = field(default_factory=list)
    state: str = "last"
    """Which of the run's checkpoints was attacked."""
    asked: dict[Norm, AttackRequest] = field(default_factory=dict)
    """By norm; written before the first attack, so that one that was stopped is known. Earlier versions wrote none."""

    def radii(self, norm: Norm) -> set[float]:
        """Return the radii that were measured on any episode."""
        return {radius for episode in self.episodes for radius in episode.attacked.get(norm, {})}

    def done(self, norm: Norm) -> int:
        """Return how many of the episodes that are asked for have been attacked with all radii that are asked for."""
        wanted = set(self.asked[norm].radii)
        first = self.episodes[: self.asked[norm].episodes]
        return sum(norm in episode.attacked and wanted <= episode.attacked[norm].keys() for episode in first)

    def unfinished(self) -> dict[Norm, AttackRequest]:
        """Return what was asked for and has not been measured to its end."""
        return {norm: asked for norm, asked in self.asked.items() if self.done(norm) < asked.episodes}

    def curves(self, radii: RadiiByNorm, episodes: int) -> Curves:
        """Return the accuracies on the first episodes at some radii, the clean one first."""
        first = self.episodes[:episodes]
        return {
            norm: {0.0: Evaluation([e.clean for e in first])}
            | {radius: Evaluation([e.attacked[norm][radius] for e in first]) for radius in chosen}
            for norm, chosen in radii.items()
        }

    def write(self, path: Path) -> None:
        """Write the file atomically."""
        try:
            write_atomically(path, _RESULTS.dump_json(self) + b"\n")
        except OSError as error:
            raise MetadropoutError(f"{path}: cannot be written: {error.strerror}; what it held is kept") from None


DAMAGED = "delete it and attack again, or choose another --out"
_RESULTS = TypeAdapter(AttackResults)
_NEEDED = {"protocol": str, "iteration": int, "steps": int, "restarts": int, "mc_samples": int, "seed": int}
"""What attacks of all versions say of how they were measured."""


def read_attacks(path: Path) -> AttackResults:
    """Read what `metadropout attack` has measured.

    Raises:
        RunFileError: if the file is damaged or something else.
    """
    results = read_checked(path, _RESULTS, DAMAGED)
    for name, kind in _NEEDED.items():
        if not isinstance(results.measured.get(name), kind):
            raise RunFileError(f"{path}: is damaged: measured.{name} is missing or of another kind; {DAMAGED}")
    return results


def open_attacks(path: Path, run: str, measured: dict[str, int | str], state: str = "last") -> AttackResults:
    """Read what has been measured before, if anything, and refuse what was measured in another way."""
    if not path.exists():
        return AttackResults(run, measured, state=state)
    results = read_attacks(path)
    for name, value in measured.items():
        if name == "data" and name not in results.measured:  # written by a version that did not record it
            results.measured[name] = value
        if (before := results.measured.get(name)) != value:
            raise ConfigError(
                f"{path}: was measured with {name} {before}, but now it is {value}; "
                "choose another --out or delete the file"
            )
    return results


class Target:
    """A run that is being attacked: its learner, and what has been measured so far.

    Args:
        run: the run.
        state: which of its checkpoints, "last" or "best".
        splits: its data set.
        sampler: the episodes.
        attack: how it is attacked.
        folder: where the results are kept.
    """

    def __init__(
        self, run: Run, state: str, splits: Splits, sampler: EpisodeSampler, attack: Attack, folder: Path
    ) -> None:
        self.name, self.sampler, self.attack = run.folder.resolve().name, sampler, attack
        self.source, self.convolutions = SOURCES[run.config.training.noise], run.config.training.convolutions or {}
        self.device = resolve_device(run.config.machine)
        self.learner: Learner = build_learner(run.config, splits.train.image_shape).to(self.device)
        self.iteration = load_state(run, state, self.learner).iteration
        self.path = folder / f"attack-{self.name}.json"
        measured: dict[str, int | str] = {
            "protocol": run.config.episode.protocol,
            "iteration": self.iteration,
            "weights": read_checkpoint(run.state(state))[1]["sha256"][:16],
            "steps": attack.steps,
            "restarts": attack.restarts,
            "mc_samples": self.learner.samples_used(attack.mc_samples),
            "seed": attack.seed,
            "data": splits.identity.digest,
        }
        self.results = open_attacks(self.path, self.name, measured, state)

    def ask(self, radii_by_norm: RadiiByNorm, episodes: int) -> None:
        """Write down what is to be measured, so that what is missing is known after a stop."""
        asked = {norm: AttackRequest(episodes, tuple(radii)) for norm, radii in radii_by_norm.items() if radii}
        if asked != {norm: self.results.asked.get(norm) for norm in asked}:
            self.results.asked |= asked
            self.results.write(self.path)

    def missing(self, number: int, radii_by_norm: RadiiByNorm) -> RadiiByNorm:
        """Return what is to be attacked on an episode: all radii of a norm, or none of them if that has been done."""
        if number >= len(self.results.episodes):
            return radii_by_norm
        done = self.results.episodes[number].attacked
        return {norm: radii for norm, radii in radii_by_norm.items() if set(radii) != done.get(norm, {}).keys()}

    def measure(self, number: int, radii_by_norm: RadiiByNorm, on_radius: Callable[[], None] = lambda: None) -> None:
        """Adapt to an episode, attack with all that is missing, and write the results after each norm.

        Args:
            number: the episode; those before it are done.
            radii_by_norm: the radii, the same ones for all episodes and runs.
            on_radius: called after each radius, for showing progress.
        """
        missing = self.missing(number, radii_by_norm)
        if number < len(self.results.episodes) and not missing:
            return
        episode = self.sampler.raw(0, number).to(self.device)
        with torch.no_grad(), kernels.using(self.convolutions):
            classify = self.learner.adapt(
                episode.support_x,
                episode.support_y,
                inductive=episode.inductive,
                mc_samples=self.attack.mc_samples,
                generator=self.source(mix_seed(self.attack.seed, TESTING), number),
            )
            clean = float(accuracy(classify(episode.query_x), episode.query_y))
        if number == len(self.results.episodes):
            self.results.episodes.append(EpisodeResult(clean))
        for norm, radii in missing.items():
            jointly = not episode.inductive
            with kernels.using(self.convolutions):
                left = self.attack.on(classify, episode, number, norm, radii, jointly=jointly, on_radius=on_radius)
            self.results.episodes[number].attacked[norm] = left
            self.results.write(self.path)


def common_radii(targets: Sequence[Target]) -> RadiiByNorm:
    """Return for each norm all radii that are asked for or have been measured of any run.

    The same radii for all, because a figure that started from more radii below is that of a stronger attack.
    """
    return {
        norm: sorted({*radii, *(radius for target in targets for radius in target.results.radii(norm))})
        for norm, radii in targets[0].attack.radii.items()
    }
