"""Training over several hosts, which are network namespaces here: the same run, and an end to it if one is lost."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from toys import assert_same_weights, finish, start, wait_for

from metadropout.cli import main
from metadropout.training.checkpoints import iteration_of, latest_checkpoint
from metadropout.training.metrics import newest_iteration

pytestmark = pytest.mark.timeout(600)


class Hosts:
    """Network namespaces with an address each, connected by a bridge in one more of them."""

    def __init__(self, count: int) -> None:
        self.name, self.count = f"metadropout-{os.getpid()}", count

    def start(self) -> None:
        switch = f"{self.name}-switch"
        self._ip("netns", "add", switch)
        self._ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        self._ip("-n", switch, "link", "set", "bridge", "up")
        for number in range(self.count):
            host, port = f"{self.name}-{number}", f"port{number}"
            self._ip("netns", "add", host)
            self._ip("link", "add", "net", "netns", host, "type", "veth", "peer", "name", port, "netns", switch)
            self._ip("-n", switch, "link", "set", port, "master", "bridge", "up")
            self._ip("-n", host, "address", "add", f"10.77.0.{number + 1}/24", "dev", "net")
            for device in ("lo", "net"):
                self._ip("-n", host, "link", "set", device, "up")

    def stop(self) -> None:
        for number in (*range(self.count), "switch"):
            subprocess.run(["ip", "netns", "delete", f"{self.name}-{number}"], capture_output=True, check=False)

    def link(self, number: int, state: str) -> None:
        """Pull the cable of a host ("down"), or plug it in again ("up")."""
        self._ip("-n", f"{self.name}-switch", "link", "set", f"port{number}", state)

    def run(self, *arguments: str | Path, hosts: int) -> list[subprocess.Popen[str]]:
        """Start the command line by torchrun on each of some hosts."""
        together = ["--nnodes", str(hosts), "--master-addr", "10.77.0.1", "--master-port", "29577"]
        return [
            subprocess.Popen(
                [
                    *("ip", "netns", "exec", f"{self.name}-{number}", sys.executable, "-m", "torch.distributed.run"),
                    *(*together, "--node-rank", str(number), "--nproc-per-node", "1"),
                    *("-m", "metadropout", *map(str, arguments)),
                ],
                env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "net"},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for number in range(hosts)
        ]

    def _ip(self, *arguments: str) -> None:
        done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"network namespaces cannot be used here: ip {' '.join(arguments)}: {done.stderr.strip()}")


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need root, and ip of the package iproute2")
    found = Hosts(3)
    try:
        found.start()
        yield found
    finally:
        found.stop()


def messages(err: str) -> list[str]:
    return [line for line in err.splitlines() if line.startswith("metadropout:")]


def test_three_hosts_give_the_run_of_one_and_a_pulled_link_ends_it_soon_and_it_goes_on(
    hosts: Hosts, recipe: Path, tmp_path: Path
) -> None:
    options = ["--training.meta_batch", "3", "--training.validation_episodes", "2"]
    run, whole = tmp_path / "run", tmp_path / "whole"
    endless = ["--training.iterations", "100000", "--training.validate_every", "100000"]
    processes = hosts.run("train", recipe, "--out", run, *options, *endless, hosts=2)
    wait_for(lambda: newest_iteration(run / "metrics.jsonl") >= 4, processes[0])
    hosts.link(1, "down")
    pulled = time.monotonic()
    ends = [finish(process) for process in processes]
    assert time.monotonic() - pulled < 30
    for process, (_, err), other in zip(processes, ends, ("10.77.0.2", "10.77.0.1"), strict=True):
        assert process.returncode != 0
        (message,) = messages(err)  # on either side one
        assert f"on {other} has not been heard of for 10 s" in message
        assert f"metadropout train --resume {run}" in message

    hosts.link(1, "up")
    newest = latest_checkpoint(run / "checkpoints")
    assert newest is not None
    more = ["--training.iterations", str(iteration_of(newest) + 3)]
    for process in (again := hosts.run("train", "--resume", run, *more, hosts=3)):
        finish(process)
    assert [process.returncode for process in again] == [0, 0, 0]
    assert main(["train", str(recipe), "--out", str(whole), *options, *endless[2:], *more]) == 0
    assert_same_weights(whole, run)


def test_torchrun_starts_again_from_the_newest_checkpoint_without_being_told_to_resume(
    recipe: Path, tmp_path: Path
) -> None:
    run, whole = tmp_path / "run", tmp_path / "whole"
    options = [
        "--training.iterations",
        "60",
        "--training.validate_every",
        "1000",
        "--training.validation_episodes",
        "1",
    ]
    process = start("train", recipe, "--out", run, *options, processes=2, restarts=1)
    wait_for(lambda: newest_iteration(run / "metrics.jsonl") >= 6, process)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(max(map(int, children)), 9)
    out, err = finish(process)
    assert process.returncode == 0, err
    assert "resuming after iteration" in err
    assert out.count("trained to iteration 60") == 1
    assert main(["train", str(recipe), "--out", str(whole), *options]) == 0
    assert_same_weights(whole, run)
