"""T-Net: a learned linear map after every layer, which bends the space in which the inner steps are taken."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from metadropout.learners.gradient import GradientLearner
from metadropout.learners.maml import MAML
from metadropout.networks.initial import CONVOLUTIONS
from metadropout.networks.layers import module_key
from metadropout.perturbations.base import Weights


class TNet(MAML):
    """MAML whose layers give T(Wx + b), with a matrix T that is learned and not adapted (Lee and Choi, 2018).

    Adapted: every W and b. Meta-learned: their initial values, each T, which starts as the identity, and normalisation.
    A step moves a layer's output by −α T Tᵀ ∂L/∂y xᵀx, so T learns along which directions a task may go far.

    T comes before normalisation and before any noise. As T(Wx + b) = (TW)x + Tb, the network runs with TW and Tb: it is
    not changed itself, can be any network, and needs no more time than without T. A convolution of several groups has
    a T for each of them.
    """

    title = "T-Net"
    citation = "Lee and Choi, 2018"

    def warped_layers(self) -> dict[str, nn.Module]:
        """Return the convolutions and linear layers whose weights are adapted, by name."""
        layers = self.network.named_modules()
        kinds = (*CONVOLUTIONS, nn.Linear)
        return {n: m for n, m in layers if isinstance(m, kinds) and f"network.{n}.weight" in self.adapted_names}

    def add_meta_parameters(self) -> None:
        self.warps = nn.ParameterDict()
        for name, layer in self.warped_layers().items():
            weight, groups = layer.get_parameter("weight"), int(getattr(layer, "groups", 1))
            eye = torch.eye(len(weight) // groups, dtype=weight.dtype, device=weight.device)
            self.warps[module_key(name)] = eye.repeat(groups, 1, 1)  # (groups, outputs, outputs)

    def network_weights(self, theta: Weights, weights: Mapping[str, Tensor]) -> Weights:
        changed = {}
        for name in self.warped_layers():
            warp = weights[f"warps.{module_key(name)}"]
            for tensor in (f"{name}.weight", f"{name}.bias"):
                if tensor in theta:
                    rows = theta[tensor].reshape(*warp.shape[:2], -1)  # (groups, outputs, inputs)
                    changed[tensor] = (warp @ rows).reshape(theta[tensor].shape)
        return theta | changed

    def with_head_rows(self, change: Callable[[Tensor], Tensor]) -> GradientLearner:
        changed = super().with_head_rows(change)
        assert isinstance(changed, TNet)
        key = module_key(self.layers().head)
        if key in self.warps:
            # Labels are given at random, so that to any class each other class is alike: T is of the form a·I + b·11ᵀ.
            (warp,) = self.warps[key].detach()
            way, new = len(warp), len(change(warp))
            same = warp.diagonal().mean()
            other = (warp.sum() - warp.diagonal().sum()) / max(1, way * (way - 1))
            eye = torch.eye(new, dtype=warp.dtype, device=warp.device)
            changed.warps[key] = (other + (same - other) * eye)[None]
        return changed
