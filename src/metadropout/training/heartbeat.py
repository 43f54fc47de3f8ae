"""Noticing a host that is lost: a machine that is down, or a network that is, closes no connection."""

from __future__ import annotations

import os
import secrets
import select
import socket
import sys
import threading
import time
from typing import Any

BEAT = 1.0
"""Seconds between signs of life."""
SILENCE = 10
"""Beats without a sign of life after which a process is given up. Beats and not seconds: where all processes are
suspended together, nobody is lost."""
PATIENCE = 60.0
"""Seconds in which all processes have to connect."""

_ALIVE, _LOST = b".", b"!"


class Heartbeat:
    """Ends this process, with a message, when the first process and this one no longer hear of each other.

    The first process exchanges signs of life with each of the others, in a thread of its own, whatever else they do. If
    it loses one, it tells the rest and says why; if it is lost itself, one process on each host says so. A process that
    ends closes its connections, which others notice without this.

    Args:
        rank: number of this process.
        size: how many there are.
        local_rank: its number on its machine.
        store: where processes leave notes for each other.
    """

    def __init__(self, rank: int, size: int, local_rank: int, store: Any) -> None:
        self.advice = ""
        """What to do after a loss, for the message."""
        self._talks = local_rank == 0
        self._stopped = threading.Event()
        self._peers = _connect_to_others(size, store) if rank == 0 else {0: _connect_to_first(rank, store)}
        self._thread = threading.Thread(target=self._watch, name="heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the watch, once the processes need each other no longer."""
        self._stopped.set()
        self._thread.join()
        for connection in self._peers.values():
            connection.close()

    def _watch(self) -> None:
        silent = dict.fromkeys(self._peers, 0)
        while not self._stopped.is_set():
            heard = self._exchange()
            for rank in list(silent):
                if rank not in self._peers:  # has ended
                    del silent[rank]
                    continue
                silent[rank] = 0 if rank in heard else silent[rank] + 1
                if silent[rank] >= SILENCE:
                    self._give_up(rank)

    def _exchange(self) -> set[int]:
        """Send a sign of life to all, listen for a beat, and return who was heard."""
        for rank, connection in list(self._peers.items()):
            try:
                connection.send(_ALIVE)
            except BlockingIOError:  # nothing gets through
                pass
            except OSError:
                self._forget(rank)
        heard: set[int] = set()
        end = time.monotonic() + BEAT
        while (left := end - time.monotonic()) > 0 and not self._stopped.is_set():
            ranks = {connection: rank for rank, connection in self._peers.items()}
            if not ranks:
                self._stopped.wait(left)
                break
            ready, _, _ = select.select(list(ranks), [], [], left)
            for connection in ready:
                try:
                    received = connection.recv(4096)
                except OSError:
                    received = b""
                if not received:
                    self._forget(ranks[connection])
                elif _LOST in received:
                    os._exit(1)  # the first process says why
                heard.add(ranks[connection])
        return heard

    def _forget(self, rank: int) -> None:
        self._peers.pop(rank).close()

    def _give_up(self, rank: int) -> None:
        address = self._peers.pop(rank).getpeername()[0].removeprefix("::ffff:")  # as IPv6 writes an IPv4 address
        for connection in self._peers.values():
            try:
                connection.send(_LOST)
            except OSError:
                continue
        if self._talks:
            said = f"process {rank} on {address} has not been heard of for {SILENCE * BEAT:.0f} s"
            text = f"metadropout: error: {said}: its host or the network is down. {self.advice}"
            print(text.rstrip(), file=sys.stderr, flush=True)
        os._exit(1)  # whatever the other threads wait for will not come


def _connect_to_others(size: int, store: Any) -> dict[int, socket.socket]:
    token = secrets.token_hex(16)
    peers: dict[int, socket.socket] = {}
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    with socket.create_server(("", 0), family=family, backlog=size, dualstack_ipv6=dual) as server:
        store.set("heartbeat", f"{_own_address()} {server.getsockname()[1]} {token}")
        end = time.monotonic() + PATIENCE
        while len(peers) < size - 1:
            server.settimeout(max(0.1, end - time.monotonic()))
            connection, _ = server.accept()
            connection.settimeout(5)
            try:
                sent, _, rank = connection.makefile("r").readline().partition(" ")
            except OSError:
                sent = ""
            if not secrets.compare_digest(sent, token):  # a stranger
                connection.close()
                continue
            connection.setblocking(False)
            peers[int(rank)] = connection
    return peers


def _connect_to_first(rank: int, store: Any) -> socket.socket:
    host, port, token = store.get("heartbeat").decode().split()
    connection = socket.create_connection((host, int(port)), timeout=PATIENCE)
    connection.sendall(f"{token} {rank}\n".encode())
    connection.setblocking(False)
    return connection


def _own_address() -> str:
    """Return where the others reach this machine: the address with which it reaches the meeting point."""
    name, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    family, _, _, _, there = socket.getaddrinfo(name, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(there)  # sends nothing
        own = str(probe.getsockname()[0])
    # A machine may know its own name as an address that is of no use to others.
    return name if own.startswith("127.") or own == "::1" else own
