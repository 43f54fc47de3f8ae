"""Fuzzing itself: it finds what it looks for, and no reader fails within a second."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from reliability.fuzz import trying
from reliability.fuzz.mutations import spoil_bytes, spoil_json
from reliability.fuzz.targets import TARGETS
from reliability.fuzz.trying import Tally, Target, _try_once

from metadropout.errors import DataError

ROOT = Path(__file__).parent.parent


@pytest.mark.timeout(600)
def test_no_reader_fails_on_spoilt_files(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "reliability.fuzz", "--seconds", "1", "--findings", str(tmp_path)]
    # Without compiled kernels, which another test may be building.
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'tests'}:{ROOT / 'src'}", "METADROPOUT_FUSED": "0"}
    ended = subprocess.run(command, cwd=tmp_path, env=environment, check=False, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout
    lines = {line.split()[0]: line for line in ended.stdout.splitlines() if " tries " in line}
    assert lines.keys() == TARGETS.keys()
    assert not list(tmp_path.glob("*-*"))


class Anything(Target):
    """Takes what it is told to take."""

    def __init__(self, what: str) -> None:
        super().__init__(Path(), Path())
        self.seeds, self.what = [b"seed"], what

    def spoil(self, rng: random.Random, seed: bytes) -> bytes:
        return spoil_bytes(rng, seed, self.seeds)

    def read(self, content: bytes) -> bool:
        if self.what == "refuse":
            raise DataError("no")
        if self.what == "fail":
            raise KeyError("something")
        if self.what == "fill memory":
            assert len(bytearray(2**28)) == 2**28
        return True


@pytest.mark.parametrize(
    ("what", "refused", "failure"),
    [("accept", 0, ""), ("refuse", 1, ""), ("fail", 0, "KeyError: 'something'"), ("fill memory", 0, "bytes of memory")],
)
def test_a_try_is_counted_or_fails(
    what: str, refused: int, failure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trying, "MOST_MEMORY", 0 if what == "fill memory" else 2**50)
    tally = Tally()
    with (tmp_path / "trace").open("w") as trace:
        _try_once(Anything(what), b"", tally, trace)
    assert (tally.tries, tally.refused) == (1, refused)
    assert failure in tally.failure
    assert bool(tally.failure) == bool(failure)


HANGS = """
import sys, time
from pathlib import Path
from reliability.fuzz import trying

class Hangs(trying.Target):
    seeds = [b"seed"]
    def __init__(self): self.seeds = [b"seed"]
    def spoil(self, rng, seed): return seed
    def read(self, content): time.sleep(60)

trying.SECONDS_FOR_A_TRY = 0.2
trying.try_for(Hangs(), 60, 0, Path("input"), open("trace", "w"))
"""


def test_a_try_that_hangs_ends_the_process_and_leaves_its_input(tmp_path: Path) -> None:
    begun = time.monotonic()
    environment = {"PYTHONPATH": f"{ROOT / 'tests'}:{ROOT / 'src'}"}
    ended = subprocess.run([sys.executable, "-c", HANGS], cwd=tmp_path, env=environment, check=False)
    assert ended.returncode == 1
    assert time.monotonic() - begun < 50
    assert (tmp_path / "input").read_bytes() == b"seed"
    assert "in read" in (tmp_path / "trace").read_text()


def test_inputs_are_the_same_for_the_same_seed_and_differ_from_their_origin() -> None:
    tree = {"a": [1, 2, {"b": "text"}], "c": None}
    texts = [spoil_json(random.Random(seed), tree) for seed in range(200)]
    assert texts == [spoil_json(random.Random(seed), tree) for seed in range(200)]
    assert len(set(texts)) > 150
    assert tree == {"a": [1, 2, {"b": "text"}], "c": None}
