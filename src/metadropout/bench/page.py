"""How fast the page answers on one core, and what many visitors do to it.

    python -m metadropout.bench.page
    python -m metadropout.bench.page --clients 5 --seconds 5      # smaller

starts `metadropout app` on one core and asks as the page does: after a stroke on an example (the model adapts anew),
after a stroke on the new drawing (it does not), and then with many visitors at once, each of whom changes an example in
every other request. Times are those that a visitor waits; beside them the server's processor time, which says what a
free core takes where this one is shared. Linux only.
"""

from __future__ import annotations

import argparse
import base64
import itertools
import json
import os
import random
import re
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np

from metadropout.data.glyphs import Glyphs

WEIGHTS = "omniglot-5way-1shot-metadropout"


class Visitor:
    """Asks what the page asks, over one connection."""

    def __init__(self, port: int, name: str, seed: int, samples: int) -> None:
        self.connection = HTTPConnection("127.0.0.1", port, timeout=300)
        self.name, self.samples = name, samples
        self.glyphs = Glyphs(20_000_000 + 1000 * seed, 6, images_per_class=20)
        self.rng = random.Random(seed)
        self.classes = [[self.image(number)] for number in range(5)]
        self.task: str | None = None

    def image(self, number: int) -> str:
        """Draw a class once more, by a random hand and with a speck, so that no two drawings are the same."""
        hand = np.array([self.rng.randrange(20)])
        drawn = self.glyphs.gather(np.array([number]), hand)
        drawn[0, 0, 0, 0] = self.rng.randrange(256)
        return base64.b64encode(drawn.tobytes()).decode()

    def stroke_on_example(self) -> None:
        """Change one of the examples."""
        number = self.rng.randrange(5)
        self.classes[number] = [self.image(number)]
        self.task = None

    def ask(self) -> tuple[int, float]:
        """Ask what a new drawing is; return the answer's status and the milliseconds until it was there."""
        body: dict[str, Any] = {"visitor": self.name, "weights": [WEIGHTS], "samples": self.samples}
        body |= {"classes": self.classes} if self.task is None else {"task": self.task}
        content = json.dumps(body | {"queries": [self.image(self.rng.randrange(5))]})
        start = time.perf_counter()
        self.connection.request("POST", "/api/classify", content, {"Content-Type": "application/json"})
        response = self.connection.getresponse()
        answer = json.loads(response.read())
        waited = 1000 * (time.perf_counter() - start)
        self.task = answer.get("task")
        return response.status, waited


def times(port: int, samples: int, changes: bool, count: int) -> list[float]:
    """Measure answers to strokes, one after the other, in milliseconds."""
    visitor = Visitor(port, f"one-{samples}-{changes}", samples, samples)
    visitor.ask()
    found = []
    for _ in range(count):
        if changes:
            visitor.stroke_on_example()
        status, waited = visitor.ask()
        assert status == 200
        found.append(waited)
    visitor.connection.close()
    return found


def crowd(port: int, clients: int, seconds: float, process: int) -> tuple[Counter[int], list[float], list[float]]:
    """Let many visitors ask at once; return the statuses, the times, and the server's memory over time, in MB."""
    statuses: Counter[int] = Counter()
    waits: list[float] = []
    lock, end = threading.Lock(), time.monotonic() + seconds

    def visit(number: int) -> None:
        visitor = Visitor(port, f"visitor-{number}", number, 10)
        for turn in itertools.count():
            if turn % 2 == 0:
                visitor.stroke_on_example()
            status, waited = visitor.ask()
            with lock:
                statuses[status] += 1
                waits.append(waited)
            if time.monotonic() > end:
                break
        visitor.connection.close()

    threads = [threading.Thread(target=visit, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    sizes = [memory(process)]
    while any(thread.is_alive() for thread in threads):
        time.sleep(0.5)
        sizes.append(memory(process))
    return statuses, waits, sizes


def processor_ms(process: int) -> float:
    """Return the processor time that a process has taken so far, in milliseconds."""
    threads = Path(f"/proc/{process}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e6


def memory(process: int) -> float:
    """Return how much memory a process holds, in MB."""
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{process}/status").read_text())
    return int(found[1]) / 1024 if found else 0.0


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=50, help="visitors at once; 0: only the times of one")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--strokes", type=int, default=20)
    options = parser.parse_args()
    one_core = partial(os.sched_setaffinity, 0, {max(os.sched_getaffinity(0))})
    command = [sys.executable, "-m", "metadropout", "app", "--port", "0", "--no-browser", "--weights", WEIGHTS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=one_core) as server:  # noqa: PLW1509
        try:
            assert server.stdout is not None
            said = re.search(r":(\d+) ", server.stdout.readline())
            if said is None:
                raise SystemExit("the server did not start")
            port = int(said[1])
            for samples in (10, 30):
                for changes, what in ((True, "an example (adapts anew)"), (False, "the new drawing")):
                    before = processor_ms(server.pid)
                    found = times(port, samples, changes, options.strokes)
                    used = (processor_ms(server.pid) - before) / (options.strokes + 1)
                    told = (
                        f"median {statistics.median(found):.0f} ms, worst {max(found):.0f} ms, processor {used:.0f} ms"
                    )
                    print(f"S = {samples}, stroke on {what}: {told}", flush=True)
            if not options.clients:
                return
            statuses, waits, sizes = crowd(port, options.clients, options.seconds, server.pid)
            middle, late = statistics.median(waits), statistics.quantiles(waits, n=20)[-1]
            print(f"{options.clients} visitors for {options.seconds:.0f} s: answers by status {dict(statuses)}")
            print(f"  waited {middle:.0f} ms in the median, 95 % under {late:.0f} ms")
            print(f"  memory {sizes[0]:.0f} MB before, {max(sizes):.0f} MB at most, {sizes[-1]:.0f} MB after")
        finally:
            server.terminate()


if __name__ == "__main__":
    main()
