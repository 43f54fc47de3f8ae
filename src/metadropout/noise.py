"""Where noise comes from: one explicit source, seeded or recorded, never hidden global state."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from metadropout.ops.kernels import Draws, values


class NoiseStream(Protocol):
    """The draws of one forward pass, in the order in which the layers ask for them."""

    def normal(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """Draw standard normal values of a shape, on the device and in the type of `like`."""
        ...

    def numbers(self) -> np.random.Generator:
        """Return a generator for draws of other kinds: choices, permutations, mixing ratios."""
        ...


class NoiseSource(Protocol):
    """All noise of one task: a stream for each inner step and Monte-Carlo sample."""

    def stream(self, step: int, sample: int) -> NoiseStream:
        """Return the stream of one pass; the same (step, sample) gives the same draws again."""
        ...

    def fork(self) -> NoiseSource:
        """Return a source of its own for what a learner draws beside its perturbation, such as masks or weights."""
        ...


FORK = 0x6C6561726E6572
"""Key of a learner's own draws; no inner step has this number."""


class SeededNoise:
    """Noise that is a function of a seed, the inner step and the Monte-Carlo sample alone.

    Each pass has a generator of its own, so the draws do not depend on whether samples run one by
    one, in one batch or in chunks.
    """

    def __init__(self, *seed: int) -> None:
        self.seed = seed

    def stream(self, step: int, sample: int) -> _GeneratorStream:
        """Return the stream of one pass."""
        return _GeneratorStream(mix_seed(*self.seed, step, sample))

    def fork(self) -> SeededNoise:
        """Return a source that is unrelated to this one; the same one every time."""
        return SeededNoise(*self.seed, FORK)


class CounterNoise:
    """Noise whose every value is a function of a seed, the inner step, the sample, the draw and a place in it.

    Like `SeededNoise`, but with other values: they come from a counter-based generator (Philox), so that the kernels
    compute them where they are used and nothing is written or read. Values hardly depend on the device, nor on the
    floating-point type: all have 23 bits of randomness.
    """

    def __init__(self, *seed: int) -> None:
        self.seed = seed

    def stream(self, step: int, sample: int) -> CounterStream:
        """Return the stream of one pass."""
        return CounterStream(mix_seed(*self.seed, step, sample))

    def fork(self) -> CounterNoise:
        """Return a source that is unrelated to this one; the same one every time."""
        return CounterNoise(*self.seed, FORK)


class CounterStream:
    """Draws that are numbered, each with a key of its own."""

    def __init__(self, key: int) -> None:
        self._key = key
        self._drawn = 0
        self._numbers: np.random.Generator | None = None

    def normal(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """Draw standard normal values."""
        return values(Draws((self.next_key(),), tuple(shape)), like)

    def next_key(self) -> tuple[int, int]:
        """Return what the next draw is a function of."""
        self._drawn += 1
        return self._key, self._drawn

    def numbers(self) -> np.random.Generator:
        """Return a generator for draws of other kinds."""
        if self._numbers is None:
            self._numbers = np.random.default_rng(self._key)
        return self._numbers


class _GeneratorStream:
    """Draws from a generator that is made on the device of the first draw."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._generator: torch.Generator | None = None
        self._numbers: np.random.Generator | None = None

    def normal(self, shape: Sequence[int], like: Tensor) -> Tensor:
        if self._generator is None:
            self._generator = torch.Generator(like.device).manual_seed(self._seed)
        return torch.randn(tuple(shape), generator=self._generator, device=like.device, dtype=like.dtype)

    def numbers(self) -> np.random.Generator:
        if self._numbers is None:
            self._numbers = np.random.default_rng(self._seed)
        return self._numbers


class RecordedNoise:
    """Given draws in place of random ones: for tests, and for comparing two programs number by number.

    Args:
        draws: the arrays in the order inner step, Monte-Carlo sample, layer.
        mc_samples: Monte-Carlo samples per step.
        per_pass: draws in one forward pass.
        numbers: generator for draws that are not normal; every pass starts from a copy of it.
        own: what the learner itself draws, beside its perturbation.
    """

    def __init__(
        self,
        draws: Iterable[Tensor],
        *,
        per_pass: int,
        mc_samples: int = 1,
        numbers: np.random.Generator | None = None,
        own: NoiseSource | None = None,
    ) -> None:
        self.draws, self.own = list(draws), own
        self.per_pass, self.mc_samples, self._numbers = per_pass, mc_samples, numbers

    def stream(self, step: int, sample: int) -> _RecordedStream:
        """Return the recorded draws of one pass."""
        if not 0 <= sample < self.mc_samples:
            raise ValueError(f"sample {sample} was asked for, but {self.mc_samples} samples per step are recorded")
        start = (step * self.mc_samples + sample) * self.per_pass
        if start + self.per_pass > len(self.draws):
            raise ValueError(f"the recorded noise ends before inner step {step}, sample {sample}")
        return _RecordedStream(self.draws[start : start + self.per_pass], copy.deepcopy(self._numbers))

    def fork(self) -> NoiseSource:
        """Return what is recorded of the learner's own draws."""
        if self.own is None:
            raise ValueError("the learner draws numbers itself, but none are recorded: give `own`")
        return self.own


class _RecordedStream:
    def __init__(self, draws: Sequence[Tensor], numbers: np.random.Generator | None) -> None:
        self._remaining = list(draws)
        self._numbers = numbers

    def numbers(self) -> np.random.Generator:
        if self._numbers is None:
            raise ValueError("draws that are not normal were asked for, but none are recorded: give `numbers`")
        return self._numbers

    def normal(self, shape: Sequence[int], like: Tensor) -> Tensor:
        if not self._remaining:
            raise ValueError("more noise was asked for in one pass than is recorded")
        draw = self._remaining.pop(0)
        if tuple(draw.shape) != tuple(shape):
            raise ValueError(f"noise of shape {tuple(shape)} was asked for, but {tuple(draw.shape)} is recorded")
        return draw.to(like)


NoiseName = Literal["counter", "generator"]

SOURCES: dict[NoiseName, Callable[..., NoiseSource]] = {"counter": CounterNoise, "generator": SeededNoise}
"""How a run computes its noise; each is called with the numbers that make the seed."""


def as_noise_source(generator: torch.Generator | NoiseSource | None) -> NoiseSource | None:
    """Turn a generator into a noise source by drawing its seed from the generator; leave a source as it is."""
    if isinstance(generator, torch.Generator):
        return SeededNoise(int(torch.randint(2**62, (), generator=generator, device=generator.device)))
    return generator


def mix_seed(*parts: int) -> int:
    """Mix integers into one seed; different lists give unrelated seeds."""
    # The length goes in, too: SeedSequence pads with zeros, so [1, 2] and [1, 2, 0] would be the same.
    words = np.random.SeedSequence([len(parts), *parts]).generate_state(2, np.uint32)
    return int(words[0]) << 31 ^ int(words[1])
