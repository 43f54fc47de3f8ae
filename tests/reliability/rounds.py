"""Rounds of simultaneous starts and of kill -9: nothing is lost or mixed up, and results are the same bit for bit.

    make rounds                                            # 20 rounds of each
    PYTHONPATH=tests python -m reliability.rounds training attack --rounds 5

A round of `starts` starts four runs of different seeds on one folder at the same time. A round of the others starts a
command, kills it at a random moment, calls it again to its end, and compares what it wrote with that of a command that
nobody stopped. Kills that come after the end do not count.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from PIL import Image
from toys import weights

from metadropout.cli import main as command_line
from metadropout.training.checkpoints import latest_checkpoint

TINY = {
    "data": {"name": "glyphs", "train_classes": 12, "validation_classes": 6, "test_classes": 6},
    "episode": {"way": 3, "query": 2},
    "network": {"channels": 4},
    "learner": {"steps": 2},
    "training": {
        "iterations": 24,
        "meta_batch": 2,
        "checkpoint_every": 3,
        "log_every": 3,
        "validate_every": 12,
        "validation_episodes": 3,
        "validation_samples": 2,
    },
    "machine": {"device": "cpu", "threads": 1},
}
STARTS = 4


def start(*arguments: object) -> BaseProcess:
    """Start a command in a process of its own, forked, so that PyTorch is loaded once."""
    process = multiprocessing.get_context("fork").Process(target=_command, args=(tuple(map(str, arguments)),))
    process.start()
    return process


def _command(arguments: tuple[str, ...]) -> None:
    with open(os.devnull, "w") as nowhere:
        sys.stdout = sys.stderr = nowhere
        status = command_line(arguments)
    os._exit(status)


def finish(*arguments: object) -> None:
    """Run a command to its end."""
    process = start(*arguments)
    process.join()
    assert process.exitcode == 0, f"metadropout {' '.join(map(str, arguments))} ended with {process.exitcode}"


def simultaneous_starts(place: Path, rounds: int, rng: random.Random) -> str:
    """Start four runs on one folder: one has to begin, and to be what it would be alone."""
    recipe = _recipe(place, iterations=3)
    for seed in range(STARTS):
        finish("train", recipe, "--out", place / f"alone{seed}", "--seed", seed)
    winners = []
    for number in range(rounds):
        out = place / f"round{number}"
        processes = [start("train", recipe, "--out", out, "--seed", seed) for seed in range(STARTS)]
        for process in processes:
            process.join()
        assert sorted(process.exitcode or 0 for process in processes) == [0, 1, 1, 1], [p.exitcode for p in processes]
        (winner,) = [seed for seed, process in enumerate(processes) if process.exitcode == 0]
        assert yaml.safe_load((out / "config.yaml").read_text())["seed"] == winner
        _assert_same_run(out, place / f"alone{winner}")
        winners.append(winner)
    won = ", ".join(f"{winners.count(seed)}" for seed in range(STARTS))
    return f"{rounds} rounds, in each 1 began and {STARTS - 1} were refused (the starts won {won} times)"


def training(place: Path, rounds: int, rng: random.Random) -> str:
    """Kill training."""
    recipe = _recipe(place)
    return kills(
        rounds,
        rng,
        lambda out: ("train", recipe, "--out", out, "--resume"),
        place,
        prepare=lambda out: None,
        compare=_assert_same_run,
        kept=lambda out: latest_checkpoint(out / "checkpoints"),
    )


def evaluation(place: Path, rounds: int, rng: random.Random) -> str:
    """Kill a test of a trained run."""
    trained = _trained(place)
    return kills(
        rounds,
        rng,
        lambda out: ("evaluate", out, "--episodes", 120, "--mc-samples", 5),
        place,
        prepare=lambda out: shutil.copytree(trained, out),
        compare=lambda one, other: _assert_same_file(one, other, "evaluation-test-5samples.json"),
        kept=lambda out: _measured(out / "evaluation-test-5samples.json", "accuracies"),
    )


def attack(place: Path, rounds: int, rng: random.Random) -> str:
    """Kill attacks on a trained run."""
    trained = _trained(place)

    def copied(out: Path) -> None:
        shutil.copytree(trained, out / "run")

    return kills(
        rounds,
        rng,
        lambda out: ("attack", out / "run", "--episodes", 5, "--steps", 10, "--mc-samples", 2, "--norm", "linf"),
        place,
        prepare=copied,
        compare=lambda one, other: _assert_same_file(one / "run", other / "run", "attack-run.json"),
        kept=lambda out: _measured(out / "run" / "attack-run.json", "episodes"),
    )


def preparation(place: Path, rounds: int, rng: random.Random) -> str:
    """Kill the preparation of a folder of images."""
    birds, pixels = place / "birds", np.random.default_rng(0)
    for name in "abcdefgh":
        (birds / name).mkdir(parents=True)
        for number in range(40):
            image = pixels.integers(0, 256, (200, 200, 3), dtype=np.uint8)
            Image.fromarray(image).save(birds / name / f"{number}.png")

    def command(out: Path) -> tuple[object, ...]:
        os.environ["METADROPOUT_CACHE"] = str(out)
        return "data", "prepare", "folder", "--from", birds

    def same(one: Path, other: Path) -> None:
        files = [{path.name: path.read_bytes() for path in sorted(out.iterdir())} for out in (one, other)]
        assert files[0] == files[1], "another prepared set, or something is left behind"
        assert len(files[0]) == 3, list(files[0])  # pixels, manifest and lock

    return kills(rounds, rng, command, place, prepare=lambda out: None, compare=same, kept=lambda out: None)


def kills(
    rounds: int,
    rng: random.Random,
    command: Callable[[Path], tuple[object, ...]],
    place: Path,
    *,
    prepare: Callable[[Path], object],
    compare: Callable[[Path, Path], None],
    kept: Callable[[Path], Any],
) -> str:
    """Kill a command at random moments, call it again, and compare.

    Args:
        rounds: how many kills.
        rng: chooses the moments.
        command: its arguments, for a folder.
        place: where folders are made.
        prepare: makes what the command needs in a folder.
        compare: fails if two folders hold different results.
        kept: what a killed command leaves in a folder, None for nothing; fails if that is damaged.
    """
    whole = place / "whole"
    prepare(whole)
    begun = time.monotonic()
    finish(*command(whole))
    duration = time.monotonic() - begun
    hits = with_something = late = 0
    while hits < rounds:
        out = place / f"killed{hits}-{late}"
        prepare(out)
        process = start(*command(out))
        process.join(timeout=rng.uniform(0, duration))
        process.kill()
        process.join()
        if process.exitcode == 0:
            late += 1
            continue
        hits += 1
        with_something += out.exists() and kept(out) is not None
        finish(*command(out))
        compare(out, whole)
        shutil.rmtree(out)
    return (
        f"{hits} kills within {duration:.1f} s, {hits} went on to the same result bit for bit; "
        f"{with_something} had something to go on from ({late} more came too late)"
    )


def _recipe(place: Path, **changes: int) -> Path:
    path = place / "tiny.yaml"
    path.write_text(yaml.safe_dump({**TINY, "training": {**TINY["training"], **changes}}))  # type: ignore[dict-item]
    return path


def _trained(place: Path) -> Path:
    finish("train", _recipe(place, iterations=5), "--out", place / "trained")
    return place / "trained"


def _measured(path: Path, name: str) -> list[Any] | None:
    return json.loads(path.read_text())[name] or None if path.exists() else None


def _assert_same_run(one: Path, other: Path) -> None:
    first, second = weights(one), weights(other)
    assert first.keys() == second.keys()
    assert all(first[name].equal(second[name]) for name in first), f"{one} has other weights than {other}"
    lines = [_without_times(path / "metrics.jsonl") for path in (one, other)]
    assert lines[0] == lines[1], f"{one} has other metrics than {other}"


def _without_times(path: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in ("seconds", "tasks_per_second")} for line in lines]


def _assert_same_file(one: Path, other: Path, name: str) -> None:
    assert (one / name).read_bytes() == (other / name).read_bytes(), f"{one / name} differs from {other / name}"


KINDS: dict[str, Callable[[Path, int, random.Random], str]] = {
    "starts": simultaneous_starts,
    "training": training,
    "evaluation": evaluation,
    "attack": attack,
    "preparation": preparation,
}


def main() -> int:
    """Run the rounds and print a line for each kind."""
    parser = argparse.ArgumentParser(prog="python -m reliability.rounds", description=__doc__.partition("\n")[0])
    parser.add_argument("kinds", nargs="*", choices=[*KINDS, []], metavar="KIND", help=f"of {', '.join(KINDS)}")
    parser.add_argument("--rounds", type=int, default=20, help="of each kind (default: 20)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (default: 0)")
    options = parser.parse_args()
    for kind in options.kinds or KINDS:
        with tempfile.TemporaryDirectory() as place:
            os.environ["METADROPOUT_CACHE"] = str(Path(place) / "cache")
            said = KINDS[kind](Path(place), options.rounds, random.Random(options.seed))
        print(f"{kind:<12} {said}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
