"""No perturbation: plain MAML or Meta-SGD."""

from typing import ClassVar

from metadropout.perturbations.base import Perturbation


class NoPerturbation(Perturbation):
    """Leaves the network as it is, on support and query images alike."""

    support_only: ClassVar[bool] = True
