"""CAVIA: a few context parameters are adapted, and nothing else."""

from __future__ import annotations

from metadropout.learners.maml import MAML


class CAVIA(MAML):
    """MAML that adapts a context vector, which the network gets as an input, and no weight (Zintgraf et al., 2019).

    Adapted: the context, which starts at zero in each task. Meta-learned: all of the network, its head and the layers
    that turn the context into scales and offsets of features (`FiLM`) included. The context is a buffer of the network
    with that name; Conv4 has one if it is built with `context`. The authors take 2 steps of size 1.

    As its head is not adapted, it only does tasks of as many classes as it was trained on.
    """

    title = "CAVIA"
    citation = "Zintgraf et al., 2019"

    def adapted_by_default(self) -> list[str]:
        names = [name for name, _ in self.network.named_buffers() if name.rpartition(".")[2] == "context"]
        if not names:
            raise ValueError(
                f"CAVIA adapts a buffer named 'context', and {type(self.network).__name__} has none: build the network "
                "with one (--network.context 100)"
            )
        return names
