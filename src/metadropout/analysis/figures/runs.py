"""Figures of trained runs: opening runs, and each figure by its name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from metadropout.analysis.figures.accuracies import accuracy_over_settings, draw_accuracies, settings_to_evaluate
from metadropout.analysis.figures.activations import activation_samples, draw_activations, draw_frames
from metadropout.analysis.figures.base import FigureData, FigureError
from metadropout.analysis.figures.boundaries import (
    boundaries_over_steps,
    boundaries_over_tasks,
    decision_boundaries,
    draw_boundaries,
)
from metadropout.analysis.figures.decoder import DecoderOptions
from metadropout.analysis.figures.drawing import save_gif, save_png
from metadropout.analysis.figures.index import FigureEntry, FigureRequest, read_index
from metadropout.analysis.figures.multipliers import draw_multipliers, multiplier_maps
from metadropout.analysis.figures.noise import draw_noise, noise_over_training
from metadropout.analysis.figures.reconstructions import draw_reconstructions, reconstructions
from metadropout.config import Config, build_learner, method_name, resolve_device
from metadropout.data import Episode, EpisodeSampler, Splits
from metadropout.errors import ConfigError
from metadropout.learners import GradientLearner
from metadropout.noise import mix_seed
from metadropout.runs.folder import Run
from metadropout.training.checkpoints import read_checkpoint
from metadropout.training.loop import TESTING, episode_sampler, load_state, open_splits
from metadropout.training.metrics import read_metrics
from metadropout.training.workers import threads_to_use

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TASKS = 4
"""How many tasks the figure over tasks shows; the paper's first draft shows four."""


@dataclass(frozen=True)
class Subject:
    """A trained run, opened for looking into it."""

    run: Run
    label: str
    learner: GradientLearner
    splits: Splits
    iteration: int
    checkpoint: Path
    state: str
    """Which of its checkpoints: "last" or "best"."""

    @property
    def unfinished(self) -> bool:
        """Whether its training has not come to its end."""
        return self.iteration < self.run.config.training.iterations

    def task(self, number: int, seed: int, way: int | None = None, shot: int | None = None) -> Episode:
        """Draw a task of test classes, of the run's own kind unless told otherwise; the same one for all runs."""
        images, episode = self.splits.test, self.run.config.episode
        shot = shot or episode.shot
        query = max(1, min(episode.query, int(images.class_sizes.min()) - shot))
        sampler = EpisodeSampler(images, way=way or episode.way, shot=shot, query=query, seed=mix_seed(seed, TESTING))
        return sampler(0, number).to(next(self.learner.parameters()).device)


class Display(Protocol):
    """Shows how long work goes on."""

    def advance(self) -> None:
        """Called whenever one more part is done."""


class NoDisplay:
    """A display that shows nothing."""

    def advance(self) -> None:
        """Show nothing."""


@dataclass(frozen=True)
class FigureOptions:
    """What can be chosen for figures of runs.

    Args:
        out: folder of the pictures.
        seed: of tasks, noise, t-SNE and decoder.
        episodes: test tasks for each setting of the figure of accuracies.
        decoder_iterations: training steps of the decoder.
        display: shows the progress of long work, given its name and its number of parts.
    """

    out: Path
    seed: int = 0
    episodes: int = 50
    decoder_iterations: int = DecoderOptions.iterations
    display: Callable[[str, int], AbstractContextManager[Display]] = lambda name, parts: nullcontext(NoDisplay())

    def words(self, state: str) -> tuple[str, ...]:
        """Return the arguments of `metadropout figures` that choose the same, folders aside."""
        usual = FigureOptions(self.out)
        chosen = {name: getattr(self, name) for name in ("seed", "episodes", "decoder_iterations")}
        given = [(name, value) for name, value in chosen.items() if value != getattr(usual, name)]
        given += [("state", state)] if state != "last" else []
        return tuple(word for name, value in given for word in (f"--{name.replace('_', '-')}", str(value)))


@dataclass(frozen=True)
class FigureKind:
    """A figure of trained runs: how it is computed and drawn."""

    summary: str
    compute: Callable[[Sequence[Subject], FigureOptions], Any]
    """From the runs to compare; figures of a single run look at the first."""
    draw: Callable[[Any], Figure]
    frames: Callable[[Any], Sequence[Figure]] | None = None
    """Draws the frames of an animation, where there is one."""
    packages: tuple[str, ...] = ("matplotlib",)


@dataclass(frozen=True)
class DrawnFigure:
    """A figure that has been drawn."""

    data: FigureData
    files: tuple[Path, ...]


def open_subjects(runs: Sequence[Run], state: str = "last") -> list[Subject]:
    """Open trained runs of the same data and way.

    Args:
        runs: one, or several to compare.
        state: "last" or "best".

    Raises:
        ConfigError: if they cannot be compared.
    """
    for other in runs[1:]:
        _check_comparable(runs[0], other)
    labels = [method_name(run.config) for run in runs]
    if len(set(labels)) < len(labels):
        labels = [run.folder.resolve().name for run in runs]
    return [_open(run, label, state) for run, label in zip(runs, labels, strict=True)]


def draw(
    names: Sequence[str], subjects: Sequence[Subject], options: FigureOptions
) -> Iterator[tuple[str, DrawnFigure | FigureError]]:
    """Compute and draw figures by their names, and list them in the folder's index, `figures.json`.

    Gives each name with what was made of it, or with the reason why it does not apply here.
    """
    options.out.mkdir(parents=True, exist_ok=True)
    index = read_index(options.out)
    asked = FigureRequest(
        tuple(str(subject.run.folder.resolve()) for subject in subjects), options.words(subjects[0].state)
    )
    index.pending |= dict.fromkeys(names, asked)
    index.write(options.out)
    for name in names:
        made: DrawnFigure | FigureError
        try:
            made = _make(name, subjects, options)
        except FigureError as reason:
            index.left_out[name] = str(reason)
            made = reason
        else:
            data, files, first = made.data, [file.name for file in made.files], subjects[0]
            index.figures[name] = FigureEntry(files, data.title, data.caption, data.alt, first.state, first.iteration)
            index.left_out.pop(name, None)
        del index.pending[name]
        index.write(options.out)
        yield name, made


def _make(name: str, subjects: Sequence[Subject], options: FigureOptions) -> DrawnFigure:
    kind = FIGURES[name]
    data = kind.compute(subjects, options)
    files = [options.out / f"{name}.png"]
    save_png(kind.draw(data), files[0])
    if kind.frames is not None:
        files.append(options.out / f"{name}.gif")
        save_gif(kind.frames(data), files[1])
    return DrawnFigure(data, tuple(files))


def _open(run: Run, label: str, state: str) -> Subject:
    checkpoint = run.state(state)
    splits = open_splits(run.config)
    run.check_tested_data(run.config, splits.identity, "test")
    learner = build_learner(run.config, splits.train.image_shape).to(resolve_device(run.config.machine))
    if not isinstance(learner, GradientLearner):
        raise ConfigError(f"{run.folder}: figures look into inner steps, and {type(learner).__name__} takes none")
    iteration = load_state(run, state, learner).iteration
    planned = run.config.training.iterations
    if iteration < planned:
        label = f"{label}, {iteration} of {planned} iterations"
    return Subject(run, label, learner, splits, iteration, checkpoint, state)


def _check_comparable(run: Run, other: Run) -> None:
    def data(config: Config) -> dict[str, Any]:
        return {key: value for key, value in config.data.items() if key not in ("directory", "download")}

    for what, of in (("data", data), ("way", lambda config: config.episode.way)):
        mine, its = of(run.config), of(other.config)
        if mine != its:
            raise ConfigError(f"{other.folder}: cannot be compared with {run.folder}: its {what} is {its}, not {mine}")


def _learners(subjects: Sequence[Subject]) -> dict[str, GradientLearner]:
    return {subject.label: subject.learner for subject in subjects}


def _two_classes(subjects: Sequence[Subject], options: FigureOptions, number: int = 0) -> Episode:
    """Draw a task as in the paper: two classes with two support images each."""
    return subjects[0].task(number, options.seed, way=2, shot=2)


def _tasks(subjects: Sequence[Subject], options: FigureOptions) -> FigureData:
    episodes = [_two_classes(subjects, options, number) for number in range(TASKS)]
    return boundaries_over_tasks(_learners(subjects), episodes, seed=options.seed)


def _multipliers(subjects: Sequence[Subject], options: FigureOptions) -> FigureData:
    first = subjects[0]
    # One query image of each of several classes stands first: a task's images lie class by class.
    images = first.task(0, options.seed).query_x
    order = torch.arange(len(images)).view(first.run.config.episode.way, -1).T.flatten()
    return multiplier_maps(first.label, first.learner, images[order])


def _activations(subjects: Sequence[Subject], options: FigureOptions) -> FigureData:
    images = subjects[0].task(0, options.seed).support_x
    return activation_samples(subjects[0].label, subjects[0].learner, images, seed=options.seed)


def _reconstructions(subjects: Sequence[Subject], options: FigureOptions) -> FigureData:
    first = subjects[0]
    decoder = DecoderOptions(iterations=options.decoder_iterations, seed=options.seed)
    with options.display("training the decoder", decoder.iterations) as display:
        return reconstructions(
            first.label,
            first.learner,
            first.splits.train,
            first.splits.test,
            cache=options.out / "decoder.safetensors",
            state=read_checkpoint(first.checkpoint)[1]["sha256"],
            options=decoder,
            seed=options.seed,
            on_step=display.advance,
        )


def _noise(subjects: Sequence[Subject], options: FigureOptions) -> FigureData:
    return noise_over_training({subject.label: read_metrics(subject.run.metrics) for subject in subjects})


def _accuracies(subjects: Sequence[Subject], options: FigureOptions) -> FigureData:
    first, learners = subjects[0], _learners(subjects)
    sampler = episode_sampler(first.run.config, first.splits, "test", TESTING, options.seed)
    evaluations = sum(settings_to_evaluate(learner) for learner in learners.values())
    with options.display("evaluating", evaluations * options.episodes) as display:
        return accuracy_over_settings(
            learners,
            sampler,
            episodes=options.episodes,
            seed=mix_seed(options.seed, TESTING),
            threads=threads_to_use(first.run.config.machine.threads),
            on_episode=display.advance,
        )


SKLEARN = ("matplotlib", "sklearn")
FIGURES: dict[str, FigureKind] = {
    "boundaries": FigureKind(
        "decision boundaries on one task",
        lambda s, o: decision_boundaries(_learners(s), _two_classes(s, o), seed=o.seed),
        draw_boundaries,
        packages=SKLEARN,
    ),
    "boundary-steps": FigureKind(
        "the same over the inner steps",
        lambda s, o: boundaries_over_steps(_learners(s), _two_classes(s, o), seed=o.seed),
        draw_boundaries,
        packages=SKLEARN,
    ),
    "boundary-tasks": FigureKind("the same on several tasks", _tasks, draw_boundaries, packages=SKLEARN),
    "multipliers": FigureKind("what layers are multiplied by, over the image", _multipliers, draw_multipliers),
    "activations": FigureKind("activations with and without noise", _activations, draw_activations, draw_frames),
    "reconstructions": FigureKind("perturbed features as images", _reconstructions, draw_reconstructions),
    "noise": FigureKind("the noise's strength over training", _noise, draw_noise),
    "accuracies": FigureKind("accuracy over noise samples and inner steps", _accuracies, draw_accuracies),
}
"""All figures of trained runs, by name."""
