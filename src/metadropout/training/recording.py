"""What a run leaves behind and shows while it trains: checkpoints, metrics and messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol, Self

import torch

from metadropout.evaluation import Evaluation
from metadropout.learners import Learner
from metadropout.runs.folder import Run, add_start
from metadropout.training.checkpoints import (
    Progress,
    checkpoint_path,
    drop_old_checkpoints,
    save_checkpoint,
)
from metadropout.training.metrics import MetricsLog, newest_iteration


class Watcher(Protocol):
    """Shows a user how training goes."""

    def on_iteration(self, iteration: int, loss: float, accuracy: float) -> None:
        """Called after each outer step."""

    def on_message(self, text: str) -> None:
        """Called when something is worth a line of its own."""


class Recorder:
    """Records what happens in a run; this one keeps nothing, as another process of the run does that."""

    def __enter__(self) -> Self:
        """Begin to record."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close what is open."""

    def begin(self, progress: Progress) -> None:
        """Record where the run stands at the start."""

    def step(self, progress: Progress, loss: float, accuracy: float) -> None:
        """Record an outer step."""

    def validation(self, progress: Progress, result: Evaluation, *, best: bool) -> None:
        """Record a validation, and of the state if it is the best so far."""

    def save(self, progress: Progress) -> None:
        """Write a checkpoint."""


class FolderRecorder(Recorder):
    """Records into the run's folder, and shows its user.

    Args:
        run: which run.
        learner: its learner, whose parameters checkpoints hold.
        optimizer: its optimiser, whose state they hold, too.
        watcher: shows the user what happens.
        measure: gives the strength of the noise on each layer, as it is when called.
        fingerprint: what tells the run from others, for checkpoints.
        processes: how many train the run together.
        threads: of each of them.
    """

    def __init__(
        self,
        run: Run,
        learner: Learner,
        optimizer: torch.optim.Optimizer,
        watcher: Watcher,
        measure: Callable[[], Mapping[str, float]],
        fingerprint: Mapping[str, Any],
        *,
        processes: int,
        threads: int,
    ) -> None:
        self.run, self.learner, self.optimizer, self.watcher = run, learner, optimizer, watcher
        self.measure, self.fingerprint, self.processes, self.threads = measure, fingerprint, processes, threads
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        for remains in self.run.checkpoints.glob("*.tmp"):  # of a write that was killed
            if remains.is_file():
                remains.unlink()
        add_start(self.run.folder, processes=self.processes, threads=self.threads)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def begin(self, progress: Progress) -> None:
        if progress.iteration:
            self.watcher.on_message(f"resuming after iteration {progress.iteration}")
        elif lost := newest_iteration(self.run.metrics):
            self.watcher.on_message(f"only the initial state is left of {lost} iterations: training begins again")
        self.log = self._stack.enter_context(MetricsLog(self.run.folder, from_iteration=progress.iteration))

    def step(self, progress: Progress, loss: float, accuracy: float) -> None:
        done, options = progress.iteration, self.run.config.training
        self.log.add_training(done, loss, accuracy, options.meta_batch, progress.seconds)
        self.watcher.on_iteration(done, loss, accuracy)
        if done % options.log_every == 0 or done == options.iterations:
            self.log.flush()
            self.log.add_noise(done, self.measure())

    def validation(self, progress: Progress, result: Evaluation, *, best: bool) -> None:
        self.log.add_validation(progress.iteration, result.mean, result.interval)
        self.watcher.on_message(f"iteration {progress.iteration}: validation accuracy {result}")
        if best:
            self._save(self.run.checkpoints / "best.safetensors", progress)

    def save(self, progress: Progress) -> None:
        self.log.flush()
        self._save(checkpoint_path(self.run.checkpoints, progress.iteration), progress)
        drop_old_checkpoints(self.run.checkpoints, self.run.config.training.checkpoint_keep)

    def _save(self, path: Path, progress: Progress) -> None:
        save_checkpoint(path, self.learner, self.optimizer, progress, self.fingerprint)
