"""Meta-training: the outer loop, from the first iteration or from a checkpoint."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import FrameType
from typing import Protocol

import torch

from metadropout.checkpoints import (
    Progress,
    checkpoint_path,
    drop_old_checkpoints,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from metadropout.config import Config, build_learner, resolve_device
from metadropout.data import Episode, EpisodeSampler, Prefetcher, Splits, open_dataset
from metadropout.errors import DataError, TrainingError
from metadropout.evaluation import evaluate
from metadropout.learners import Learner, TaskGradient
from metadropout.metrics import MetricsLog
from metadropout.noise import SeededNoise, mix_seed
from metadropout.runs import Run, locked, record_start

TRAINING, VALIDATION, TESTING = 0, 1, 2
"""Keys that keep the random numbers of training, validation and testing apart."""


class Watcher(Protocol):
    """Shows a user how training goes."""

    def on_iteration(self, iteration: int, loss: float, accuracy: float) -> None:
        """Called after each outer step."""

    def on_message(self, text: str) -> None:
        """Called when something is worth a line of its own."""


@dataclass(frozen=True)
class Result:
    """How a call of `train` ended."""

    iteration: int
    stopped_by: signal.Signals | None
    """The signal that stopped the run early; None if it ran to its end."""


def train(run: Run, watcher: Watcher) -> Result:
    """Train a run to its end, from its newest checkpoint if it has one; safe to be stopped at any moment.

    The run is a function of its configuration: neither stopping and resuming nor anything else changes its weights.
    """
    config = run.config
    device = resolve_device(config.machine)
    if config.machine.threads:
        torch.set_num_threads(config.machine.threads)
    splits, learner = open_parts(config)
    sampler = episode_sampler(config, splits, "train", TRAINING)
    validation = episode_sampler(config, splits, "validation", VALIDATION) if splits.validation is not None else None
    learner = learner.to(device)
    # The layout in which convolutions want their weights; the values are the same.
    learner.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.Adam(learner.parameters(), lr=config.training.meta_lr)

    with locked(run), interruptible() as interrupt:
        for remains in run.checkpoints.glob("*.tmp"):  # of a write that was killed
            remains.unlink()
        record_start(run.folder)
        progress = Progress(0, 0.0)
        if (checkpoint := latest_checkpoint(run.checkpoints)) is not None:
            progress = load_checkpoint(checkpoint, learner, optimizer)
            watcher.on_message(f"resuming after iteration {progress.iteration}")
        else:
            save_checkpoint(checkpoint_path(run.checkpoints, 0), learner, optimizer, progress)
        with MetricsLog(run.folder, from_iteration=progress.iteration) as log:
            tasks = range(config.training.meta_batch)
            pairs = ((i, t) for i in range(progress.iteration, config.training.iterations) for t in tasks)
            ahead = 2 * config.training.meta_batch
            with Prefetcher(sampler.raw, pairs, depth=ahead, pin_memory=device.type == "cuda") as episodes:
                loop = _Loop(run, learner, optimizer, episodes, validation, device, log, watcher)
                return loop.run_from(progress, interrupt)


class _Loop:
    """The outer loop with everything it needs at hand."""

    def __init__(
        self,
        run: Run,
        learner: Learner,
        optimizer: torch.optim.Optimizer,
        episodes: Iterator[Episode],
        validation: EpisodeSampler | None,
        device: torch.device,
        log: MetricsLog,
        watcher: Watcher,
    ) -> None:
        # `episodes` gives the tasks of the iterations to come, in order.
        self.run, self.learner, self.optimizer, self.episodes = run, learner, optimizer, episodes
        self.validation, self.device, self.log, self.watcher = validation, device, log, watcher

    def run_from(self, progress: Progress, interrupt: Interrupt) -> Result:
        options = self.run.config.training
        started, seconds_before = time.monotonic(), progress.seconds
        last_save = started
        for iteration in range(progress.iteration, options.iterations):
            loss, accuracy = self.outer_step(iteration)
            done = iteration + 1
            progress = replace(progress, iteration=done, seconds=seconds_before + time.monotonic() - started)
            self.log.add_training(done, loss, accuracy, options.meta_batch, progress.seconds)
            self.watcher.on_iteration(done, loss, accuracy)
            finished = done == options.iterations
            if done % options.log_every == 0 or finished:
                self.log.flush()
            if self.validation is not None and (done % options.validate_every == 0 or finished):
                progress = self.validate(progress, self.validation)
            overdue = time.monotonic() - last_save > 60 * options.checkpoint_minutes
            stop = interrupt.received  # read once: a signal may come at any moment
            if done % options.checkpoint_every == 0 or overdue or finished or stop is not None:
                self.log.flush()
                self.save(progress)
                last_save = time.monotonic()
            if stop is not None and not finished:
                return Result(done, stop)
        return Result(progress.iteration, None)

    def outer_step(self, iteration: int) -> tuple[float, float]:
        """Average the gradients of the meta-batch, clip the average element by element, take one Adam step."""
        options = self.run.config.training
        tasks = [self.task(iteration, task) for task in range(options.meta_batch)]
        for name, parameter in self.learner.named_parameters():
            if parameter.requires_grad:
                mean = torch.stack([task.gradients[name] for task in tasks]).mean(dim=0)
                parameter.grad = mean.clamp_(-options.clip, options.clip)
        self.optimizer.step()
        return (
            float(torch.stack([task.loss for task in tasks]).mean()),
            float(torch.stack([task.accuracy for task in tasks]).mean()),
        )

    def task(self, iteration: int, task: int) -> TaskGradient:
        episode = next(self.episodes).to(self.device)
        noise = SeededNoise(self.run.config.seed, TRAINING, iteration, task)
        result = self.learner.task_gradient(episode, generator=noise)
        finite = torch.stack([result.loss, *[g.sum() for g in result.gradients.values()]]).isfinite().all()
        if not finite:
            cause = self.learner.explain_failure(episode, generator=noise)
            raise TrainingError(
                f"iteration {iteration + 1}, task {task + 1}: {cause}. "
                f"The last good state is kept in {latest_checkpoint(self.run.checkpoints)}"
            )
        return result

    def validate(self, progress: Progress, sampler: EpisodeSampler) -> Progress:
        options, seed = self.run.config.training, self.run.config.seed
        result = evaluate(
            self.learner,
            sampler,
            episodes=options.validation_episodes,
            mc_samples=options.validation_samples,
            seed=mix_seed(seed, VALIDATION),
            device=self.device,
        )
        self.log.add_validation(progress.iteration, result.mean, result.interval)
        self.watcher.on_message(f"iteration {progress.iteration}: validation accuracy {result}")
        if progress.best_accuracy is None or result.mean > progress.best_accuracy:
            progress = replace(progress, best_accuracy=result.mean, best_iteration=progress.iteration)
            save_checkpoint(self.run.checkpoints / "best.safetensors", self.learner, self.optimizer, progress)
        return progress

    def save(self, progress: Progress) -> None:
        save_checkpoint(
            checkpoint_path(self.run.checkpoints, progress.iteration), self.learner, self.optimizer, progress
        )
        drop_old_checkpoints(self.run.checkpoints)


@dataclass
class Interrupt:
    """Which signal, if any, has asked the run to stop."""

    received: signal.Signals | None = None


@contextmanager
def interruptible() -> Iterator[Interrupt]:
    """Turn the first Ctrl-C or SIGTERM into a request to stop after this iteration; a second one stops at once."""
    interrupt = Interrupt()

    def handle(number: int, frame: FrameType | None) -> None:
        if interrupt.received is not None:
            raise KeyboardInterrupt
        interrupt.received = signal.Signals(number)

    try:
        before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # only the main thread may set handlers
        yield interrupt
        return
    try:
        yield interrupt
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def open_parts(config: Config) -> tuple[Splits, Learner]:
    """Open a run's data set and build its learner; what is impossible fails here and not after a week."""
    splits = open_splits(config)
    for split, key in (("train", TRAINING), ("validation", VALIDATION), ("test", TESTING)):
        if getattr(splits, split) is not None:
            episode_sampler(config, splits, split, key)
    return splits, build_learner(config, splits.train.image_shape)


def open_splits(config: Config) -> Splits:
    """Open a run's data set."""
    return open_dataset(config.data["name"], **{k: v for k, v in config.data.items() if k != "name"})


def episode_sampler(config: Config, splits: Splits, split: str, key: int, seed: int | None = None) -> EpisodeSampler:
    """Return the sampler of a split's episodes.

    Args:
        config: the run's configuration.
        splits: its data set.
        split: "train", "validation" or "test".
        key: keeps its random numbers apart from the other splits'.
        seed: seed of the episodes; the run's own by default.
    """
    images = getattr(splits, split)
    if images is None:
        raise DataError(f"{config.data['name']} has no {split} classes in this run")
    episode = config.episode
    mixed = mix_seed(config.seed if seed is None else seed, key)
    try:
        return EpisodeSampler(images, way=episode.way, shot=episode.shot, query=episode.query, seed=mixed)
    except DataError as error:
        raise DataError(f"{config.data['name']}, {split} classes: {error}") from None
