"""Meta-training: the outer loop, from the first iteration or from a checkpoint."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch
from torch import Tensor

from metadropout.analysis.tracing import noise_strengths
from metadropout.config import Config, batches_tasks, build_learner, resolve_device
from metadropout.data import Episode, EpisodeSampler, Prefetcher, Splits, open_dataset
from metadropout.errors import DataError, TrainingError
from metadropout.evaluation import evaluate
from metadropout.learners import Learner
from metadropout.noise import SeededNoise, mix_seed
from metadropout.runs.folder import Run
from metadropout.training.checkpoints import Progress, load_checkpoint
from metadropout.training.distributed import ALONE, World
from metadropout.training.recording import KeptRecords, Records, Watcher
from metadropout.training.workers import Workers, on_one_thread, threads_to_use

TRAINING, VALIDATION, TESTING, WATCHING = 0, 1, 2, 3
"""Keys that keep the random numbers of training, validation, testing and of measuring the noise apart."""


@dataclass(frozen=True)
class Result:
    """How a call of `train` ended."""

    iteration: int
    stopped_by: signal.Signals | None
    """The signal that stopped the run early; None if it ran to its end."""


def train(run: Run, watcher: Watcher, world: World = ALONE) -> Result:
    """Train a run to its end, from its newest checkpoint if it has one; safe to be stopped at any moment.

    The run is a function of its configuration: neither stopping and resuming nor anything else changes its weights.

    Args:
        run: which run.
        watcher: shows the user how it goes.
        world: the processes that train it together.
    """
    config = run.config
    device = resolve_device(config.machine, world.local_rank)
    threads = threads_to_use(config.machine.threads)
    splits, learner = open_parts(config)
    sampler = episode_sampler(config, splits, "train", TRAINING)
    validation = episode_sampler(config, splits, "validation", VALIDATION) if splits.validation is not None else None
    learner = learner.to(device)
    # The layout in which convolutions want their weights; the values are the same.
    learner.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.Adam(learner.parameters(), lr=config.training.meta_lr)
    watched = sampler(0, 0).query_x.to(device)
    measure = partial(noise_strengths, learner, watched, SeededNoise(config.seed, WATCHING))
    kept = KeptRecords(run, learner, optimizer, watcher, measure, processes=world.size, threads=threads)

    with interruptible() as interrupt, on_one_thread(), kept if world.is_first else Records() as records:
        newest = world.from_first(lambda: str(run.latest()))
        progress = load_checkpoint(Path(newest), learner, optimizer)
        records.begin(progress)
        with Workers(learner, config.training.meta_batch, threads=threads, world=world) as workers:
            pairs = ((i, t) for i in range(progress.iteration, config.training.iterations) for t in workers.share)
            ahead = 2 * max(1, len(workers.share))
            with Prefetcher(sampler.raw, pairs, depth=ahead, pin_memory=device.type == "cuda") as episodes:
                loop = _Loop(run, learner, optimizer, episodes, validation, workers, records)
                return loop.run_from(progress, interrupt)


class _Task(NamedTuple):
    """A task of the outer loop."""

    iteration: int
    number: int
    episode: Episode


class _Loop:
    """The outer loop with everything it needs at hand."""

    def __init__(
        self,
        run: Run,
        learner: Learner,
        optimizer: torch.optim.Optimizer,
        episodes: Iterator[Episode],
        validation: EpisodeSampler | None,
        workers: Workers,
        records: Records,
    ) -> None:
        # `episodes` gives this process' tasks of the iterations to come, in order.
        self.run, self.learner, self.optimizer, self.episodes = run, learner, optimizer, episodes
        self.validation, self.workers, self.records = validation, workers, records
        self.trained = {name: p for name, p in learner.named_parameters() if p.requires_grad}

    def run_from(self, progress: Progress, interrupt: Interrupt) -> Result:
        options = self.run.config.training
        started, seconds_before = time.monotonic(), progress.seconds
        last_save = started
        for iteration in range(progress.iteration, options.iterations):
            loss, accuracy = self.outer_step(iteration)
            done = iteration + 1
            progress = replace(progress, iteration=done, seconds=seconds_before + time.monotonic() - started)
            self.records.step(progress, loss, accuracy)
            finished = done == options.iterations
            if self.validation is not None and (done % options.validate_every == 0 or finished):
                progress = self.validate(progress, self.validation)
            overdue = time.monotonic() - last_save > 60 * options.checkpoint_minutes
            # Read once, as a signal may come at any moment; and if one process was asked to stop, all stop here.
            stop = self.workers.world.largest(interrupt.received or 0)
            if done % options.checkpoint_every == 0 or overdue or finished or stop:
                self.records.save(progress)
                last_save = time.monotonic()
            if stop and not finished:
                return Result(done, signal.Signals(stop))
        return Result(progress.iteration, None)

    def outer_step(self, iteration: int) -> tuple[float, float]:
        """Average the gradients of the meta-batch, clip the average element by element, take one Adam step."""
        clip = self.run.config.training.clip
        sizes = [parameter.numel() for parameter in self.trained.values()]
        pairs = zip(self.workers.share, self.episodes, strict=False)
        items = (_Task(iteration, task, episode) for task, episode in pairs)
        together = batches_tasks(self.run.config.machine, next(self.learner.parameters()).device)
        groups = [list(items)] if together and self.workers.share else ([item] for item in items)
        results = self.workers.run(self.tasks, groups, width=sum(sizes) + 2)  # (tasks, gradients, loss and accuracy)
        *gradients, loss, accuracy = torch.split(results.mean(dim=0), [*sizes, 1, 1])
        for parameter, gradient in zip(self.trained.values(), gradients, strict=True):
            parameter.grad = torch.empty_like(parameter).copy_(gradient.view_as(parameter)).clamp_(-clip, clip)
        self.optimizer.step()
        return float(loss), float(accuracy)

    def tasks(self, learner: Learner, tasks: Sequence[_Task]) -> Tensor:
        """Return each task's gradients, loss and accuracy, one after the other: shape (tasks, width)."""
        device = next(learner.parameters()).device
        episodes = [task.episode.to(device) for task in tasks]
        noises = [SeededNoise(self.run.config.seed, TRAINING, task.iteration, task.number) for task in tasks]
        rows = []
        for result in learner.task_gradients(episodes, noises):
            gradients = [result.gradients[name] for name in self.trained]
            rows.append(torch.cat([values.reshape(-1) for values in (*gradients, result.loss, result.accuracy)]))
        for task, episode, noise, row in zip(tasks, episodes, noises, rows, strict=True):
            if not row.isfinite().all():
                cause = learner.explain_failure(episode, generator=noise)
                raise TrainingError(
                    f"iteration {task.iteration + 1}, task {task.number + 1}: {cause}. "
                    f"The last good state is kept in {self.run.latest()}"
                )
        return torch.stack(rows)

    def validate(self, progress: Progress, sampler: EpisodeSampler) -> Progress:
        options, seed = self.run.config.training, self.run.config.seed
        result = evaluate(
            self.learner,
            sampler,
            episodes=options.validation_episodes,
            mc_samples=options.validation_samples,
            seed=mix_seed(seed, VALIDATION),
            threads=self.workers.threads,
            world=self.workers.world,
        )
        best = progress.best_accuracy is None or result.mean > progress.best_accuracy
        if best:
            progress = replace(progress, best_accuracy=result.mean, best_iteration=progress.iteration)
        self.records.validation(progress, result, best=best)
        return progress


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
