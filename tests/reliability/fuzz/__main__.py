"""`python -m reliability.fuzz`: tries each reader for some time and prints what came of it."""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import shlex
import sys
import tempfile
import warnings
from contextlib import redirect_stdout
from hashlib import sha256
from pathlib import Path

import torch
import yaml
from PIL import Image
from reliability.fuzz.targets import TARGETS
from reliability.fuzz.trying import SECONDS_FOR_A_TRY, Tally, fresh, replay, try_for

from metadropout.cli import main as command_line

TINY = {
    "data": {"name": "glyphs", "train_classes": 6, "validation_classes": 3, "test_classes": 3},
    "episode": {"way": 3, "query": 2},
    "network": {"channels": 2},
    "learner": {"steps": 1},
    "training": {"iterations": 3, "meta_batch": 1, "log_every": 1, "validate_every": 2, "validation_episodes": 2},
    "machine": {"device": "cpu", "threads": 1},
}


def main() -> int:
    """Try readers, print a line for each, and return 1 if any failed."""
    parser = argparse.ArgumentParser(prog="python -m reliability.fuzz", description=__doc__)
    parser.add_argument("readers", nargs="*", metavar="READER", help=f"default: all, which are {', '.join(TARGETS)}")
    parser.add_argument("--seconds", type=float, default=60, help="for each reader (default: 60)")
    parser.add_argument("--seed", type=int, default=0, help="of the inputs (default: 0)")
    parser.add_argument("--findings", type=Path, default=Path("fuzz-findings"), help="where failing inputs are kept")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="give this one input to READER and show the error")
    options = parser.parse_args()
    if unknown := [name for name in options.readers if name not in TARGETS]:
        parser.error(f"there is no reader '{unknown[0]}'; known are: {', '.join(TARGETS)}")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable()
    with tempfile.TemporaryDirectory() as place:
        shared = fresh(Path(place) / "shared")
        os.environ.update(METADROPOUT_DATA=str(shared), METADROPOUT_CACHE=str(shared / "cache"))
        make_shared(shared)
        if options.replay:
            (name,) = options.readers
            replay(TARGETS[name](shared, fresh(Path(place) / name)), options.replay)
            return 0
        tallies = [
            run_one(name, options.seconds, options.seed, shared, Path(place) / name, options.findings)
            for name in options.readers or TARGETS
        ]
    return int(any(tally.failure for tally in tallies))


def make_shared(shared: Path) -> None:
    """Make a small run with a test, an attack and a figure, and a folder of images."""
    (shared / "tiny.yaml").write_text(yaml.safe_dump(TINY))
    run = str(shared / "run")
    commands = [
        ["train", str(shared / "tiny.yaml"), "--out", run],
        ["evaluate", run, "--episodes", "3", "--mc-samples", "2"],
        ["attack", run, "--episodes", "2", "--steps", "1", "--mc-samples", "1", "--norm", "linf", "--epsilon", "0.1"],
        ["figures", run, "--only", "noise"],
    ]
    with redirect_stdout(sys.stderr):
        for command in commands:
            if command_line(command):
                raise SystemExit(f"cannot begin: metadropout {shlex.join(command)} failed")
    for number, name in enumerate("abcdefgh"):
        (shared / "birds" / name).mkdir(parents=True)
        for image in range(3):
            Image.new("RGB", (12, 10), (20 * number, 80 * image, 30)).save(shared / "birds" / name / f"{image}.png")


def run_one(name: str, seconds: float, seed: int, shared: Path, place: Path, findings: Path) -> Tally:
    """Try one reader in a process of its own, keep the input of a failure, and print a line."""
    fresh(place)
    # Forked, so that PyTorch is loaded once.
    process = multiprocessing.get_context("fork").Process(target=_child, args=(name, seconds, seed, shared, place))
    process.start()
    process.join()
    outcome = place / "outcome.json"
    if outcome.exists():
        tally = Tally(**json.loads(outcome.read_text()))
    else:
        ended = f"killed by signal {-process.exitcode}" if (process.exitcode or 0) < 0 else "stopped"
        trace = (place / "trace").read_text()
        tally = Tally(failure=f"{ended}, or a try took more than {SECONDS_FOR_A_TRY:g} s:\n{trace}")
    print(
        f"{name:<16} {tally.tries:>8} tries {tally.refused:>8} refused for {tally.kinds:>3} reasons "
        f"{tally.seconds:>6.1f} s, the slowest {tally.slowest:.2f} s, {tally.peak_bytes / 2**20:.0f} MB"
        + (" FAILED" if tally.failure else ""),
        flush=True,
    )
    if tally.failure:
        content = (place / "input").read_bytes()
        findings.mkdir(parents=True, exist_ok=True)
        kept = findings / f"{name}-{sha256(content).hexdigest()[:12]}"
        kept.write_bytes(content)
        kept.with_suffix(".txt").write_text(tally.failure)
        print(
            f"{tally.failure}\nkept; try it again with: python -m reliability.fuzz {name} --replay {kept}", flush=True
        )
    return tally


def _child(name: str, seconds: float, seed: int, shared: Path, place: Path) -> None:
    os.environ["METADROPOUT_CACHE"] = str(place / "cache")
    os.chdir(place)
    with open(os.devnull, "w") as nowhere, (place / "trace").open("w") as trace:
        sys.stdout = sys.stderr = nowhere
        target = TARGETS[name](shared, fresh(place / "own"))
        tally = try_for(target, seconds, seed, place / "input", trace)
    (place / "outcome.json").write_text(json.dumps(tally.as_dict()))


if __name__ == "__main__":
    sys.exit(main())
