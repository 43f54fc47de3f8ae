from __future__ import annotations

import numpy as np
import pytest
import torch

import metadropout as md
from metadropout.noise import mix_seed


def test_seeded_noise_depends_on_seed_step_and_sample_alone() -> None:
    like = torch.zeros(())

    def draw(seed: int, step: int, sample: int) -> list[float]:
        return md.SeededNoise(seed).stream(step, sample).normal((3,), like).tolist()

    assert draw(1, 2, 3) == draw(1, 2, 3)
    different = [draw(1, 2, 3), draw(2, 2, 3), draw(1, 3, 3), draw(1, 2, 4), draw(1, 3, 2)]
    assert len({tuple(d) for d in different}) == 5


def test_seeds_of_different_lengths_do_not_collide() -> None:
    seeds = [mix_seed(1), mix_seed(1, 0), mix_seed(1, 0, 0), mix_seed(0, 1), mix_seed(1, 1)]
    assert len(set(seeds)) == len(seeds)


def test_seeded_noise_is_standard_normal() -> None:
    draws = torch.cat(
        [md.SeededNoise(0).stream(0, s).normal((1000,), torch.zeros((), dtype=torch.float64)) for s in range(100)]
    )
    assert abs(draws.mean()) < 5 / 100_000**0.5
    assert abs(draws.var() - 1) < 5 * (2 / 100_000) ** 0.5


def test_recorded_noise_is_handed_out_in_order_and_mistakes_are_named() -> None:
    source = md.RecordedNoise([torch.full((2,), float(i)) for i in range(8)], per_pass=2, mc_samples=2)
    like = torch.zeros(())
    stream = source.stream(1, 1)
    assert stream.normal((2,), like).tolist() == [6, 6]
    with pytest.raises(ValueError, match=r"shape \(3,\) was asked for, but \(2,\) is recorded"):
        stream.normal((3,), like)
    with pytest.raises(ValueError, match="more noise was asked for"):
        stream.normal((2,), like)
    with pytest.raises(ValueError, match="ends before inner step 2"):
        source.stream(2, 0)
    with pytest.raises(ValueError, match="sample 2 was asked for"):
        source.stream(0, 2)


def test_a_recorded_pass_gives_the_same_numbers_again() -> None:
    source = md.RecordedNoise([], per_pass=0, numbers=np.random.default_rng(0))
    first, again = (source.stream(0, 0).numbers().random(3).tolist() for _ in range(2))
    assert first == again
