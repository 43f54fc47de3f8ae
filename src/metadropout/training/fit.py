"""Training from Python: any learner, on any network and images, with all that the command line gives."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from metadropout.config import Config, EpisodeOptions, MachineOptions, TrainingOptions, custom_part, resolve_device
from metadropout.data import EpisodeSampler, ImageSet, Splits
from metadropout.errors import ConfigError
from metadropout.evaluation import Evaluation
from metadropout.evaluation import evaluate as evaluate_episodes
from metadropout.learners import Learner
from metadropout.noise import mix_seed
from metadropout.options import check_options
from metadropout.runs.folder import Run, open_run
from metadropout.training.distributed import joined
from metadropout.training.loop import TESTING, Result, load_state, open_parts, train
from metadropout.training.recording import Watcher
from metadropout.training.workers import threads_to_use

SECTIONS: dict[str, Any] = {"episode": EpisodeOptions, "training": TrainingOptions, "machine": MachineOptions}


def fit(
    learner: Learner,
    splits: Splits,
    folder: str | Path,
    *,
    seed: int = 0,
    description: str = "",
    watcher: Watcher | None = None,
    **options: Any,
) -> Result:
    """Meta-train any learner in a folder; a run that is there already is gone on with, to the same weights bit for bit.

    The folder gets checkpoints, metrics, plots and the configuration, as from `metadropout train`. Ctrl-C and SIGTERM
    save and stop; calling again goes on. Under torchrun all processes train together.

    Args:
        learner: what is trained, in place. Build it from a seed: a resumed run takes its weights from the checkpoint,
            but a new one must start from the same weights to be the same run.
        splits: training, validation and test classes: `open_dataset(...)`, or
            `split_classes(ArrayImages(images, labels))`.
        folder: the run's folder.
        seed: of all episodes and noise.
        description: what the run is, for its folder's README.
        watcher: shows how it goes; by default a progress bar.
        **options: those of the sections episode, training and machine, by their names: iterations, way, shot, query,
            meta_batch, meta_lr, threads and so on; `metadropout options training` lists them.

    Returns:
        The run, how far it came, and which signal stopped it, if one did.
    """
    from metadropout.cli.train import show_training  # noqa: PLC0415 (the display is a part of the command line)

    config = python_config(learner, seed, description, options)
    with joined() as world:
        if watcher is not None:
            return train(Path(folder), config, learner, splits, watcher, world=world)
        return show_training(Path(folder), config, learner, splits, existing="resume", world=world)


def evaluate(
    learner: Learner,
    images: ImageSet,
    *,
    way: int = 5,
    shot: int = 1,
    query: int = 15,
    episodes: int = 1000,
    inductive: bool = False,
    mc_samples: int | None = None,
    seed: int = 0,
    threads: int = 0,
    quiet: bool = False,
) -> Evaluation:
    """Adapt a learner to many episodes of classes that it has never seen, and measure how well it does.

    Args:
        learner: what is tested; it is left unchanged.
        images: the classes: `splits.test`.
        way: classes in a task; where that differs from training, every class starts from the mean of the head's rows.
        shot: support images per class.
        query: query images per class.
        episodes: how many; episode e is the same for all learners under the same seed.
        inductive: answer for each query image by itself, not with the statistics of the query batch.
        mc_samples: noise samples per inner step; the learner's choice by default (30 for Meta-dropout).
        seed: of episodes and noise.
        threads: episodes side by side; 0 takes as many as PyTorch would.
        quiet: show no progress bar.
    """
    from metadropout.cli.progress import CountDisplay  # noqa: PLC0415 (the display is a part of the command line)

    sampler = EpisodeSampler(images, way=way, shot=shot, query=query, seed=mix_seed(seed, TESTING), inductive=inductive)
    with CountDisplay("testing", episodes, quiet=quiet) as display:
        return evaluate_episodes(
            learner,
            sampler,
            episodes=episodes,
            mc_samples=mc_samples,
            seed=mix_seed(seed, TESTING),
            threads=threads_to_use(threads),
            on_episode=display.advance,
        ).checked()


@dataclass(frozen=True)
class LoadedRun:
    """A run with its trained learner and its data set."""

    learner: Learner
    config: Config
    splits: Splits | None
    """None where the run was made in Python and no data set was given."""
    iteration: int
    run: Run


def load_run(
    folder: str | Path,
    *,
    state: str = "last",
    learner: Learner | None = None,
    splits: Splits | None = None,
    device: str = "auto",
) -> LoadedRun:
    """Load a run's trained learner, with its configuration and its data set.

    Args:
        folder: the run's folder.
        state: "last", "best" by validation, or a number of iterations as a text, of a checkpoint that was kept.
        learner: for a run of `fit` on parts of your own: the learner, built as for `fit`; it gets the trained weights.
        splits: the data set, where it should not be opened as the configuration says.
        device: where to put the learner.
    """
    run = open_run(Path(folder))
    if learner is None:
        if custom := run.config.custom_parts():
            raise ConfigError(
                f"{folder}: was trained from Python on a {custom[0]} of your own: give load_run(..., learner=...), "
                "built as it was for fit"
            )
        splits, learner = open_parts(run.config, splits)
    elif splits is None and "data" not in run.config.custom_parts():
        splits, _ = open_parts(run.config, learner=learner)
    if splits is not None:
        run.check_data(splits.identity)
    progress = load_state(run, state, learner)
    learner.to(resolve_device(MachineOptions(device=device)))
    return LoadedRun(learner, run.config, splits, progress.iteration, run)


def python_config(learner: Learner, seed: int, description: str, options: dict[str, Any]) -> Config:
    """Return the configuration of a run whose parts are objects of the caller's."""
    known = {name: section for section, part in SECTIONS.items() for name in part.__dataclass_fields__}
    if unknown := sorted(set(options) - set(known)):
        raise ConfigError(f"fit() has no option '{unknown[0]}'; known are: {', '.join(sorted(known))}")
    sections = {
        section: part(**check_options(part, {n: v for n, v in options.items() if known[n] == section}, section))
        for section, part in SECTIONS.items()
    }
    network = getattr(learner, "network", None)
    perturbation = getattr(learner, "perturbation", None)
    return Config(
        description=description or f"{type(learner).__name__} trained from Python",
        seed=seed,
        data=custom_part(None),
        network=custom_part(network),
        perturbation=custom_part(perturbation),
        learner=custom_part(learner),
        **sections,
    )
