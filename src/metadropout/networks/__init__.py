"""Networks, by the names that recipes use; any other `nn.Module` serves as well in Python."""

from metadropout.networks.conv4 import Conv4
from metadropout.networks.functional import FunctionalNetwork, Normalisation
from metadropout.networks.layers import PerturbableLayers, find_layers
from metadropout.networks.resnet12 import ResNet12
from metadropout.registry import Registry

NETWORKS = Registry("network", {"conv4": Conv4, "resnet12": ResNet12})

__all__ = ["NETWORKS", "Conv4", "FunctionalNetwork", "Normalisation", "PerturbableLayers", "ResNet12", "find_layers"]


def __dir__() -> list[str]:
    return __all__
