"""`metadropout evaluate`: accuracy of a run on classes that it has never seen."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from metadropout.analysis.plots import plot_accuracy_curves
from metadropout.cli.numbers import add_number
from metadropout.cli.progress import CountDisplay
from metadropout.config import Config, parse_config, resolve_device
from metadropout.data import EpisodeSampler, SavedEpisodes, load_episodes, save_episodes
from metadropout.errors import ConfigError, DataError
from metadropout.evaluation import Evaluation, evaluate
from metadropout.learners import Learner
from metadropout.learners.base import TEST_SAMPLES
from metadropout.noise import mix_seed
from metadropout.ops import kernels
from metadropout.options import Episodes, Samples, Seed
from metadropout.runs.folder import Run, open_run
from metadropout.runs.results import Measure, TestResult, measured_before, write_result
from metadropout.training.allocator import keep_freed_memory
from metadropout.training.checkpoints import iteration_of, weights_digest
from metadropout.training.distributed import ALONE, World, joined
from metadropout.training.loop import TESTING, build_for, episode_sampler, load_state, open_splits
from metadropout.training.workers import threads_to_use

SECONDS_BETWEEN_WRITES = 60.0
"""At most that much work is lost where a test is killed."""

OTHER_TASKS = ("episode.way", "episode.shot", "episode.query", "episode.protocol", "data.", "learner.test_steps")
"""How the names of options begin that make other tasks than the run's own, or another way of adapting to them."""

EPILOG = """\
A run can be tested on other tasks than it was trained on; each result has a file of its own in the run's folder:
  metadropout evaluate RUN --episode.way 3 --episode.shot 5
  metadropout evaluate RUN --episode.protocol inductive
  metadropout evaluate RUN --data.name cifar_fs --data.image_size 84
States during training can be tested, too, if they were kept (train ... --training.checkpoint_keep 5000):
  metadropout evaluate RUN --state 5000
  metadropout evaluate RUN --state all                     accuracy over iterations, and a picture of it
Stopped or killed, the same command goes on where it was. What has been measured is not measured again.
"""


def register(parser: argparse.ArgumentParser) -> None:
    """Give the command's parser its arguments."""
    parser.description = (
        "Adapts a trained run to many episodes of classes that it has never seen, and prints its mean "
        "accuracy with the 95 % interval, negative log-likelihood and expected calibration error. What was measured "
        "on each episode goes to RUN/evaluation-SPLIT.json."
    )
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("folder", type=Path, metavar="RUN", help="the run's folder")
    add_number(parser, "--episodes", Episodes, default=1000, help="number of tasks (default: 1000, as in the paper)")
    add_number(
        parser,
        "--mc-samples",
        Samples,
        default=TEST_SAMPLES,
        help="noise samples per inner step (default: 30, as in the paper; methods without randomness use 1)",
    )
    parser.add_argument("--split", choices=["train", "validation", "test"], default="test", help="default: test")
    parser.add_argument(
        "--state",
        type=_state,
        default="last",
        help="last, best (by validation classes), a number of iterations, or all for the curve of accuracy over "
        "iterations (default: last, as in the paper)",
    )
    add_number(parser, "--seed", Seed, default=0, help="seed of the episodes; the same for all runs to compare")
    parser.add_argument(
        "--episode-list",
        type=Path,
        metavar="FILE",
        help="use the episodes of this file; if it does not exist, write the drawn ones to it for others to use",
    )
    parser.set_defaults(run=run_command, takes_overrides=True)


def run_command(namespace: argparse.Namespace) -> int:
    """Evaluate, and return the exit status."""
    with joined() as world:
        run = open_run(namespace.folder)
        states = run.states() if namespace.state == "all" else [namespace.state]
        curve: list[tuple[int, Evaluation]] = []
        for state in states:
            result = evaluate_run(
                run,
                overrides=namespace.overrides,
                episodes=namespace.episodes,
                mc_samples=namespace.mc_samples,
                split=namespace.split,
                state=state,
                seed=namespace.seed,
                episode_list=namespace.episode_list,
                world=world,
            )
            if world.is_first:
                iteration = iteration_of(run.latest()) if state == "last" else state
                at = "" if len(states) == 1 else f", iteration {iteration}"
                tasks = f"{_count(namespace.episodes)} of {namespace.split} classes"
                print(f"{run.folder.name}{at}: {result} on {tasks}")
                if result.nll is not None and result.calibration is not None:
                    error = 100 * result.calibration.error
                    print(f"negative log-likelihood {result.nll:.4f}, expected calibration error {error:.2f} %")
                curve += [(int(iteration), result)] if namespace.state == "all" else []
        if curve:
            path = run.folder / f"accuracy-over-iterations-{namespace.split}.png"
            title = f"{run.config.description or run.folder.name}, {namespace.split} classes"
            if plot_accuracy_curves({run.folder.name: curve}, path, title=title) is not None:
                print(f"picture: {path}")
    return 0


def _state(text: str) -> str:
    if text in ("last", "best", "all") or (text.isdecimal() and int(text) < 10**8):
        return str(int(text)) if text.isdecimal() else text
    raise argparse.ArgumentTypeError(f"'{text}' is not last, best, all or a number of iterations")


def _count(episodes: int) -> str:
    return f"{episodes} episode{'' if episodes == 1 else 's'}"


def open_for_testing(folder: Path, overrides: Mapping[str, Any]) -> Run:
    """Open a run that is tested on its own tasks: only where it computes and finds its data may change."""
    if odd := [name for name in overrides if not name.startswith(("machine.", "data.directory"))]:
        raise ConfigError(f"--{odd[0]} cannot change here: only --machine options and --data.directory can")
    run = open_run(folder)
    return Run(run.folder, parse_config(run.config.to_dict(), overrides))


def evaluate_run(
    run: Run,
    *,
    episodes: int,
    overrides: Mapping[str, Any] | None = None,
    mc_samples: int = TEST_SAMPLES,
    split: str = "test",
    state: str = "last",
    seed: int = 0,
    episode_list: Path | None = None,
    world: World = ALONE,
) -> Evaluation:
    """Evaluate a run with a progress bar and write the result into its folder; the first process does both."""
    keep_freed_memory()
    config = _config_to_test(run.config, overrides or {})
    splits = open_splits(config)
    run.check_tested_data(config, splits.identity, split)
    sampler = episode_sampler(config, splits, split, TESTING, seed)
    source = sampler if episode_list is None else _listed(episode_list, sampler, episodes, world)
    learner = build_for(run.config, config, splits)
    progress = load_state(run, state, learner)
    learner.to(resolve_device(config.machine, world.local_rank))
    measure = Measure(
        split=split,
        state=state,
        seed=seed,
        asked_samples=mc_samples,
        episode_list=None if episode_list is None else str(episode_list),
        way=sampler.way,
        shot=sampler.shot,
        query=sampler.query,
        protocol=config.episode.protocol,
        data=config.data["name"],
        data_digest=splits.identity.digest,
        test_steps=config.learner.get("test_steps"),
    )
    result = TestResult(
        **vars(measure),
        accuracies=[],
        iteration=progress.iteration,
        mc_samples=learner.samples_used(mc_samples),
        asked_episodes=episodes,
        weights=weights_digest(learner),
    )
    path = run.folder / measure.file_name(measure.usual(run))
    with kernels.using(run.config.training.convolutions or {}):
        return _measure(path, result, learner, source, episodes, config, world)


def _config_to_test(config: Config, overrides: Mapping[str, Any]) -> Config:
    """Return the configuration of a test: of other tasks than the run's own, but of the same learner."""
    allowed = (*OTHER_TASKS, "machine.")
    if odd := [name for name in overrides if not name.startswith(allowed)]:
        raise ConfigError(
            f"--{odd[0]} cannot change when a run is tested: only --machine and --data options, --episode.way, shot, "
            "query and protocol, and --learner.test_steps can"
        )
    return parse_config(config.to_dict(), overrides)


def _measure(
    path: Path,
    result: TestResult,
    learner: Learner,
    source: EpisodeSampler | SavedEpisodes,
    episodes: int,
    config: Config,
    world: World,
) -> Evaluation:
    """Measure what has not been measured, and write what there is now and then; all processes return the same."""
    before = measured_before(path, result)
    total: Evaluation | None = None
    if before is not None and before.nlls is not None:
        total = before.first(episodes) if len(before.accuracies) > episodes else before.result
    done = 0 if total is None else len(total.accuracies)
    left = range(done, episodes)
    size = min(len(left), 4 * world.size)
    with CountDisplay(f"evaluating {path.parent.name}", len(left), quiet=not world.is_first) as display:
        while done < episodes:
            started = time.monotonic()
            size = min(size, episodes - done)
            part = evaluate(
                learner,
                source,
                first=done,
                episodes=size,
                mc_samples=result.asked_samples,
                seed=mix_seed(result.seed, TESTING),
                noise=config.training.noise,
                threads=threads_to_use(config.machine.threads),
                world=world,
                on_episode=_times(display.advance, world.size),
            ).checked(done)
            total = part if total is None else total.plus(part)
            done += size
            # The next part takes as long as may be lost; all processes have to agree on it.
            pace = size / max(1e-3, time.monotonic() - started)
            size = world.largest(max(1, min(8 * size, int(pace * SECONDS_BETWEEN_WRITES))))
            longest = 0 if before is None else len(before.accuracies)
            if world.is_first and done >= longest:
                calibration = vars(total.calibration) if total.calibration is not None else None
                now = replace(result, accuracies=total.accuracies, nlls=total.nlls, calibration=calibration)
                write_result(path, now)
    assert total is not None
    if world.is_first and before is not None and len(before.accuracies) > episodes:
        print(f"{path}: keeps the result of {len(before.accuracies)} episodes: {before.result}", file=sys.stderr)
    return total


def _times(advance: Callable[[], None], count: int) -> Callable[[], None]:
    """Count an episode of this process for those that the others do at the same time."""

    def several() -> None:
        for _ in range(count):
            advance()

    return several


def _listed(path: Path, sampler: EpisodeSampler, episodes: int, world: World) -> SavedEpisodes:
    """Open a list of episodes, after writing the drawn ones to it if it does not exist."""
    if world.is_first and not path.exists():
        save_episodes(path, sampler, episodes)
    world.wait()
    listed = load_episodes(path, sampler.images, inductive=sampler.inductive)
    if (listed.way, listed.shot, listed.query) != (sampler.way, sampler.shot, sampler.query):
        raise DataError(
            f"{path}: has {listed.way}-way {listed.shot}-shot episodes with {listed.query} queries, but the run is "
            f"tested on {sampler.way}-way {sampler.shot}-shot with {sampler.query}; give --episode.way and so on"
        )
    return listed
