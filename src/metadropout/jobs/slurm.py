"""Jobs on a cluster with Slurm, through submitit: a job array with one run per job.

A job that is preempted or meets its time limit saves its state and goes back into the queue, and goes on from there.
What is in the queue is kept in a file beside the runs, so that the same command can be called again at any time.
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from metadropout.data.locks import exclusive
from metadropout.errors import ConfigError
from metadropout.files import write_atomically
from metadropout.jobs.job import Job
from metadropout.jobs.places import Watcher, end_of, stopped_by_sigterm
from metadropout.runs.reading import read_checked
from metadropout.training.checkpoints import latest_checkpoint

DEFAULT_TIME = "1:00:00"
AT_ONCE = 50
"""Jobs at once unless told: enough for a table, and polite."""

OURS = ("array", "signal", "output", "error", "open-mode", "requeue", "nodes", "ntasks", "ntasks-per-node", "wrap")
"""Options of sbatch that are not the user's to set: one run is one job with one task."""

ENDED = ("CANCELLED", "FAILED", "TIMEOUT", "OUT_OF_MEMORY", "DEADLINE", "COMPLETED")
GONE = "no longer in the queue"
LOST = ("NODE_FAIL", "BOOT_FAIL", "PREEMPTED")
"""Nobody's fault: such a job is submitted again, where the cluster does not do that by itself."""

STOPPED = (143, 130, -signal.SIGTERM, -signal.SIGINT)
"""Statuses of commands that were asked to stop, and of those that ended by the signal itself."""

MOST_FRUITLESS = 3
"""How often in a row a job may go back into the queue without having got any further."""

SLOWEST_LOOK = 15.0
PATIENCE = 60.0
"""Seconds until a file is seen that another machine has written, or Slurm answers again."""


class Slurm:
    """A cluster.

    Args:
        folder: of the runs; in it, the folder "slurm" holds what the queue needs. All nodes have to see it.
        options: of sbatch, by name: {"partition": "gpu", "time": "8:00:00"}.
        at_once: how many jobs run at once.
    """

    def __init__(self, folder: Path, options: Mapping[str, str], at_once: int = AT_ONCE) -> None:
        self.at_once = at_once
        self._options = {name.replace("_", "-"): value for name, value in options.items()}
        for name, value in self._options.items():
            if name in OURS or not re.fullmatch(r"[a-z][a-z0-9-]*", name):
                raise ConfigError(f"--slurm.{name} cannot be set: use options of sbatch, other than {', '.join(OURS)}")
            if not isinstance(value, str) or not value.isprintable():
                raise ConfigError(f"--slurm.{name}: {value!r} is not a value that sbatch can take")
        self._minutes = _minutes(self._options.pop("time", DEFAULT_TIME))
        self._queue = _Queue(folder / "slurm")

    def run(self, jobs: Sequence[Job], watcher: Watcher) -> list[str]:
        """Submit what is neither done nor in the queue, and wait until all of it has ended."""
        jobs = [job for job in jobs if job.result() is None]
        ended: dict[str, str] = {}
        try:
            with stopped_by_sigterm():
                self._submit(jobs, watcher)
                self._wait(jobs, ended, watcher)
        except KeyboardInterrupt:
            ids = " ".join(sorted({ident.split("_")[0] for ident in self._queue.read().values()}))
            watcher.on_message(
                "the jobs stay in Slurm's queue and go on; call the same command to wait for them, with --show "
                f"to see how they are; end them with: scancel {ids}"
            )
            raise
        return list(ended.values())

    def _submit(self, jobs: Sequence[Job], watcher: Watcher) -> None:
        """Put the jobs into the queue that are not in it."""
        submitit = _submitit()
        with self._queue.held():
            known, states = self._queue.read(), queue_states()
            active = [name for name, ident in known.items() if states.get(ident, "COMPLETED") not in (*ENDED, *LOST)]
            missing = [job for job in jobs if job.folder.name not in active]
            if not missing:
                return
            executor = submitit.SlurmExecutor(folder=self._queue.folder, max_num_timeout=10**6)
            executor.update_parameters(
                job_name="metadropout",
                time=self._minutes,
                array_parallelism=max(1, self.at_once - len(active)),
                additional_parameters={"requeue": True, **self._options},
            )
            try:
                with executor.batch():
                    submitted = [executor.submit(OnNode(job)) for job in missing]
            except (RuntimeError, OSError) as error:  # what sbatch says
                said = " ".join(str(error).split())
                raise ConfigError(f"Slurm does not take the jobs: {said}; see --slurm.partition and so on") from None
            for job, entry in zip(missing, submitted, strict=True):
                known[job.folder.name] = str(entry.job_id)
            self._queue.write(known)
        first = str(submitted[0].job_id).split("_")[0]
        count = f"{len(missing)} job{'' if len(missing) == 1 else 's'}"
        watcher.on_message(f"submitted {count} to Slurm as {first}, at most {self.at_once} at once")

    def _wait(self, jobs: Sequence[Job], ended: dict[str, str], watcher: Watcher) -> None:
        pause, gone = 0.5, dict[str, float]()
        while True:
            waiting = [job for job in jobs if job.folder.name not in ended and job.result() is None]
            done = len(jobs) - len(waiting)
            watcher.update(done, sum(job.iterations_done() for job in jobs))
            if not waiting:
                return
            time.sleep(pause)
            pause = min(SLOWEST_LOOK, 1.1 * pause)
            known, states, lost = self._queue.read(), queue_states(patience=PATIENCE), []
            for job in waiting:
                name = job.folder.name
                state = states.get(known[name], "COMPLETED")
                if state in LOST:
                    lost.append(job)
                if state not in ENDED or job.result() is not None:
                    gone.pop(name, None)
                    continue
                # Its result may have been written on another machine, and not be seen here yet.
                since = gone.setdefault(name, time.monotonic())
                if state != "COMPLETED" or time.monotonic() - since > PATIENCE:
                    ended[name] = _ended(job, known[name], state, self._queue.folder)
            if lost:
                self._submit(lost, watcher)


class OnNode:
    """What a job does on its node: it trains and tests a run by the command line.

    submitit calls it, and on the signal that precedes a time limit `checkpoint`, which says how to go on later.

    Args:
        job: what to run.
        fruitless: how often in a row it has gone back into the queue without having got any further.
    """

    def __init__(self, job: Job, fruitless: int = 0) -> None:
        self.job, self.fruitless = job, fruitless
        self.before: object = None
        self.process: subprocess.Popen[bytes] | None = None

    def __call__(self) -> None:
        """Do what is still to be done."""
        job = self.job
        self.before = self._state()
        job.log.parent.mkdir(parents=True, exist_ok=True)
        with job.log.open("a") as log:
            print(_heading(_own_id()), f"on {os.uname().nodename}", file=log)
        if job.result() is not None:
            return
        for arguments in job.commands(threads=int(os.environ.get("SLURM_CPUS_PER_TASK", "1"))):
            status = self._call(arguments)
            if status in STOPPED:
                # The node was told to end everything, this process and the command alike. Where the cluster itself
                # does not put the job back, because it only gives notice of a preemption, submitit does.
                if _is_running():
                    signal.raise_signal(signal.SIGUSR2)
                sys.exit(143)
            if status:
                sys.exit(1)

    def checkpoint(self) -> Any:
        """Let the command save and end, and return what goes on later; None where that would be in vain."""
        if self.process is not None and not self._has_ended():
            self.process.terminate()
            while not self._has_ended():
                time.sleep(0.1)
        fruitless = 0 if self._state() != self.before else self.fruitless + 1
        if fruitless >= MOST_FRUITLESS:
            with self.job.log.open("a") as log:
                print(f"{fruitless} times its time was up before it had got any further: give it more time", file=log)
            return None
        return _submitit().helpers.DelayedSubmission(OnNode(self.job, fruitless))

    def _call(self, arguments: list[str]) -> int:
        with self.job.log.open("ab") as output:
            # Slurm sends its signals to all processes. The one that precedes a time limit is for submitit alone; a
            # command that is asked to stop twice stops without saving.
            self.process = subprocess.Popen(
                [sys.executable, "-m", "metadropout", *arguments],
                stdout=output,
                stderr=output,
                preexec_fn=_ignore_usr2,  # noqa: PLW1509 (there are no other threads)
            )
        while not self._has_ended():
            time.sleep(0.1)
        return self.process.wait()

    def _has_ended(self) -> bool:
        """Ask without any lock, because a signal's handler asks in the middle of the same question."""
        assert self.process is not None
        how = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return self.process.returncode is not None or os.waitid(os.P_PID, self.process.pid, how) is not None

    def _state(self) -> object:
        """Return what is different once the run has got any further."""
        checkpoint = latest_checkpoint(self.job.folder / "checkpoints")
        evaluation = self.job.evaluation
        return checkpoint, evaluation.stat().st_size if evaluation.exists() else 0


class _Queue:
    """Which job of Slurm does which run, in a file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._path = folder / "jobs.json"

    def held(self) -> Any:
        """Keep other calls from submitting the same jobs."""
        self.folder.mkdir(parents=True, exist_ok=True)
        return exclusive(self.folder / ".lock")

    def read(self) -> dict[str, str]:
        """Return the jobs' identifiers by the names of the runs' folders."""
        if not self._path.exists():
            return {}
        return read_checked(self._path, TypeAdapter(dict[str, str]), "delete it once squeue shows none of its jobs")

    def write(self, jobs: Mapping[str, str]) -> None:
        write_atomically(self._path, json.dumps(jobs, indent=1) + "\n")


def slurm_status(folder: Path, jobs: Sequence[Job]) -> list[str]:
    """Say how those jobs are that are not done, as far as they were given to Slurm.

    Args:
        folder: of the runs.
        jobs: the ones that are asked for.

    Returns:
        A line with counts, and a text for each job that failed; nothing where none was given to Slurm.
    """
    queue = _Queue(folder / "slurm")
    known = queue.read()
    mine = [job for job in jobs if job.folder.name in known and job.result() is None]
    if not mine:
        return []
    try:
        states = queue_states()
    except ConfigError as error:
        return [str(error)]
    found = [(job, states.get(known[job.folder.name], GONE)) for job in mine]
    counts = Counter(state.lower() for _, state in found)
    lines = ["Slurm's jobs: " + ", ".join(f"{count} {state}" for state, count in counts.items())]
    failed = [(job, state) for job, state in found if state in (*ENDED, GONE)]
    return lines + [_ended(job, known[job.folder.name], state, queue.folder) for job, state in failed]


def queue_states(patience: float = 0) -> dict[str, str]:
    """Return the state of each of the user's jobs that Slurm knows of, by its identifier.

    By squeue and not by sacct, which asks a data base that not every cluster has.

    Args:
        patience: seconds for which to ask again, where Slurm does not answer.
    """
    command = ["squeue", "--noheader", "--array", "--states=all", f"--user={os.getuid()}", "--format=%i|%T"]
    end = time.monotonic() + patience
    while True:
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=max(30, patience))
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ConfigError(f"Slurm cannot be asked for its jobs: {error}") from None
        if done.returncode == 0:
            return dict(line.split("|", 1) for line in done.stdout.split())
        if time.monotonic() > end:
            raise ConfigError(f"Slurm cannot be asked for its jobs: {done.stderr.strip()}")
        time.sleep(1)


def _ended(job: Job, ident: str, state: str, folder: Path) -> str:
    """Say how a job has ended that has no result, with the end of its log."""
    logs = [job.log, folder / f"{ident}_0_log.err"]
    ends = {log: end_of(log) for log in logs}
    # A job that could not even begin has written nothing into the run's own log.
    begun = any(_heading(ident) in line for line in end_of(job.log, 2000))
    log = logs[0] if begun else logs[1]
    said = f"{job.folder.name}: job {ident} of Slurm: {state}; its log is {log}"
    return "\n    ".join([f"{said}, which ends:", *ends[log]] if ends[log] else [said])


def _heading(ident: str) -> str:
    return f"-- job {ident} of Slurm,"


def _own_id() -> str:
    """Return the identifier of this job, as submitit and squeue write it."""
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    return f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}" if array else os.environ["SLURM_JOB_ID"]


def _is_running() -> bool:
    """Say whether Slurm lets this job run; a job that is cancelled or put back into the queue is on its way out."""
    command = ["squeue", "--noheader", "--format=%T", f"--job={os.environ['SLURM_JOB_ID']}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() == "RUNNING"


def _ignore_usr2() -> None:
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # stays so in the command


def _minutes(text: str) -> int:
    """Read a time as sbatch does, such as 90, 8:00:00 or 2-12:00, and return it in minutes, rounded up."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if match is None:
        raise ConfigError(f"--slurm.time is {text!r}; write it as MINUTES, HOURS:MINUTES:SECONDS or DAYS-HOURS")
    days, *rest = match.groups()
    a, b, c = (int(part) if part else 0 for part in rest)
    if days is not None:  # days-hours[:minutes[:seconds]]
        seconds = ((int(days) * 24 + a) * 60 + b) * 60 + c
    elif rest[2] is not None:  # hours:minutes:seconds
        seconds = (a * 60 + b) * 60 + c
    else:  # minutes[:seconds]
        seconds = a * 60 + b
    if seconds == 0:
        raise ConfigError("--slurm.time is 0; give the jobs some minutes")
    return math.ceil(seconds / 60)


def _submitit() -> Any:
    try:
        import submitit  # noqa: PLC0415 (optional)
    except ImportError:
        raise ConfigError(
            "--on slurm needs submitit, which is not installed: pip install 'metadropout[cluster]'"
        ) from None
    if not submitit.SlurmExecutor.affinity() > 0:
        raise ConfigError("--on slurm: there is no srun here; call it on a machine from which jobs can be submitted")
    return submitit
