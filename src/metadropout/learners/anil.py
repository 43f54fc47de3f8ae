"""ANIL: almost no inner loop."""

from __future__ import annotations

from metadropout.learners.maml import MAML


class ANIL(MAML):
    """MAML that adapts its head alone (Raghu et al., 2020).

    Adapted: the head. Meta-learned: the head's initial values and everything before it, which is the same in all tasks.
    """

    title = "ANIL"
    citation = "Raghu et al., 2020"

    def adapted_by_default(self) -> list[str]:
        head = self.layers().head
        return [f"{head}.{name}" for name, _ in self.network.get_submodule(head).named_parameters()]
