"""A Slurm cluster of one machine for tests: its daemons are started by hand in a temporary folder, and stopped."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

DAEMONS = ("munged", "slurmctld", "slurmd")

# A job that goes back into the queue waits until its credentials have expired: two minutes, or 5 s, the least there is.
CONFIGURATION = """\
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmctldPort={controller_port}
SlurmdPort={node_port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1,batch_sched_delay=0
KillWait=20
SlurmdParameters=config_overrides
NodeName=node NodeHostname={host} NodeAddr=127.0.0.1 Port={node_port} CPUs={cpus} State=UNKNOWN
PartitionName=low Nodes=node Default=YES PriorityTier=1 PreemptMode=REQUEUE MaxTime=INFINITE State=UP
PartitionName=high Nodes=node PriorityTier=10 PreemptMode=OFF MaxTime=INFINITE State=UP
"""


class CannotStartError(Exception):
    """Slurm cannot be run on this machine; the message says why."""


class SlurmCluster:
    """Starts munged, slurmctld and slurmd on entry and stops them on exit.

    Two partitions share the node: "low", the default, and "high", whose jobs preempt those of "low", which go back into
    the queue.

    Args:
        cpus: how many the node claims to have.
    """

    def __init__(self, cpus: int = 4) -> None:
        if missing := [name for name in DAEMONS if shutil.which(name) is None]:
            raise CannotStartError(f"{missing[0]} is not installed (apt-get install slurm-wlm munge)")
        if os.geteuid() != 0:
            raise CannotStartError("only root can start the daemons of Slurm")
        self.cpus = cpus
        # Not in pytest's own folder: munged, which is not root, has to get at its key.
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-"))
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError, subprocess.SubprocessError):
            self.call("scancel", "--full", "--state=PENDING,RUNNING,SUSPENDED", "--user=root")
        for name in reversed(DAEMONS):
            self.stop(name)
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def environment(self) -> dict[str, str]:
        """What tells Slurm's commands which cluster to speak to."""
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def call(self, *command: str) -> str:
        """Run one of Slurm's commands and return what it prints."""
        environment = {**os.environ, **self.environment}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30, check=True)
        return done.stdout

    def start(self, name: str) -> None:
        """Start a daemon."""
        key, log = self.folder / "munge" / "key", self.folder / f"{name}.out"
        files = {"key-file": key, **{kind: key.with_name(kind) for kind in ("socket", "pid-file", "log-file")}}
        munge = [f"--{kind}={path}" for kind, path in files.items()]
        commands: dict[str, Sequence[str]] = {
            "munged": ["munged", "--foreground", *munge, f"--seed-file={key.with_name('seed')}"],
            "slurmctld": ["slurmctld", "-D", "-i"],
            "slurmd": ["slurmd", "-D", "-N", "node"],
        }
        with log.open("ab") as output:
            self.processes[name] = subprocess.Popen(
                commands[name],
                stdout=output,
                stderr=output,
                env={**os.environ, **self.environment},
                user="munge" if name == "munged" else None,
                group="munge" if name == "munged" else None,
                extra_groups=[] if name == "munged" else None,
                start_new_session=True,
            )

    def stop(self, name: str, number: signal.Signals = signal.SIGTERM) -> None:
        """Stop a daemon; jobs that are running go on."""
        process = self.processes.pop(name, None)
        if process is None:
            return
        process.send_signal(number)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def wait_until_ready(self, seconds: float = 20) -> None:
        """Wait until the node takes jobs."""
        end = time.monotonic() + seconds
        while True:
            with suppress(subprocess.SubprocessError):
                if self.call("sinfo", "--noheader", "--format=%T").split()[0] in ("idle", "mixed", "allocated"):
                    return
            ended = [name for name, process in self.processes.items() if process.poll() is not None]
            if ended or time.monotonic() > end:
                said = [self._said(name) for name in ended or ("slurmctld", "slurmd")]
                raise CannotStartError(f"Slurm does not start here: {'; '.join(said)}")
            time.sleep(0.1)

    def _start(self) -> None:
        self.folder.chmod(0o755)
        for name in ("munge", "state", "spool"):
            (self.folder / name).mkdir(mode=0o755)
        key = self.folder / "munge" / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        for path in (key, key.parent):
            try:
                shutil.chown(path, "munge", "munge")
            except LookupError:
                raise CannotStartError("there is no user munge") from None
        controller, node = _free_ports(2)
        configuration = CONFIGURATION.format(
            host=socket.gethostname(), folder=self.folder, controller_port=controller, node_port=node, cpus=self.cpus
        )
        (self.folder / "slurm.conf").write_text(configuration)
        for name in DAEMONS:
            self.start(name)
        self.wait_until_ready()

    def _said(self, name: str) -> str:
        """Return the last line that a daemon wrote."""
        texts = [path.read_text(errors="replace") for path in self.folder.glob(f"{name}.*") if path.suffix != ".pid"]
        lines = [line for text in texts for line in text.strip().splitlines()[-1:]]
        return f"{name}: {' / '.join(lines)}"


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports
