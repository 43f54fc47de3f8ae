import itertools
import threading
from collections.abc import Iterator

import pytest
import torch

from metadropout.data.episodes import Episode, EpisodeSampler
from metadropout.data.glyphs import Glyphs
from metadropout.data.prefetch import Prefetcher
from metadropout.errors import DataError


def episode(iteration: int, task: int) -> Episode:
    value = torch.tensor([iteration, task])
    return Episode(value, value, value, value)


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("episodes")]


def test_episodes_come_in_order_and_all_of_them() -> None:
    pairs = [(i, t) for i in range(7) for t in range(3)]
    with Prefetcher(episode, pairs, depth=4) as prefetcher:
        assert [tuple(item.support_y.tolist()) for item in prefetcher] == pairs
    assert threads() == []


def test_the_episodes_are_those_of_the_sampler() -> None:
    sampler = EpisodeSampler(Glyphs(0, 6), way=3, shot=1, query=2, seed=0)
    with Prefetcher(sampler.raw, ((i, 0) for i in itertools.count())) as prefetcher:
        for i in range(5):
            assert torch.equal(next(prefetcher).to("cpu").query_x, sampler(i, 0).query_x)


def test_episodes_are_made_ahead_but_no_more_than_asked_for() -> None:
    made: list[int] = []
    enough = threading.Event()

    def draw(iteration: int, task: int) -> Episode:
        made.append(iteration)
        if len(made) == 6:
            enough.set()
        return episode(iteration, task)

    with Prefetcher(draw, ((i, 0) for i in itertools.count()), depth=5) as prefetcher:
        next(prefetcher)
        assert enough.wait(10)
        next(prefetcher)
    assert len(made) <= 7


def test_an_error_is_raised_where_its_episode_is_asked_for() -> None:
    def draw(iteration: int, task: int) -> Episode:
        if iteration == 3:
            raise ValueError("the fourth")
        return episode(iteration, task)

    prefetcher = Prefetcher(draw, ((i, 0) for i in range(10)), depth=8)
    for i in range(3):
        assert next(prefetcher).support_y.tolist() == [i, 0]
    with pytest.raises(ValueError, match="the fourth"):
        next(prefetcher)
    with pytest.raises(StopIteration):
        next(prefetcher)
    assert threads() == []


def test_an_error_in_the_pairs_is_raised_too() -> None:
    def pairs() -> Iterator[tuple[int, int]]:
        yield 0, 0
        yield 0, 1
        raise ValueError("no more pairs")

    with pytest.raises(ValueError, match="no more pairs"):
        Prefetcher(episode, pairs())
    assert threads() == []


def test_closing_early_ends_the_thread_and_may_be_repeated() -> None:
    prefetcher = Prefetcher(episode, ((i, 0) for i in itertools.count()), depth=50)
    next(prefetcher)
    prefetcher.close()
    prefetcher.close()
    assert threads() == []
    assert list(prefetcher) == []


def test_a_depth_below_one_is_refused() -> None:
    with pytest.raises(DataError, match="depth is 0"):
        Prefetcher(episode, [(0, 0)], depth=0)


def test_a_used_up_prefetcher_stays_used_up() -> None:
    prefetcher = Prefetcher(episode, [(0, 0)])
    assert len(list(prefetcher)) == 1
    assert list(prefetcher) == []
    assert threads() == []
