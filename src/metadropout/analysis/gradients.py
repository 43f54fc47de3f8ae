"""What leaving out the second derivative of normalisation does to the meta-gradient: its size, direction and noise.

Each task gives two gradients of the same weights on the same images and noise: the exact one, and the public code's,
which holds what comes back through batch normalisations constant. Over many tasks their dot products tell how far each
points in one direction (signal) and how far it scatters (noise), and how far the two means agree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from metadropout.analysis.plots import pyplot, save_figure
from metadropout.config import Config, build_learner, method_name, refuse_custom_parts
from metadropout.data import Episode
from metadropout.errors import ConfigError
from metadropout.learners import GradientLearner
from metadropout.noise import SOURCES, mix_seed
from metadropout.recipes import load_recipe
from metadropout.runs.folder import open_run
from metadropout.training.fit import load_run
from metadropout.training.loop import TRAINING, episode_sampler, open_splits

GRADIENTS = {"exact": True, "public": False}
"""Which of them keeps the second derivative of normalisation."""

COLOURS = {"exact": "tab:blue", "public": "tab:orange"}


@dataclass(frozen=True)
class Estimate:
    """A quantity with its standard error over tasks, by the jackknife."""

    value: float
    error: float

    @property
    def is_known(self) -> bool:
        """Whether there is such a number: without a signal there is no direction."""
        return math.isfinite(self.value + self.error)

    def __str__(self) -> str:
        return f"{self.value:.4f} ± {1.96 * self.error:.4f}"


@dataclass(frozen=True)
class PartGradients:
    """How the two gradients of one part of the learner compare, at one state."""

    method: str
    iteration: int
    part: str
    """"network", its "head", the "perturbation", or "learner" for parameters of its own."""
    tasks: int
    snr: dict[str, Estimate]
    """Signal to noise: squared norm of the mean gradient over the variance per task, by gradient."""
    cosine: Estimate
    """Between the two mean gradients."""
    task_cosine: float
    """Between the two gradients of one task, on average."""
    size: Estimate
    """Norm of the public code's mean gradient, relative to the exact one's."""

    def to_dict(self) -> dict[str, Any]:
        """Return all of it for a file."""
        return asdict(self)


@dataclass(frozen=True)
class State:
    """Weights whose gradients are looked at."""

    learners: dict[str, GradientLearner]
    """With each of the two gradients, and the same weights."""
    config: Config
    iteration: int
    episodes: Callable[[int, int], Episode]


def states_of(name: str) -> list[str]:
    """Return the states of a run that are there, in order; of a recipe there are only the initial weights."""
    return open_run(Path(name)).states() if (Path(name) / "config.yaml").is_file() else ["last"]


def open_state(name: str, which: str = "last") -> State:
    """Open a state of a run, or a recipe's initial weights.

    Args:
        name: a run's folder, or a recipe.
        which: the run's state: see `Run.state`.
    """
    weights = None
    if (Path(name) / "config.yaml").is_file():
        loaded = load_run(name, state=which)
        refuse_custom_parts(loaded.config)
        config, iteration, splits, weights = loaded.config, loaded.iteration, loaded.splits, loaded.learner.state_dict()
        assert splits is not None
    else:
        config, iteration = load_recipe(name), 0
        splits = open_splits(config)
    learners = {}
    for gradient, exact in GRADIENTS.items():
        options = {**config.learner, "norm_second_order": exact}
        if config.learner.get("first_order") or "norm_second_order" not in config.learner:
            raise ConfigError(
                f"{name}: its learner does not differentiate inner steps, so there is nothing to leave out"
            )
        learner = build_learner(replace(config, learner=options), splits.train.image_shape)
        assert isinstance(learner, GradientLearner)
        learner.load_state_dict(weights or learner.state_dict())
        learners[gradient] = learner
    return State(learners, config, iteration, episode_sampler(config, splits, "train", TRAINING))


def measure_gradients(
    state: State, *, tasks: int, seed: int = 0, on_task: Callable[[], None] = lambda: None
) -> list[PartGradients]:
    """Compare the two gradients of a state over training tasks, part by part.

    Args:
        state: the weights.
        tasks: how many; the standard errors fall with their root.
        seed: of the tasks and their noise.
        on_task: called after each, for showing progress.
    """
    if tasks < 3:
        raise ConfigError(f"--tasks is {tasks}, but a signal and its noise need at least 3")
    parts = _parts(state.learners["exact"])
    found: dict[str, dict[str, list[NDArray[np.float32]]]] = {part: {g: [] for g in GRADIENTS} for part in parts}
    source = SOURCES[state.config.training.noise]
    for task in range(tasks):
        # Tasks of another seed than the run's own, so that none was trained on just before.
        episode = state.episodes(mix_seed(seed) % 2**31, task)
        for which, learner in state.learners.items():
            gradients = learner.task_gradient(episode, generator=source(seed, TRAINING, task)).gradients
            for part, members in parts.items():
                found[part][which].append(_flat(gradients, members))
        on_task()
    method = method_name(state.config)
    return [_compare(method, state.iteration, part, gradients) for part, gradients in found.items()]


def plot_gradients(measured: Sequence[PartGradients], path: Path) -> Path | None:
    """Draw signal to noise over training for each part and method, and the direction below; None without matplotlib."""
    if (plt := pyplot()) is None:
        return None
    parts = list(dict.fromkeys(m.part for m in measured))
    methods = list(dict.fromkeys(m.method for m in measured))
    figure, axes = plt.subplots(
        2, len(parts), figsize=(3.4 * len(parts) + 0.6, 5.6), layout="constrained", squeeze=False, sharex=True
    )
    for column, part in enumerate(parts):
        above, below = axes[:, column]
        for method, style in zip(methods, ("-", "--", ":", "-."), strict=False):
            here = sorted((m for m in measured if (m.part, m.method) == (part, method)), key=lambda m: m.iteration)
            if not here:
                continue
            x = [m.iteration for m in here]
            for which, colour in COLOURS.items():
                values = [m.snr[which].value for m in here]
                errors = [1.96 * m.snr[which].error for m in here]
                label = f"{method}, {which} gradient"
                above.errorbar(x, values, errors, color=colour, linestyle=style, marker="o", capsize=2, label=label)
            known = [m for m in here if m.cosine.is_known]
            x, values = [m.iteration for m in known], [m.cosine.value for m in known]
            errors = [1.96 * m.cosine.error for m in known]
            below.errorbar(x, values, errors, color="tab:green", linestyle=style, marker="o", capsize=2, label=method)
        above.set(title=part, ylabel="signal to noise per task" if column == 0 else None)
        above.set_yscale("symlog", linthresh=1e-3)
        below.set(xlabel="iteration", ylabel="cosine of the two means" if column == 0 else None, ylim=(-0.1, 1.15))
        for axis in (above, below):
            axis.grid(alpha=0.3)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, fontsize=8)
    save_figure(figure, path)
    plt.close(figure)
    return path


def _parts(learner: GradientLearner) -> dict[str, list[str]]:
    """Put the meta-learned parameters into the parts that play different roles."""
    head = f"network.{learner.layers().head}."
    parts: dict[str, list[str]] = {}
    for name in (name for name, p in learner.named_parameters() if p.requires_grad):
        section = "head" if name.startswith(head) else name.partition(".")[0]
        parts.setdefault(section if section in ("network", "head", "perturbation") else "learner", []).append(name)
    return parts


def _flat(gradients: Mapping[str, Tensor], names: Sequence[str]) -> NDArray[np.float32]:
    return torch.cat([gradients[name].detach().flatten().float().cpu() for name in names]).numpy()


def _compare(
    method: str, iteration: int, part: str, gradients: Mapping[str, Sequence[NDArray[np.float32]]]
) -> PartGradients:
    exact, public = (np.stack(gradients[which]).astype(np.float64) for which in GRADIENTS)
    n = len(exact)
    products = {"ee": exact @ exact.T, "pp": public @ public.T, "ep": exact @ public.T}

    def estimate(of: Callable[[Mapping[str, NDArray[np.float64]]], float]) -> Estimate:
        without = [of({key: _leave_out(matrix, i) for key, matrix in products.items()}) for i in range(n)]
        return Estimate(float(of(products)), float(np.sqrt((n - 1) * np.var(without))))

    norms = np.sqrt(np.diag(products["ee"]) * np.diag(products["pp"]))
    return PartGradients(
        method,
        iteration,
        part,
        n,
        {"exact": estimate(lambda p: _snr(p["ee"])), "public": estimate(lambda p: _snr(p["pp"]))},
        estimate(lambda p: _mean_product(p["ep"]) / (_root(_mean_product(p["ee"])) * _root(_mean_product(p["pp"])))),
        float(np.mean(np.diag(products["ep"]) / np.maximum(norms, 1e-300))),
        estimate(lambda p: _root(_mean_product(p["pp"])) / _root(_mean_product(p["ee"]))),
    )


def _mean_product(products: NDArray[np.float64]) -> float:
    """Estimate the product of two means without bias: over pairs of different tasks."""
    n = len(products)
    return float((products.sum() - np.trace(products)) / (n * (n - 1)))


def _snr(products: NDArray[np.float64]) -> float:
    """Estimate squared norm of the mean over the variance of one task."""
    signal = _mean_product(products)
    return signal / (float(np.trace(products)) / len(products) - signal)


def _root(value: float) -> float:
    """Return a root; of what is not positive, because too few tasks show no signal, not a number."""
    return float(np.sqrt(value)) if value > 0 else float("nan")


def _leave_out(matrix: NDArray[np.float64], i: int) -> NDArray[np.float64]:
    keep = np.arange(len(matrix)) != i
    return matrix[np.ix_(keep, keep)]


def as_rows(measured: Sequence[PartGradients]) -> Iterator[list[str]]:
    """Yield the rows of a table of what was measured."""
    for m in measured:
        yield [
            f"{m.method}, {m.iteration} iterations: {m.part}",
            str(m.snr["exact"]),
            str(m.snr["public"]),
            _shown(m.cosine),
            f"{m.task_cosine:.3f}",
            _shown(m.size),
        ]


HEADINGS = ["", "signal / noise, exact", "public", "cosine of means", "of one task", "relative size"]


def _shown(estimate: Estimate) -> str:
    return f"{estimate.value:.2f} ± {1.96 * estimate.error:.2f}" if estimate.is_known else "no signal"
