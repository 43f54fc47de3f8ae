import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from metadropout.data.episodes import EpisodeSampler
from metadropout.data.glyphs import Glyphs, glyphs
from metadropout.data.images import ImageSet, IntArray, UInt8Array
from metadropout.errors import DataError


def pairs(n_classes: int, n_images: int) -> tuple[IntArray, IntArray]:
    """All (class, image) pairs, class by class."""
    return np.repeat(np.arange(n_classes), n_images), np.tile(np.arange(n_images), n_classes)


def everything(images: ImageSet) -> UInt8Array:
    """Shape (classes, images, 28, 28)."""
    n = int(images.class_sizes[0])
    return images.gather(*pairs(len(images), n)).reshape(len(images), n, 28, 28)


def test_the_same_arguments_give_the_same_images() -> None:
    assert np.array_equal(everything(Glyphs(3, 8, seed=1)), everything(Glyphs(3, 8, seed=1)))


def test_another_seed_gives_other_characters_not_only_other_hands() -> None:
    one, other = (everything(Glyphs(0, 30, seed=seed)).astype(np.float32) for seed in (1, 2))
    # Averages over ten hands are near each other if, and only if, the character is the same.
    same = np.abs(one[:, :10].mean(1) - one[:, 10:].mean(1)).mean()
    different = np.abs(one[:, :10].mean(1) - other[:, 10:].mean(1)).mean()
    assert different > 1.35 * same


def test_images_do_not_depend_on_the_order_in_which_they_are_asked_for() -> None:
    classes, images = pairs(6, 20)
    in_order = Glyphs(0, 6).gather(classes, images)
    shuffled = np.random.default_rng(0).permutation(len(classes))
    one_by_one = Glyphs(0, 6)
    for i in shuffled:
        assert np.array_equal(one_by_one.gather(classes[[i]], images[[i]])[0], in_order[i])
    assert np.array_equal(Glyphs(0, 6).gather(classes[shuffled], images[shuffled]), in_order[shuffled])


def test_a_class_does_not_depend_on_how_many_others_there_are_or_where_the_set_begins() -> None:
    many = everything(Glyphs(0, 12))
    assert np.array_equal(everything(Glyphs(0, 3)), many[:3])
    assert np.array_equal(everything(Glyphs(7, 5)), many[7:])


def test_an_image_does_not_depend_on_how_many_images_its_class_has() -> None:
    many = everything(Glyphs(0, 30, images_per_class=20))
    assert np.array_equal(everything(Glyphs(0, 30, images_per_class=1)), many[:, :1])
    assert np.array_equal(everything(Glyphs(0, 30, images_per_class=7)), many[:, :7])


def test_threads_that_share_a_set_get_the_right_images() -> None:
    expected, shared = everything(Glyphs(0, 20)), Glyphs(0, 20)
    with ThreadPoolExecutor(4) as pool:
        for result in pool.map(everything, [shared] * 8):
            assert np.array_equal(result, expected)


def test_changing_a_gathered_array_does_not_change_the_set() -> None:
    images = Glyphs(0, 2)
    before = everything(images).copy()
    everything(images)[:] = 7
    assert np.array_equal(everything(images), before)


def test_a_class_is_drawn_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    images = Glyphs(0, 4)
    before = everything(images)
    monkeypatch.setattr("metadropout.data.glyphs._draw_class", lambda *_: pytest.fail("drew a class again"))
    assert np.array_equal(everything(images), before)


def test_splits_have_the_sizes_asked_for_and_share_no_class() -> None:
    splits = glyphs(train_classes=30, validation_classes=10, test_classes=20, images_per_class=4, seed=5)
    assert splits.validation is not None
    sets = [splits.train, splits.validation, splits.test]
    assert [len(s) for s in sets] == [30, 10, 20]
    assert all((s.class_sizes == 4).all() for s in sets)
    assert len({name for s in sets for name in s.class_names}) == 60
    distinct = {image.tobytes() for s in sets for image in everything(s).reshape(-1, 28, 28)}
    assert len(distinct) == 60 * 4


def test_images_are_grey_bytes_with_some_ink_on_clean_paper() -> None:
    images = Glyphs(0, 100)
    assert images.image_shape == (1, 28, 28)
    gathered = images.gather(*pairs(100, 20))
    assert gathered.shape == (2000, 1, 28, 28)
    assert gathered.dtype == np.uint8
    assert (gathered.max(axis=(1, 2, 3)) > 200).all()
    covered = gathered.mean(axis=(1, 2, 3)) / 255
    assert covered.min() > 0.015
    assert covered.max() < 0.35
    assert 0.06 < covered.mean() < 0.13  # Omniglot's at this size is 0.085
    assert (gathered == 0).mean() > 0.7
    # Anti-aliased: a good part of the inked pixels is neither black nor white.
    assert 0.2 < ((gathered > 0) & (gathered < 255)).sum() / (gathered > 0).sum() < 0.9


def test_characters_stay_on_the_paper() -> None:
    images = everything(Glyphs(0, 100))
    edge = np.concatenate([images[..., 0, :], images[..., -1, :], images[..., :, 0], images[..., :, -1]], axis=-1)
    assert (edge > 128).mean() < 0.001


def test_hands_write_in_different_sizes_and_places() -> None:
    images = everything(Glyphs(0, 50))
    lines = np.stack([images.max(2), images.max(3)]) > 128  # (axes, classes, images, 28): is there ink at this x or y?
    first, last = lines.argmax(-1), 27 - lines[..., ::-1].argmax(-1)
    # The longer side is set by the hand's scale alone, whatever its wobble.
    assert (last - first).max(0).std(-1).mean() > 1
    assert ((first + last) / 2).std(-1).mean() > 0.5


def test_images_of_a_class_differ_but_less_than_those_of_two_classes() -> None:
    images = everything(Glyphs(0, 60)).reshape(60, 20, -1).astype(np.float32) / 255
    assert len(np.unique(images.reshape(1200, -1), axis=0)) == 1200
    flat = torch.from_numpy(images.reshape(1200, -1))
    distance = torch.cdist(flat, flat).numpy()
    same = np.repeat(np.arange(60), 20)[:, None] == np.repeat(np.arange(60), 20)
    within = distance[same & ~np.eye(1200, dtype=bool)].mean()
    between = distance[~same].mean()
    assert 0.6 * between < within < 0.97 * between


def test_nearest_neighbours_of_pixels_are_better_than_chance_but_far_from_perfect() -> None:
    sampler = EpisodeSampler(glyphs().test, way=5, shot=1, query=15, seed=0)
    right = []
    for i in range(300):
        episode = sampler(i, 0)
        nearest = torch.cdist(episode.query_x.flatten(1), episode.support_x.flatten(1)).argmin(1)
        right.append((episode.support_y[nearest] == episode.query_y).float().mean().item())
    assert 0.42 < np.mean(right) < 0.54  # measured 0.48 ± 0.006 over 1000 episodes; chance is 0.2


def test_drawing_is_fast() -> None:
    fastest = 0.0
    for first in (0, 100, 200):  # the best of three, in processor time, because the machine may be busy
        images = Glyphs(first, 50)
        start = time.process_time()
        images.gather(*pairs(50, 20))
        fastest = max(fastest, 1000 / (time.process_time() - start))
    assert fastest > 1000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_classes": 0}, "n_classes must be at least 1, but is 0"),
        ({"images_per_class": 0}, "images_per_class must be at least 1, but is 0"),
        ({"first_class": -1}, "first_class must be at least 0, but is -1"),
        ({"seed": -2}, "seed must be at least 0, but is -2"),
    ],
)
def test_impossible_arguments_are_named(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(DataError, match=message):
        Glyphs(**{"first_class": 0, "n_classes": 1, **arguments})


@pytest.mark.parametrize("option", ["train_classes", "validation_classes", "test_classes"])
def test_an_empty_split_is_named_by_its_option(option: str) -> None:
    with pytest.raises(DataError, match=f"{option} must be at least 1, but is 0"):
        glyphs(**{option: 0})


@pytest.mark.parametrize("outside", [-1, 5])
def test_a_class_outside_the_set_is_an_error_not_a_class_of_another_split(outside: int) -> None:
    with pytest.raises(IndexError, match="numbered 0 to 4"):
        Glyphs(10, 5).gather(np.array([outside]), np.array([0]))
