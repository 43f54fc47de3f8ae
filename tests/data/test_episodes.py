import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from metadropout.data import open_dataset, save_episodes
from metadropout.data.episodes import Episode, EpisodeSampler
from metadropout.data.images import ClassSubset, ImageSet, ImageShape, IntArray, UInt8Array
from metadropout.data.rotations import RotatedClasses
from metadropout.errors import DataError


class Labelled(ImageSet):
    """Images whose three pixels say which they are: the class, and the image in two bytes."""

    def __init__(self, sizes: list[int]) -> None:
        self.class_sizes = np.asarray(sizes, dtype=np.int64)
        self.class_names = [f"class{i}" for i in range(len(sizes))]
        self.image_shape = ImageShape(3, 1, 1)

    def gather(self, classes: IntArray, images: IntArray) -> UInt8Array:
        assert (images < self.class_sizes[classes]).all()
        return np.stack([classes, images // 256, images % 256], axis=1).astype(np.uint8)[:, :, None, None]


def read(images: torch.Tensor) -> tuple[list[int], list[int]]:
    """The classes and numbers of the images of an episode."""
    values = images[:, :, 0, 0].mul(255).round().long()
    return values[:, 0].tolist(), (values[:, 1] * 256 + values[:, 2]).tolist()


def equal(one: Episode, other: Episode) -> bool:
    fields = ("support_x", "support_y", "query_x", "query_y")
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in fields)


@st.composite
def tasks(draw: st.DrawFn) -> tuple[list[int], int, int, int]:
    shot, query = draw(st.integers(1, 6)), draw(st.integers(1, 9))
    sizes = draw(st.lists(st.integers(shot + query, 80), min_size=1, max_size=30))
    return sizes, draw(st.integers(1, len(sizes))), shot, query


@settings(deadline=None)
@given(task=tasks(), seed=st.integers(0, 2**40), iteration=st.integers(0, 10**9), number=st.integers(0, 10**4))
def test_an_episode_has_way_classes_with_shot_and_query_different_images(
    task: tuple[list[int], int, int, int], seed: int, iteration: int, number: int
) -> None:
    sizes, way, shot, query = task
    episode = EpisodeSampler(Labelled(sizes), way=way, shot=shot, query=query, seed=seed)(iteration, number)
    assert episode.support_x.shape == (way * shot, 3, 1, 1)
    assert episode.query_x.shape == (way * query, 3, 1, 1)
    assert episode.support_y.tolist() == [label for label in range(way) for _ in range(shot)]
    assert episode.query_y.tolist() == [label for label in range(way) for _ in range(query)]
    support, queries = read(episode.support_x), read(episode.query_x)
    by_label = [{*support[0][i * shot : (i + 1) * shot], *queries[0][i * query : (i + 1) * query]} for i in range(way)]
    assert all(len(group) == 1 for group in by_label)  # one class for each label
    assert len(set().union(*by_label)) == way  # and another for each
    pairs = [*zip(*support, strict=True), *zip(*queries, strict=True)]
    assert len(set(pairs)) == way * (shot + query)  # no image twice


@settings(deadline=None)
@given(task=tasks(), seed=st.integers(0, 2**40), iteration=st.integers(0, 10**9), number=st.integers(0, 10**4))
def test_an_episode_depends_on_seed_iteration_and_task_alone(
    task: tuple[list[int], int, int, int], seed: int, iteration: int, number: int
) -> None:
    sizes, way, shot, query = task
    one, other = (EpisodeSampler(Labelled(sizes), way=way, shot=shot, query=query, seed=seed) for _ in range(2))
    other(0, 0)  # what was drawn before does not matter
    other(iteration + 1, number)
    assert equal(one(iteration, number), other(iteration, number))


def test_seed_iteration_and_task_each_make_another_episode() -> None:
    images = Labelled([20] * 100)
    drawn = [
        EpisodeSampler(images, way=5, shot=1, query=2, seed=seed).indices(iteration, task)
        for seed in range(3)
        for iteration in range(4)
        for task in range(5)
    ]
    assert len({(*item.classes.tolist(), *item.images.reshape(-1).tolist()) for item in drawn}) == 60


@pytest.mark.parametrize("size", [7, 20, 300])
def test_classes_images_and_labels_are_drawn_evenly(size: int) -> None:
    n, way, per_class = 10, 4, 5
    sampler = EpisodeSampler(Labelled([size] * n), way=way, shot=1, query=per_class - 1, seed=0)
    drawn = [sampler.indices(i, 0) for i in range(3000)]
    first = np.bincount([item.classes[0] for item in drawn], minlength=n)  # who gets label 0
    assert np.abs(first - 300).max() < 5 * np.sqrt(300)
    support = np.bincount(np.concatenate([item.images[:, 0] for item in drawn]), minlength=size)
    expected = 3000 * way / size
    assert np.abs(support - expected).max() < 5 * np.sqrt(expected)
    everywhere = np.bincount(np.concatenate([item.images.reshape(-1) for item in drawn]), minlength=size)
    expected = 3000 * way * per_class / size
    assert np.abs(everywhere - expected).max() < 5 * np.sqrt(expected)


def test_small_classes_beside_large_ones_are_never_overrun() -> None:
    sampler = EpisodeSampler(Labelled([5, 1000, 5, 6]), way=4, shot=2, query=3, seed=0)
    for i in range(50):
        sampler(i, 0)  # Labelled checks the numbers


def test_bytes_become_the_same_floats() -> None:
    sampler = EpisodeSampler(Labelled([30] * 8), way=3, shot=2, query=4, seed=1)
    raw, floats = sampler.raw(3, 1), sampler(3, 1)
    assert (raw.support_x.dtype, floats.support_x.dtype) == (torch.uint8, torch.float32)
    assert equal(raw.to("cpu"), floats)
    assert equal(raw.to("cpu", torch.float64), floats.to("cpu", torch.float64))
    assert raw.to("cpu", torch.float64).query_x.dtype == torch.float64
    assert float(floats.query_x.max()) <= 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"way": 9}, "a 9-way task needs 9 classes, but this split has 8"),
        ({"shot": 20, "query": 11}, "20 support . 11 query images are more than the 30 images of class 'class0'"),
        ({"way": 0}, "way is 0"),
        ({"shot": 0}, "shot is 0"),
        ({"query": -1}, "query is -1"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_impossible_episodes_are_refused(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(DataError, match=message):
        EpisodeSampler(Labelled([30] * 8), **{"way": 2, "shot": 1, "query": 1, "seed": 0, **arguments})


def test_the_stream_of_episodes_never_changes() -> None:
    # Results are compared by seed over years: a change here makes every earlier run another run.
    drawn = EpisodeSampler(Labelled([9] * 50), way=3, shot=1, query=2, seed=5).indices(7, 2)
    assert drawn.classes.tolist() == [31, 39, 16]
    assert drawn.images.tolist() == [[4, 5, 6], [0, 7, 6], [5, 3, 2]]


PROGRAM = """
import hashlib
from metadropout.data import EpisodeSampler, load_episodes, open_dataset

def digest(path, start):
    test = open_dataset("glyphs", train_classes=5, validation_classes=5, test_classes=12).test
    result = hashlib.sha256()
    for draw in (EpisodeSampler(test, way=5, shot=2, query=3, seed=4), load_episodes(path, test)):
        for task in range(start, 10):
            result.update(draw(0, task).support_x.numpy().tobytes() + draw(0, task).query_x.numpy().tobytes())
    return result.hexdigest()
"""


@pytest.mark.slow
def test_another_process_and_a_resumed_one_draw_the_same_arrays(tmp_path: Path) -> None:
    path = tmp_path / "episodes.json"
    test = open_dataset("glyphs", train_classes=5, validation_classes=5, test_classes=12).test
    save_episodes(path, EpisodeSampler(test, way=5, shot=2, query=3, seed=4), 10)
    here: dict[str, Any] = {}
    exec(PROGRAM, here)
    program = (
        f"{PROGRAM}\nprint(digest({str(path)!r}, 0), digest({str(path)!r}, 6))"  # from the start, and from the 7th
    )
    there = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert there.split() == [here["digest"](path, 0), here["digest"](path, 6)]


def test_rotations_remembered_and_made_anew_are_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Squares(Labelled):
        def __init__(self) -> None:
            super().__init__([3, 5, 4])
            self.image_shape = ImageShape(2, 6, 6)

        def gather(self, classes: IntArray, images: IntArray) -> UInt8Array:
            seeds = zip(classes.tolist(), images.tolist(), strict=True)
            return np.stack([np.random.default_rng(s).integers(0, 256, (2, 6, 6), np.uint8) for s in seeds])

    remembering = RotatedClasses(Squares())
    monkeypatch.setattr("metadropout.data.rotations.MAX_REMEMBERED_BYTES", 0)
    forgetful = RotatedClasses(Squares())
    classes = np.repeat(np.arange(12), remembering.class_sizes)
    images = np.concatenate([np.arange(size) for size in remembering.class_sizes])
    rng = np.random.default_rng(0)
    for _ in range(5):
        chosen = rng.integers(0, len(classes), 7)
        one = remembering.gather(classes[chosen], images[chosen])
        assert np.array_equal(one, forgetful.gather(classes[chosen], images[chosen]))
        upright = Squares().gather(classes[chosen] // 4, images[chosen])
        for got, base, turn in zip(one, upright, classes[chosen] % 4, strict=True):
            assert np.array_equal(got, np.rot90(base, turn, axes=(1, 2)))


def test_only_square_images_are_rotated_into_classes() -> None:
    oblong = Labelled([3])
    oblong.image_shape = ImageShape(3, 1, 2)
    with pytest.raises(DataError, match="make them square"):
        RotatedClasses(oblong)


def test_equal_sets_have_equal_checksums_and_others_do_not() -> None:
    sets = [
        Labelled([3, 4]),
        Labelled([4, 3]),
        Labelled([3, 4, 5]),
        ClassSubset(Labelled([3, 4, 5]), [0, 1]),
        ClassSubset(Labelled([3, 4, 5]), [1, 0]),
        RotatedClasses(Labelled([3, 4])),
    ]
    assert len({images.checksum() for images in sets}) == len(sets)
    assert Labelled([3, 4]).checksum() == sets[0].checksum()
