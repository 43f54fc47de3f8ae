from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch
from scipy import stats

import metadropout as md
from metadropout.noise import mix_seed
from metadropout.ops import kernels
from metadropout.ops.kernels import calls
from metadropout.ops.kernels.draws import philox
from metadropout.perturbations import Pass


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


# Counter-based noise --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [  # the known answers of its authors' library, Random123
        ((0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_words_are_those_of_philox(counter: tuple[int, ...], key: tuple[int, ...], words: str) -> None:
    low = np.array([counter[0] | counter[1] << 32], dtype=np.uint64).view(np.int64)
    found = philox(key[0] | key[1] << 32, counter[2] | counter[3] << 32, torch.from_numpy(low))
    assert " ".join(f"{int(word):08x}" for word in found) == words


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(3,), (64,), (2, 5), (4, 16, 7, 7), (5, 3, 9, 2), (6, 64, 28, 28)])
def test_kernels_and_plain_pytorch_draw_the_same_numbers(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    like = torch.zeros((), dtype=dtype)
    computed = md.CounterNoise(5).stream(1, 2).normal(shape, like)
    with kernels.disabled():
        plain = md.CounterNoise(5).stream(1, 2).normal(shape, like)
    assert computed.dtype == plain.dtype == dtype
    assert computed.shape == plain.shape == shape
    torch.testing.assert_close(computed, plain, rtol=0, atol=2e-6 if dtype == torch.float32 else 1e-14)


def test_counter_noise_is_the_same_in_both_precisions() -> None:
    single, double = (
        md.CounterNoise(5).stream(0, 0).normal((10_000,), torch.zeros((), dtype=dtype))
        for dtype in (torch.float32, torch.float64)
    )
    torch.testing.assert_close(single.double(), double, rtol=0, atol=2e-6)


@pytest.mark.skipif(not kernels.available(), reason="no C++ compiler, or METADROPOUT_FUSED is 0")
def test_threads_change_no_drawn_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "LARGE", 0)
    draws = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        draws.append(md.CounterNoise(1).stream(0, 0).normal((7, 5, 3, 3), torch.zeros(())))
    assert all(torch.equal(draws[0], other) for other in draws[1:])


def test_counter_noise_depends_on_seed_step_sample_and_draw_alone() -> None:
    like = torch.zeros(())

    def draws(seed: int, step: int, sample: int) -> list[tuple[float, ...]]:
        stream = md.CounterNoise(seed).stream(step, sample)
        return [tuple(stream.normal((3,), like).tolist()) for _ in range(2)]

    assert draws(1, 2, 3) == draws(1, 2, 3)
    different = [d for where in ((1, 2, 3), (2, 2, 3), (1, 3, 3), (1, 2, 4), (1, 3, 2)) for d in draws(*where)]
    different += [tuple(md.CounterNoise(1).fork().stream(2, 3).normal((3,), like).tolist())]
    assert len(set(different)) == 11


@pytest.mark.parametrize("path", ["kernels", "plain"])
def test_counter_noise_is_standard_normal(path: str) -> None:
    with kernels.disabled() if path == "plain" else contextlib.nullcontext():
        draws = torch.cat([md.CounterNoise(0).stream(0, s).normal((10_000,), torch.zeros(())) for s in range(100)])
    draws, n = draws.double(), 1_000_000
    assert abs(draws.mean()) < 4 / n**0.5
    assert abs(draws.var() - 1) < 4 * (2 / n) ** 0.5
    assert abs((draws**3).mean()) < 4 * (15 / n) ** 0.5
    assert abs((draws**4).mean() - 3) < 4 * (96 / n) ** 0.5
    assert stats.kstest(draws.numpy(), "norm").pvalue > 1e-3
    for limit in (1, 2, 3, 4):  # the tails
        expected = n * 2 * stats.norm.sf(limit)
        assert abs(int((draws.abs() > limit).sum()) - expected) < 4 * expected**0.5 + 1


def test_places_samples_steps_and_draws_of_counter_noise_are_independent() -> None:
    like, n = torch.zeros((), dtype=torch.float64), 200_000
    noise = md.CounterNoise(3)
    stream = noise.stream(0, 0)
    first, second = stream.normal((n,), like), stream.normal((n,), like)
    others = [second, noise.stream(0, 1).normal((n,), like), noise.stream(1, 0).normal((n,), like)]
    # 16 places apart are two values of one Box-Muller pair, 32 two pairs of one counter, 64 two counters.
    pairs = [(first, other) for other in others] + [(first[k:], first[:-k]) for k in (1, 2, 15, 16, 17, 32, 48, 64)]
    for a, b in pairs:
        for power in (1, 2):
            assert abs(torch.corrcoef(torch.stack([a**power, b**power]))[0, 1]) < 4.5 / n**0.5


def test_samples_of_one_batch_draw_what_they_draw_one_by_one() -> None:
    like = torch.zeros(6, 16, 5, 5).contiguous(memory_format=torch.channels_last)
    noise = md.CounterNoise(0)
    together = Pass({}, [noise.stream(0, sample) for sample in range(3)], support=True).normal(like)
    one_by_one = [Pass({}, [noise.stream(0, sample)], support=True).normal(like[:2]) for sample in range(3)]
    assert torch.equal(together, torch.cat(one_by_one))
    assert together.is_contiguous(memory_format=torch.channels_last)


def test_counter_noise_trains_the_same_by_kernels_plainly_and_with_tasks_side_by_side(episode: md.Episode) -> None:
    torch.manual_seed(0)
    network = md.Conv4(way=3, channels=4, image_size=16).double()
    learner = md.MAML(network, md.MetaDropout(network), steps=2).double()
    noises = [md.CounterNoise(0, task) for task in range(2)]
    one_by_one = [learner.task_gradient(episode, generator=noise) for noise in noises]
    side_by_side = learner.task_gradients([episode, episode], noises)
    with kernels.disabled():
        plain = [learner.task_gradient(episode, generator=noise) for noise in noises]
    assert one_by_one[0].loss != one_by_one[1].loss
    for other in (side_by_side, plain):
        for expected, found in zip(one_by_one, other, strict=True):
            torch.testing.assert_close(found.gradients, expected.gradients, rtol=1e-8, atol=1e-10)
