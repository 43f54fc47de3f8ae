"""Who is compared, and what must be installed for it."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

from metadropout.bench.child import Program
from metadropout.bench.problem import Method
from metadropout.ops.precision import Precision

INSTALL = "pip install 'metadropout[bench]'"
"""Installs all peers."""


@dataclass(frozen=True)
class Implementation:
    """A way to compute a meta-iteration."""

    name: str
    module: str
    """The file in this folder whose `prepare(problem)` returns the work."""
    methods: tuple[Method, ...] = ("maml", "metadropout")
    package: str | None = None
    """What it imports, where that is a peer's."""
    keep_freed_memory: bool = False
    """Whether its process sets the allocator as `metadropout train` does."""
    precision: Precision = "full"
    """In another one than the full one it does not compute quite the same; only this project's own has others."""

    def is_installed(self) -> bool:
        """Say whether it can run here."""
        return self.package is None or find_spec(self.package) is not None

    def program(self, threads: int) -> Program:
        """Return what a process of its own runs."""
        module = f"metadropout.bench.{self.module}"
        options = () if self.precision == "full" else (self.precision,)
        return Program(self.name, module, options, keep_freed_memory=self.keep_freed_memory, threads=threads)


OURS = Implementation("metadropout", "ours", keep_freed_memory=True)
OURS_IN: dict[Precision, Implementation] = {
    "bf16": Implementation("metadropout, bfloat16", "ours", keep_freed_memory=True, precision="bf16")
}
"""The same in another precision."""
PLAIN = Implementation("plain PyTorch", "plain")
IMPLEMENTATIONS = (
    OURS,
    PLAIN,
    Implementation("higher", "peer_higher", methods=("maml",), package="higher"),
    Implementation("TorchOpt", "peer_torchopt", methods=("maml",), package="torchopt"),
)
CONVOLUTIONS = Implementation("convolutions alone", "convolutions", keep_freed_memory=True)
