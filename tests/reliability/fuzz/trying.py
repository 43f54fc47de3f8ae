"""Tries of one reader, in a process of its own."""

from __future__ import annotations

import faulthandler
import random
import re
import resource
import shutil
import time
import traceback
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TextIO

from metadropout.data.trees import UnreadableError
from metadropout.errors import MetadropoutError

OWN_ERRORS = (MetadropoutError, UnreadableError)
SECONDS_FOR_A_TRY = 5.0
MOST_MEMORY = 2**30
HARD_LIMIT = 4 * 2**30
"""Bytes above which the system refuses memory, so that a bomb does not take the machine with it."""
MOST_SEEDS = 400


class Target(ABC):
    """A reader, with files to begin from.

    Args:
        shared: a folder with a small run and data sets, not to be changed.
        place: a folder of its own.
    """

    seeds: list[bytes]

    def __init__(self, shared: Path, place: Path) -> None:
        self.shared, self.place = shared, place
        self.seeds = []

    @abstractmethod
    def spoil(self, rng: random.Random, seed: bytes) -> bytes:
        """Make another input from one."""

    @abstractmethod
    def read(self, content: bytes) -> bool:
        """Give an input to the reader, and what it accepts to what works with it; return whether it was accepted.

        Raises:
            MetadropoutError: if it was refused.
        """


@dataclass
class Tally:
    """What came of the tries of one reader."""

    tries: int = 0
    refused: int = 0
    kinds: int = 0
    """How many different reasons refusals had."""
    slowest: float = 0.0
    seconds: float = 0.0
    peak_bytes: int = 0
    failure: str = ""
    reasons: set[str] = field(default_factory=set)

    def as_dict(self) -> dict[str, object]:
        """Return all but the reasons, as JSON."""
        return {name: value for name, value in asdict(self).items() if name != "reasons"}


def try_for(target: Target, seconds: float, seed: int, input_path: Path, trace: TextIO) -> Tally:
    """Give a reader spoilt inputs for some time; stops at the first failure, whose input is left at a path.

    Args:
        target: the reader.
        seconds: for how long.
        seed: of the inputs; the same ones come for the same seed.
        input_path: where each input is written before it is tried.
        trace: where the stack is written if a try takes too long or the process dies.
    """
    faulthandler.enable(trace)
    resource.setrlimit(resource.RLIMIT_DATA, (HARD_LIMIT, HARD_LIMIT))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    tally = Tally()
    whole = list(target.seeds)
    begun = time.monotonic()
    while not tally.failure and time.monotonic() - begun < seconds:
        rng = random.Random(f"{seed} {tally.tries}")
        if tally.tries < len(whole):  # first the seeds as they are; the first of them has to be taken
            content = whole[tally.tries]
        else:
            content = target.spoil(rng, rng.choice(whole if rng.random() < 0.6 else target.seeds))
        input_path.write_bytes(content)
        _try_once(target, content, tally, trace)
        if tally.tries == tally.refused == 1:
            tally.failure = "a file that is whole was refused"
        tally.seconds = time.monotonic() - begun
    return tally


def _try_once(target: Target, content: bytes, tally: Tally, trace: TextIO) -> None:
    started = time.monotonic()
    tally.tries += 1
    faulthandler.dump_traceback_later(SECONDS_FOR_A_TRY, exit=True, file=trace)
    try:
        accepted, reason = target.read(content), ""
    except OWN_ERRORS as error:
        accepted, reason = False, f"{type(error).__name__}: {error}"
    except BaseException:
        accepted, reason = False, ""
        tally.failure = traceback.format_exc(limit=-12)
    finally:
        faulthandler.cancel_dump_traceback_later()
    tally.slowest = max(tally.slowest, time.monotonic() - started)
    tally.peak_bytes = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if not tally.failure and tally.peak_bytes > MOST_MEMORY:
        tally.failure = f"{tally.peak_bytes} bytes of memory"
    tally.refused += not accepted and not tally.failure
    kind = re.sub(r"'[^']*'|[0-9]+|\S*/\S*", "", reason)[:200]
    if kind not in tally.reasons and len(target.seeds) < MOST_SEEDS and len(content) < 200_000:
        tally.reasons.add(kind)
        tally.kinds = len(tally.reasons - {""})
        target.seeds.append(content)  # what is refused for a new reason is a step towards the next one


def replay(target: Target, path: Path) -> None:
    """Give a reader one input, and let any error through."""
    try:
        print("accepted" if target.read(path.read_bytes()) else "refused")
    except OWN_ERRORS as error:
        print(f"refused: {error}")


def fresh(place: Path) -> Path:
    """Return an empty folder."""
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    return place
