"""How a trained run's accuracy depends on the noise samples per inner step and on the number of inner steps."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from metadropout.analysis.figures.base import FigureData, listing
from metadropout.analysis.figures.drawing import COLOURS, new_figure
from metadropout.data import EpisodeSampler
from metadropout.evaluation import Evaluation, evaluate
from metadropout.learners import GradientLearner
from metadropout.learners.base import TEST_SAMPLES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SAMPLES = (1, 3, 10, 30)
STEPS = (0, 1, 2, 3, 5, 7, 10)


@dataclass(frozen=True)
class Curve:
    """Accuracies of one learner over one setting."""

    learner: str
    values: tuple[int, ...]
    """The setting's values."""
    mean: tuple[float, ...]
    interval: tuple[float, ...]
    """Half the width of the 95 % confidence interval over episodes."""

    def said(self, of: str) -> str:
        """Say first and last value in words."""
        ends = [f"{100 * self.mean[i]:.1f} % with {self.values[i]}" for i in (0, -1)]
        return f"{self.learner} {' and '.join(dict.fromkeys(ends))} {of}"


@dataclass(frozen=True)
class AccuracyData(FigureData):
    """Curves over S, the noise samples, and over K, the inner steps; all on the same episodes."""

    over_samples: tuple[Curve, ...]
    over_steps: tuple[Curve, ...]
    trained_steps: tuple[int, ...]
    """The number of inner steps that each learner was trained with."""
    way: int
    shot: int
    episodes: int
    seed: int

    @property
    def title(self) -> str:
        return "Accuracy over noise samples and inner steps"

    @property
    def caption(self) -> str:
        return (
            f"Accuracy on {self.episodes} {self.way}-way {self.shot}-shot tasks of unseen classes, the same ones "
            "everywhere, with the 95 % interval. Left: over the noise samples of an inner step, with the steps of "
            f"training. Right: over the inner steps, with {TEST_SAMPLES} samples; the vertical line is what training "
            f"used. {self._results()}"
        )

    @property
    def alt(self) -> str:
        return f"Two line charts of accuracy. {self._results()}"

    def _results(self) -> str:
        said = [curve.said("samples") for curve in self.over_samples if len(curve.values) > 1]
        return listing(said + [curve.said("steps") for curve in self.over_steps]) + "."


def accuracy_over_settings(
    learners: Mapping[str, GradientLearner],
    sampler: EpisodeSampler,
    *,
    episodes: int = 50,
    samples: Sequence[int] = SAMPLES,
    steps: Sequence[int] = STEPS,
    seed: int = 0,
    threads: int = 1,
    on_episode: Callable[[], None] = lambda: None,
) -> AccuracyData:
    """Evaluate learners with several numbers of noise samples and of inner steps.

    Args:
        learners: what to compare, by the names to be shown; they are left unchanged.
        sampler: where the episodes come from.
        episodes: how many for each setting.
        samples: noise samples per step; learners without noise take one.
        steps: inner steps.
        seed: of the noise.
        threads: episodes side by side.
        on_episode: called after each episode, for showing progress.
    """
    over_samples, over_steps = [], []
    for name, learner in learners.items():
        results = _Results(learner, sampler, episodes, seed, threads, on_episode)
        used = tuple(dict.fromkeys(learner.samples_used(number) for number in samples))
        over_samples.append(_curve(name, used, [results(number, learner.steps) for number in used]))
        over_steps.append(_curve(name, tuple(steps), [results(TEST_SAMPLES, number) for number in steps]))
    trained = tuple(learner.steps for learner in learners.values())
    shape = sampler.way, sampler.shot
    return AccuracyData(tuple(over_samples), tuple(over_steps), trained, *shape, episodes, seed)


class _Results:
    """Evaluates a copy of a learner in one setting after the other, each setting once."""

    def __init__(
        self,
        learner: GradientLearner,
        sampler: EpisodeSampler,
        episodes: int,
        seed: int,
        threads: int,
        on_episode: Callable[[], None],
    ) -> None:
        self.learner, self.sampler, self.episodes = copy.deepcopy(learner), sampler, episodes
        self.seed, self.threads, self.on_episode = seed, threads, on_episode
        self.done: dict[tuple[int, int], Evaluation] = {}

    def __call__(self, mc_samples: int, steps: int) -> Evaluation:
        key = self.learner.samples_used(mc_samples), steps
        if key not in self.done:
            self.learner.steps = steps
            self.done[key] = evaluate(
                self.learner,
                self.sampler,
                episodes=self.episodes,
                mc_samples=mc_samples,
                seed=self.seed,
                threads=self.threads,
                on_episode=self.on_episode,
            )
        return self.done[key]


def settings_to_evaluate(
    learner: GradientLearner, samples: Sequence[int] = SAMPLES, steps: Sequence[int] = STEPS
) -> int:
    """Return how many evaluations `accuracy_over_settings` makes of a learner."""
    pairs = [(learner.samples_used(number), learner.steps) for number in samples]
    return len({*pairs, *[(learner.samples_used(TEST_SAMPLES), number) for number in steps]})


def _curve(name: str, values: tuple[int, ...], results: Sequence[Evaluation]) -> Curve:
    return Curve(name, values, tuple(r.mean for r in results), tuple(r.interval for r in results))


def draw_accuracies(data: AccuracyData) -> Figure:
    """Draw accuracy over samples at the left, over steps at the right."""
    figure = new_figure(8.5, 3.4)
    left, right = figure.subplots(1, 2)
    for number, colour in zip(range(len(data.over_steps)), COLOURS, strict=False):
        _draw(left, data.over_samples[number], colour, number)
        _draw(right, data.over_steps[number], colour, number)
        right.axvline(data.trained_steps[number], color="#888888", linewidth=1, linestyle=":")
    ticks = sorted({value for curve in data.over_samples for value in curve.values})
    left.set_xscale("log")
    left.set_xticks(ticks, [str(value) for value in ticks])
    left.minorticks_off()
    left.set_xlabel("noise samples per inner step, S", fontsize=9)
    right.set_xlabel("inner steps, K", fontsize=9)
    left.set_ylabel("accuracy, %", fontsize=9)
    for axis in (left, right):
        axis.grid(alpha=0.3)
        axis.tick_params(labelsize=8)
    right.legend(fontsize=8, loc="lower right")
    figure.suptitle(f"{data.title}, {data.way}-way {data.shot}-shot", fontsize=11)
    return figure


def _draw(axis: Axes, curve: Curve, colour: str, number: int) -> None:
    mean, interval = torch.tensor(curve.mean) * 100, torch.tensor(curve.interval) * 100
    style = {"marker": "osD^"[number % 4], "markersize": 5, "capsize": 3, "color": colour, "label": curve.learner}
    if len(curve.values) == 1:  # a learner without noise: one value, the same for any number of samples
        axis.axhline(float(mean), color=colour, linestyle="--", label=f"{curve.learner} (no noise)")
        return
    axis.errorbar(curve.values, mean, interval, **style)  # type: ignore[arg-type]
