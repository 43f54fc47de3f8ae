"""Work in a process of its own: allocator settings, threads and peak memory of one do not touch those of another."""

from __future__ import annotations

import importlib
import multiprocessing
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from metadropout.errors import MetadropoutError
from metadropout.training.allocator import keep_freed_memory

Arrays = dict[str, "np.ndarray[Any, Any]"]


@dataclass(frozen=True)
class Program:
    """What a child runs."""

    name: str
    """What messages call it."""
    module: str
    """A module whose `prepare(problem, *options)` returns the work, a function that returns tensors by name."""
    options: tuple[object, ...] = ()
    keep_freed_memory: bool = False
    """Whether the process sets the allocator as `metadropout train` does, or leaves it as it is."""
    threads: int = 0
    """Of PyTorch; 0 for its own choice."""


class Child:
    """A process that runs a program on problems whenever asked; a context manager that ends it."""

    def __init__(self, program: Program) -> None:
        self.program = program
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, program), daemon=True)
        # Ctrl-C is the parent's, which then ends its children; one that ignores it from the start prints no traceback.
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._process.start()
        signal.signal(signal.SIGINT, before)
        theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()  # it holds nothing worth saving
        self._process.join()
        self._connection.close()

    def result(self, problem: object) -> Arrays:
        """Do a problem's work once and return what it gives."""
        return self._ask("result", problem)  # type: ignore[no-any-return]

    def prepare(self, problem: object) -> None:
        """Prepare the work that `seconds` times."""
        self._ask("prepare", problem)

    def seconds(self) -> float:
        """Do the prepared work once and return how long it took."""
        return self._ask("seconds")  # type: ignore[no-any-return]

    def peak_memory(self) -> int:
        """Return the most bytes that the process has used at once, above those that its imports take."""
        return self._ask("peak_memory")  # type: ignore[no-any-return]

    def _ask(self, question: str, *arguments: object) -> Any:
        with suppress(OSError):  # it may have ended, with a last word
            self._connection.send((question, arguments))
        try:
            problem, answer = self._connection.recv()
        except (EOFError, OSError):
            self._process.join()
            raise MetadropoutError(
                f"{self.program.name}: its process ended with status {self._process.exitcode}; was there enough memory?"
            ) from None
        if problem is not None:
            raise MetadropoutError(f"{self.program.name}: {problem}")
        return answer


class _Server:
    """The child's side: a method for each question."""

    def __init__(self, program: Program) -> None:
        self._options, self._module = program.options, importlib.import_module(program.module)
        self._memory_of_imports = _peak()
        self._work: Callable[[], dict[str, Tensor]]
        if program.threads:
            torch.set_num_threads(program.threads)
        if program.keep_freed_memory:
            keep_freed_memory()

    def result(self, problem: object) -> Arrays:
        work = self._module.prepare(problem, *self._options)
        return {name: tensor.detach().numpy() for name, tensor in work().items()}

    def prepare(self, problem: object) -> None:
        self._work = self._module.prepare(problem, *self._options)

    def seconds(self) -> float:
        start = time.perf_counter()
        self._work()
        return time.perf_counter() - start

    def peak_memory(self) -> int:
        return _peak() - self._memory_of_imports


def _serve(connection: Connection[Any, Any], program: Program) -> None:
    """Answer questions until the other end is closed."""
    try:
        server = _Server(program)
        while True:
            question, arguments = connection.recv()
            connection.send((None, getattr(server, question)(*arguments)))
    except (EOFError, BrokenPipeError):  # the parent is gone
        pass
    except Exception as error:  # whatever it is, the parent tells the user
        connection.send((f"{type(error).__name__}: {error}", None))


def _peak() -> int:
    """Return the process's peak memory in bytes."""
    status = Path("/proc/self/status")
    if status.exists():  # on Linux ru_maxrss starts from what the parent used when it started this process
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return 1024 * int(line.split()[1])
    import resource  # noqa: PLC0415 (not on every system)

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
