"""`metadropout evaluate`: accuracy of a run on classes that it has never seen."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from metadropout.cli.progress import CountDisplay
from metadropout.config import build_learner, parse_config, resolve_device
from metadropout.data import EpisodeSampler, SavedEpisodes, load_episodes, save_episodes
from metadropout.errors import ConfigError, DataError, MetadropoutError
from metadropout.evaluation import Evaluation, evaluate
from metadropout.files import write_atomically
from metadropout.learners.base import TEST_SAMPLES
from metadropout.noise import mix_seed
from metadropout.runs.folder import Run, open_run
from metadropout.training.allocator import keep_freed_memory
from metadropout.training.checkpoints import load_checkpoint
from metadropout.training.distributed import ALONE, World, joined
from metadropout.training.loop import TESTING, episode_sampler, open_splits
from metadropout.training.workers import threads_to_use


def register(commands: Any) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "evaluate",
        help="accuracy of a run on unseen classes",
        description="Adapts a trained run to many episodes of classes that it has never seen, and prints its mean "
        "accuracy with the 95 % interval. The accuracies of all episodes go to RUN/evaluation-SPLIT.json.",
    )
    parser.add_argument("folder", type=Path, metavar="RUN", help="the run's folder")
    parser.add_argument("--episodes", type=int, default=1000, help="number of tasks (default: 1000, as in the paper)")
    parser.add_argument(
        "--mc-samples",
        type=int,
        default=TEST_SAMPLES,
        help="noise samples per inner step (default: 30, as in the paper; perturbations without randomness use 1)",
    )
    parser.add_argument("--split", choices=["train", "validation", "test"], default="test", help="default: test")
    parser.add_argument("--state", choices=["last", "best"], default="last", help="default: last, as in the paper")
    parser.add_argument("--seed", type=int, default=0, help="seed of the episodes; the same for all runs to compare")
    parser.add_argument(
        "--episode-list",
        type=Path,
        metavar="FILE",
        help="use the episodes of this file; if it is not there, write the drawn ones to it for others to use",
    )
    parser.set_defaults(run=run_command, takes_overrides=True)


def run_command(namespace: argparse.Namespace) -> int:
    """Evaluate, and return the exit status."""
    check_at_least_one(namespace, "episodes", "mc_samples")
    with joined() as world:
        run = open_for_testing(namespace.folder, namespace.overrides)
        result = evaluate_run(
            run,
            episodes=namespace.episodes,
            mc_samples=namespace.mc_samples,
            split=namespace.split,
            state=namespace.state,
            seed=namespace.seed,
            episode_list=namespace.episode_list,
            world=world,
        )
        if world.is_first:
            print(f"{run.folder.name}: {result} on {namespace.episodes} episodes of {namespace.split} classes")
    return 0


def check_at_least_one(namespace: argparse.Namespace, *names: str) -> None:
    """Refuse numbers below 1, and a negative seed."""
    for name in names:
        if getattr(namespace, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} is {getattr(namespace, name)}; it must be at least 1")
    if namespace.seed < 0:
        raise ConfigError(f"--seed is {namespace.seed}; it must be 0 or more")


def open_for_testing(folder: Path, overrides: Mapping[str, Any]) -> Run:
    """Open a run that is tested as it was trained: only where it computes and finds its data may change."""
    if odd := [name for name in overrides if not name.startswith(("machine.", "data.directory"))]:
        raise ConfigError(f"--{odd[0]} cannot change here: only --machine options and --data.directory can")
    run = open_run(folder)
    return Run(run.folder, parse_config(run.config.to_dict(), overrides))


def evaluate_run(
    run: Run,
    *,
    episodes: int,
    mc_samples: int = TEST_SAMPLES,
    split: str = "test",
    state: str = "last",
    seed: int = 0,
    episode_list: Path | None = None,
    world: World = ALONE,
) -> Evaluation:
    """Evaluate a run with a progress bar and write the result into its folder; the first process does both."""
    keep_freed_memory()
    config = run.config
    device = resolve_device(config.machine, world.local_rank)
    splits = open_splits(config)
    sampler = episode_sampler(config, splits, split, TESTING, seed)
    source = sampler if episode_list is None else _listed(episode_list, sampler, episodes, world)
    learner = build_learner(config, splits.train.image_shape).to(device)
    checkpoint = run.state(state)
    progress = load_checkpoint(checkpoint, learner)
    count = len(world.share(episodes))
    with CountDisplay(f"evaluating {run.folder.name}", count, quiet=not world.is_first) as display:
        result = evaluate(
            learner,
            source,
            episodes=episodes,
            mc_samples=mc_samples,
            seed=mix_seed(seed, TESTING),
            threads=threads_to_use(config.machine.threads),
            world=world,
            on_episode=display.advance,
        )
    if not world.is_first:
        return result
    record = {
        "mean": result.mean,
        "interval_95": result.interval,
        "episodes": episodes,
        "mc_samples": learner.samples_used(mc_samples),
        "split": split,
        "state": state,
        "iteration": progress.iteration,
        "seed": seed,
        "episode_list": None if episode_list is None else str(episode_list),
        "accuracies": result.accuracies,
    }
    path = run.folder / f"evaluation-{split}{'' if state == 'last' else f'-{state}'}.json"
    try:
        write_atomically(path, json.dumps(record) + "\n")
    except OSError as error:
        raise MetadropoutError(f"{path}: cannot be written: {error.strerror}; the accuracy was {result}") from None
    return result


def _listed(path: Path, sampler: EpisodeSampler, episodes: int, world: World) -> SavedEpisodes:
    """Open a list of episodes, after writing the drawn ones to it if it is not there."""
    if world.is_first and not path.exists():
        save_episodes(path, sampler, episodes)
    world.wait()
    listed = load_episodes(path, sampler.images, inductive=sampler.inductive)
    if (listed.way, listed.shot, listed.query) != (sampler.way, sampler.shot, sampler.query):
        raise DataError(
            f"{path}: has {listed.way}-way {listed.shot}-shot episodes with {listed.query} queries, but the run was "
            f"trained on {sampler.way}-way {sampler.shot}-shot with {sampler.query}"
        )
    return listed
