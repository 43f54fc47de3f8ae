"""Jobs in processes of this machine, several at once."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from metadropout.errors import MetadropoutError
from metadropout.jobs.job import Job
from metadropout.jobs.places import Watcher, end_of, stopped_by_sigterm


class Local:
    """This machine.

    Args:
        at_once: how many jobs run at once; each computes on one thread unless its options say otherwise.
    """

    def __init__(self, at_once: int) -> None:
        self.at_once = at_once

    def run(self, jobs: Sequence[Job], watcher: Watcher) -> list[str]:
        """Run jobs; a stop reaches them all, and they save their state."""
        worker = _Worker()
        with ThreadPoolExecutor(self.at_once) as pool:
            futures = [pool.submit(worker.run, job) for job in jobs]
            try:
                with stopped_by_sigterm():
                    while not all(future.done() for future in futures):
                        done = sum(future.done() for future in futures)
                        watcher.update(done, sum(job.iterations_done() for job in jobs))
                        time.sleep(1)
            except KeyboardInterrupt:
                watcher.on_message("stopping: all runs save their state; the same command goes on")
                worker.stop()
                raise
            finally:
                for future in futures:
                    future.cancel()
        problems = []
        for future in futures:
            try:
                problems.append(future.result())
            except MetadropoutError as error:
                problems.append(str(error))
        return [problem for problem in problems if problem is not None]


class _Worker:
    """Runs jobs in processes of their own, so that several can run at once and be stopped."""

    def __init__(self) -> None:
        self._processes: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.Lock()
        self._stopping = False

    def run(self, job: Job) -> str | None:
        """Train and test a run unless that is done; return what went wrong, None if nothing did."""
        if job.result() is not None:
            return None
        job.log.parent.mkdir(parents=True, exist_ok=True)
        for arguments in job.commands():
            with job.log.open("ab") as output:
                status = self._call(arguments, output)
            if status != 0:
                said = "".join(end_of(job.log, 1))
                return f"{job.folder.name}: stopped with status {status} ({said}); its log is {job.log}"
        return None

    def stop(self) -> None:
        """Ask all processes to save and stop."""
        with self._lock:
            self._stopping = True
            for process in self._processes:
                process.terminate()

    def _call(self, arguments: list[str], output: Any) -> int:
        with self._lock:
            if self._stopping:
                return 143
            # In a group of its own: Ctrl-C reaches the children through `stop` alone, once.
            process = subprocess.Popen(
                [sys.executable, "-m", "metadropout", *arguments],
                stdout=output,
                stderr=output,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
            self._processes.add(process)
        try:
            return process.wait()
        finally:
            with self._lock:
                self._processes.discard(process)
