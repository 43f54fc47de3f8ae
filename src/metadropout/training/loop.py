"""Meta-training: the outer loop, from the first iteration or from a checkpoint."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from metadropout.analysis.tracing import noise_strengths
from metadropout.config import Config, batches_tasks, build_learner, parse_config, refuse_custom_parts, resolve_device
from metadropout.data import Episode, EpisodeSampler, Prefetcher, Splits, open_dataset
from metadropout.errors import DataError, TrainingError
from metadropout.evaluation import evaluate
from metadropout.learners import Learner
from metadropout.noise import SOURCES, mix_seed
from metadropout.ops import kernels
from metadropout.ops.memory_format import ChannelsLast
from metadropout.runs.folder import (
    Run,
    check_free,
    check_same_run,
    claimed,
    describe_run,
    open_run,
    write_config,
    write_identity,
)
from metadropout.training.checkpoints import (
    Progress,
    checkpoint_path,
    is_kept,
    load_checkpoint,
    save_checkpoint,
)
from metadropout.training.distributed import ALONE, World, restarted
from metadropout.training.outer import OuterOptimizer
from metadropout.training.recording import FolderRecorder, Recorder, Watcher
from metadropout.training.workers import Workers, on_one_thread, threads_to_use

TRAINING, VALIDATION, TESTING, WATCHING = 0, 1, 2, 3
"""Keys that keep the random numbers of training, validation, testing and of measuring the noise apart."""

RESTART_PATIENCE = 60.0
"""Seconds that a process which torchrun has started again waits for the run's folder."""

Existing = Literal["refuse", "resume", "require"]
"""What to do with a run that is in the folder already: only start new runs, start or resume, or only resume."""


@dataclass(frozen=True)
class Result:
    """How a call of `train` ended."""

    run: Run
    iteration: int
    stopped_by: signal.Signals | None
    """The signal that stopped the run early; None if it ran to its end."""


def train(
    folder: Path,
    config: Config,
    learner: Learner,
    splits: Splits,
    watcher: Watcher,
    *,
    existing: Existing = "resume",
    world: World = ALONE,
) -> Result:
    """Train a run to its end, from its newest checkpoint if it has one; safe to be stopped at any moment.

    The run is a function of its configuration: neither stopping and resuming nor anything else changes its weights.

    Args:
        folder: the run's folder.
        config: what to do in it; of a run that is there already only options that may change can be new.
        learner: what is trained, with initial values that depend on nothing but the configuration.
        splits: the data set.
        watcher: shows the user how it goes.
        existing: what to do with a run that is in the folder already.
        world: the processes that train it together.
    """
    device = resolve_device(config.machine, world.local_rank)
    threads = threads_to_use(config.machine.threads)
    sampler = episode_sampler(config, splits, "train", TRAINING)
    validation = episode_sampler(config, splits, "validation", VALIDATION) if splits.validation is not None else None
    learner = learner.to(device)
    if any(isinstance(module, ChannelsLast) for module in learner.modules()):
        # The layout in which convolutions want their weights; the values are the same.
        learner.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    outer = OuterOptimizer(((n, p) for n, p in learner.named_parameters() if p.requires_grad), config.training)

    with ExitStack() as stack:
        if world.is_first:
            # On a host that was cut off, the process before may take a moment to notice and end.
            stack.enter_context(claimed(folder, patience=RESTART_PATIENCE if restarted() else 0.0))
        text = world.from_first(lambda: _start_or_resume(folder, config, learner, outer, splits, existing))
        run = Run(folder, parse_config(json.loads(text)))
        config = run.config
        stack.enter_context(kernels.using(config.training.convolutions or {}))
        watched = sampler(0, 0).query_x.to(device)
        source = SOURCES[config.training.noise]
        measure = partial(noise_strengths, learner, watched, source(config.seed, WATCHING))
        fingerprint = json.loads(world.from_first(lambda: json.dumps(run.fingerprint(splits.identity))))
        keeper = FolderRecorder(
            run, learner, outer.optimizer, watcher, measure, fingerprint, processes=world.size, threads=threads
        )
        interrupt = stack.enter_context(interruptible())
        stack.enter_context(on_one_thread())
        recorder = stack.enter_context(keeper if world.is_first else Recorder())
        newest = world.from_first(lambda: str(run.latest()))
        progress = load_checkpoint(Path(newest), learner, outer.optimizer, fingerprint)
        recorder.begin(progress)
        # Where tasks depend on each other, every process does all of them, in order.
        together = learner.tasks_in_order
        workers = stack.enter_context(
            Workers(
                learner,
                config.training.meta_batch,
                threads=1 if together else threads,
                world=ALONE if together else world,
            )
        )
        pairs = ((i, t) for i in range(progress.iteration, config.training.iterations) for t in workers.share)
        ahead = 2 * max(1, len(workers.share))
        episodes = stack.enter_context(Prefetcher(sampler.raw, pairs, depth=ahead, pin_memory=device.type == "cuda"))
        loop = _Loop(run, learner, outer, episodes, validation, workers, recorder, threads=threads, world=world)
        return loop.run_from(progress, interrupt)


def _start_or_resume(
    folder: Path, config: Config, learner: Learner, outer: OuterOptimizer, splits: Splits, existing: Existing
) -> str:
    """Make a run's folder, or check that it can be gone on with; return the run's configuration as JSON."""
    if existing == "refuse" or (existing == "resume" and not (folder / "config.yaml").exists()):
        check_free(folder)
        config = _with_choices(config, learner, splits)
        run = Run(folder, config)
        # First the state, last the configuration, which makes it a run: what is killed in between leaves none.
        path = checkpoint_path(run.checkpoints, 0)
        save_checkpoint(path, learner, outer.optimizer, Progress(0, 0.0), run.fingerprint(splits.identity))
        describe_run(run, splits.identity)
    else:
        run = open_run(folder)
        # The machine and the version may be others, but the run stays the same.
        own = run.config.training
        training = replace(config.training, noise=own.noise, convolutions=own.convolutions)
        config = replace(config, training=training)
        check_same_run(run, config)
        run.latest()
        run.check_data(splits.identity)
        if not run.data.exists():
            write_identity(run, splits.identity)
        if config != run.config:
            write_config(folder, config)
    return json.dumps(config.to_dict())


def _with_choices(config: Config, learner: Learner, splits: Splits) -> Config:
    """Take note of how this machine computes a task's convolutions, unless given, so that the run keeps to it."""
    if config.training.convolutions is not None:
        return config
    episode = episode_sampler(config, splits, "train", TRAINING)(0, 0).to(next(learner.parameters()).device)
    with kernels.choosing() as choices:
        learner.task_gradients([episode], [SOURCES[config.training.noise](config.seed, TRAINING, 0, 0)])
    return replace(config, training=replace(config.training, convolutions=dict(choices)))


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
        outer: OuterOptimizer,
        episodes: Iterator[Episode],
        validation: EpisodeSampler | None,
        workers: Workers,
        recorder: Recorder,
        *,
        threads: int,
        world: World,
    ) -> None:
        # `episodes` gives this process' tasks of the iterations to come, in order.
        self.run, self.learner, self.outer, self.episodes = run, learner, outer, episodes
        self.validation, self.workers, self.recorder = validation, workers, recorder
        self.threads, self.world = threads, world
        self.trained = [name for name, p in learner.named_parameters() if p.requires_grad]
        self.buffers = {name: b for name, b in learner.named_buffers() if name in learner.changed_buffers()}

    def run_from(self, progress: Progress, interrupt: Interrupt) -> Result:
        options = self.run.config.training
        started, seconds_before = time.monotonic(), progress.seconds
        last_save = started
        for iteration in range(progress.iteration, options.iterations):
            loss, accuracy = self.outer_step(iteration)
            done = iteration + 1
            progress = replace(progress, iteration=done, seconds=seconds_before + time.monotonic() - started)
            self.recorder.step(progress, loss, accuracy)
            finished = done == options.iterations
            if self.validation is not None and (done % options.validate_every == 0 or finished):
                progress = self.validate(progress, self.validation)
            overdue = time.monotonic() - last_save > 60 * options.checkpoint_minutes
            # Read once, as a signal may come at any moment; and if one process was asked to stop, all stop here.
            stop = self.world.largest(interrupt.received or 0)
            wanted = done % options.checkpoint_every == 0 or is_kept(done, options.checkpoint_keep)
            if wanted or overdue or finished or stop:
                self.recorder.save(progress)
                last_save = time.monotonic()
            if stop and not finished:
                return Result(self.run, done, signal.Signals(stop))
        return Result(self.run, progress.iteration, None)

    def outer_step(self, iteration: int) -> tuple[float, float]:
        """Average the gradients of the meta-batch and take one step along them."""
        sizes = [parameter.numel() for parameter in self.outer.parameters]
        extra = [buffer.numel() for buffer in self.buffers.values()]
        pairs = zip(self.workers.share, self.episodes, strict=False)
        items = (_Task(iteration, task, episode) for task, episode in pairs)
        together = batches_tasks(self.run.config.machine, next(self.learner.parameters()).device)
        in_one = self.workers.share and (together or self.learner.tasks_in_order)
        groups = [list(items)] if in_one else ([item] for item in items)
        # Shape (tasks, gradients, buffers, loss and accuracy).
        results = self.workers.run(self.tasks, groups, width=sum(sizes) + sum(extra) + 2)
        gradients, _, figures = torch.split(results.mean(dim=0), [sum(sizes), sum(extra), 2])
        self.outer.step(torch.split(gradients, sizes), iteration)
        buffers = torch.split(results[:, sum(sizes) : -2], extra, dim=1)
        for (name, buffer), values in zip(self.buffers.items(), buffers, strict=True):
            buffer.copy_(self.learner.next_buffer(name, values.reshape(-1, *buffer.shape)))
        loss, accuracy = figures.tolist()
        return loss, accuracy

    def tasks(self, learner: Learner, tasks: Sequence[_Task]) -> Tensor:
        """Return each task's gradients, buffers, loss and accuracy, one after the other: shape (tasks, width)."""
        device = next(learner.parameters()).device
        episodes = [task.episode.to(device) for task in tasks]
        source = SOURCES[self.run.config.training.noise]
        noises = [source(self.run.config.seed, TRAINING, task.iteration, task.number) for task in tasks]
        rows = []
        for result in learner.task_gradients(episodes, noises):
            values = [*(result.gradients[name] for name in self.trained), *(result.buffers[n] for n in self.buffers)]
            rows.append(torch.cat([value.reshape(-1) for value in (*values, result.loss, result.accuracy)]))
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
            noise=options.noise,
            threads=self.threads,
            world=self.world,
        )
        best = progress.best_accuracy is None or result.mean > progress.best_accuracy
        if best:
            progress = replace(progress, best_accuracy=result.mean, best_iteration=progress.iteration)
        self.recorder.validation(progress, result, best=best)
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
            for each in before:  # one more ends the process, whatever it is about to do
                signal.signal(each, signal.SIG_DFL)
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


def open_parts(config: Config, splits: Splits | None = None, learner: Learner | None = None) -> tuple[Splits, Learner]:
    """Open a run's data set and build its learner, unless given; what is impossible fails here, not after a week."""
    splits = splits or open_splits(config)
    for split, key in (("train", TRAINING), ("validation", VALIDATION), ("test", TESTING)):
        if getattr(splits, split) is not None:
            episode_sampler(config, splits, split, key)
    return splits, learner or build_learner(config, splits.train.image_shape)


def build_for(trained: Config, tested: Config, splits: Splits) -> Learner:
    """Build the learner of a run for a test on other tasks or data: as it was trained, with the test's inner steps."""
    learner = {**trained.learner, **{k: v for k, v in tested.learner.items() if k == "test_steps"}}
    return build_learner(replace(trained, learner=learner), splits.train.image_shape)


def open_splits(config: Config) -> Splits:
    """Open a run's data set."""
    refuse_custom_parts(config)
    return open_dataset(config.data["name"], **{k: v for k, v in config.data.items() if k != "name"})


def load_state(run: Run, state: str, learner: Learner) -> Progress:
    """Give a learner a run's trained weights, which have to be the run's own.

    Args:
        run: the run; its configuration may have been changed for a test.
        state: which of its checkpoints, "last" or "best".
        learner: gets the weights.
    """
    own = open_run(run.folder)
    return load_checkpoint(run.state(state), learner, run=own.fingerprint(own.identity()))


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
    way, shot, query, protocol = episode.way, episode.shot, episode.query, episode.protocol
    if split == "train" and key == TRAINING:
        way, shot, query = episode.train_way or way, episode.train_shot or shot, episode.train_query or query
        protocol = episode.train_protocol or protocol
    mixed = mix_seed(config.seed if seed is None else seed, key)
    try:
        return EpisodeSampler(images, way=way, shot=shot, query=query, seed=mixed, inductive=protocol == "inductive")
    except DataError as error:
        raise DataError(f"{config.data['name']}, {split} classes: {error}") from None
