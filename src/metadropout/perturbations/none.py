"""No perturbation: plain MAML or Meta-SGD."""

from metadropout.perturbations.base import Perturbation, Traits


class NoPerturbation(Perturbation):
    """Leaves the network as it is, on support and query images alike."""

    title = "no perturbation"
    traits = Traits(support_only=True)
