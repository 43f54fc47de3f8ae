"""The convolutions of a meta-iteration alone: how many there are, their operations, and how fast they could run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from metadropout.bench.problem import Method, Problem, Setting, Work
from metadropout.ops.memory_format import channels_last

Operation = Literal["forward", "input gradient", "weight gradient"]
OPERATIONS: tuple[Operation, ...] = ("forward", "input gradient", "weight gradient")


@dataclass(frozen=True)
class Convolution:
    """One 3x3 convolution with padding 1, or one of its gradients; all three take the same operations."""

    kind: Operation
    images: int
    size: int
    """Height and width of the images."""
    inputs: int
    outputs: int

    @property
    def flops(self) -> int:
        """Multiplications and additions, those with the padding's zeros included, as is the custom."""
        return 2 * 9 * self.images * self.size**2 * self.inputs * self.outputs


# How often forward, input gradient and weight gradient of a layer are computed, by (weights, first layer or later).
# The first layer's input is the images, to which no gradient flows. A support pass is counted with its second
# derivatives. Those of the weight gradient x * g and the input gradient g * w (of a cotangent v of the first, u of the
# second) are x * v and u * w on the way to g, v * g to x, and u * g to w. The generators φ are not adapted: their
# weight gradient is not part of an inner step and has no derivative.
SUPPORT = {
    ("θ", "first"): (1 + 1, 0, 1 + 1),
    ("θ", "later"): (1 + 2, 1 + 1 + 1, 1 + 1 + 1),
    ("φ", "first"): (1, 0, 1),
    ("φ", "later"): (1 + 1, 1 + 1, 1 + 1),
}
QUERY = {"first": (1, 0, 1), "later": (1, 1, 1)}


def convolutions_of_task(setting: Setting, method: Method) -> Counter[Convolution]:
    """Count the convolutions of one task of a second-order meta-iteration on Conv4."""
    counts: Counter[Convolution] = Counter()
    for weights in ("θ", "φ") if method == "metadropout" else ("θ",):
        size = setting.image_size
        for layer in range(4):
            place = "first" if layer == 0 else "later"
            inputs = setting.in_channels if layer == 0 else setting.channels
            for per_class, times, repeat in (
                (setting.shot, SUPPORT[weights, place], setting.steps),
                (setting.query, QUERY[place], 1),
            ):
                for kind, count in zip(OPERATIONS, times, strict=True):
                    convolution = Convolution(kind, setting.way * per_class, size, inputs, setting.channels)
                    counts[convolution] += count * repeat
            size //= 2
    return +counts  # without those that are not computed at all


def flops_of_iteration(setting: Setting, method: Method) -> int:
    """Return the operations of all convolutions of a meta-iteration."""
    task = convolutions_of_task(setting, method)
    return setting.meta_batch * sum(convolution.flops * count for convolution, count in task.items())


def prepare(problem: Problem) -> Work:
    """Return all convolutions of a meta-iteration, one after the other and nothing else, in the fastest layout."""
    calls = [
        (_call(convolution), count * problem.setting.meta_batch)
        for convolution, count in convolutions_of_task(problem.setting, problem.method).items()
    ]

    def iterate() -> dict[str, Tensor]:
        for call, count in calls:
            for _ in range(count):
                call()
        return {}

    return iterate


def _call(convolution: Convolution) -> Callable[[], object]:
    """Return the convolution as PyTorch's own operation on channels-last tensors."""
    n, size, inputs, outputs = convolution.images, convolution.size, convolution.inputs, convolution.outputs
    x, g = (channels_last(torch.rand(n, channels, size, size)) for channels in (inputs, outputs))
    w = torch.rand(outputs, inputs, 3, 3).to(memory_format=torch.channels_last)
    stride, padding, dilation, no_output_padding = [1, 1], [1, 1], [1, 1], [0, 0]
    if convolution.kind == "forward":
        return lambda: torch.ops.aten.convolution(x, w, None, stride, padding, dilation, False, no_output_padding, 1)
    mask = [convolution.kind == "input gradient", convolution.kind == "weight gradient", False]
    return lambda: torch.ops.aten.convolution_backward(
        g, x, w, None, stride, padding, dilation, False, no_output_padding, 1, mask
    )
