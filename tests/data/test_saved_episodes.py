import json
from pathlib import Path
from typing import Any

import pytest
import torch

from metadropout.data.episodes import EpisodeSampler
from metadropout.data.glyphs import Glyphs
from metadropout.data.saved_episodes import load_episodes, save_episodes
from metadropout.errors import DataError


@pytest.fixture
def images() -> Glyphs:
    return Glyphs(0, 8, images_per_class=10)


@pytest.fixture
def path(tmp_path: Path, images: Glyphs) -> Path:
    path = tmp_path / "episodes.json"
    save_episodes(path, EpisodeSampler(images, way=3, shot=2, query=4, seed=1), 20, iteration=7)
    return path


def test_a_list_gives_the_episodes_it_was_saved_from(path: Path, images: Glyphs) -> None:
    sampler, saved = EpisodeSampler(images, way=3, shot=2, query=4, seed=1), load_episodes(path, images)
    assert (len(saved), saved.way, saved.shot, saved.query) == (20, 3, 2, 4)
    for task in range(20):
        one, other = sampler(7, task), saved(0, task)
        assert torch.equal(one.support_x, other.support_x)
        assert torch.equal(one.query_x, other.query_x)
        assert torch.equal(one.query_y, other.query_y)
        assert torch.equal(sampler.raw(7, task).query_x, saved.raw(0, task).query_x)


def test_the_list_does_not_depend_on_how_episodes_are_drawn(path: Path, images: Glyphs) -> None:
    written = json.loads(path.read_text())["episodes"][3]
    indices = load_episodes(path, images).indices(0, 3)
    assert (indices.classes.tolist(), indices.images.tolist()) == (written["classes"], written["images"])


@pytest.mark.parametrize(
    "others",
    [Glyphs(1, 8, images_per_class=10), Glyphs(0, 9, images_per_class=10), Glyphs(0, 8, images_per_class=10, seed=1)],
    ids=["classes", "number", "pixels"],
)
def test_a_list_of_other_images_is_refused(others: Glyphs, path: Path) -> None:
    with pytest.raises(DataError, match=r"episodes\.json: the episode list was drawn from other images"):
        load_episodes(path, others)


@pytest.mark.parametrize(
    "change",
    [{"shot": 3}, {"episodes": []}, {"checksum": "0"}, {"way": 4}],
    ids=lambda change: next(iter(change)),
)
def test_a_changed_list_is_refused(change: dict[str, Any], path: Path, images: Glyphs) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(DataError, match="has been changed since it was saved"):
        load_episodes(path, images)


def test_a_list_cut_short_is_refused(path: Path, images: Glyphs) -> None:
    path.write_text(path.read_text()[:-100])
    with pytest.raises(DataError, match=r"episodes\.json: not an episode list, or cut short"):
        load_episodes(path, images)


@pytest.mark.parametrize("content", ["[]", "{}", '{"format": "other"}'])
def test_another_file_is_refused(content: str, path: Path, images: Glyphs) -> None:
    path.write_text(content)
    with pytest.raises(DataError, match="not an episode list of the format"):
        load_episodes(path, images)


def test_a_missing_list_and_an_unwritable_place_are_named(tmp_path: Path, images: Glyphs) -> None:
    with pytest.raises(DataError, match=r"cannot read the episode list .*none\.json: No such file"):
        load_episodes(tmp_path / "none.json", images)
    with pytest.raises(DataError, match=r"cannot write the episode list .*nowhere/a\.json: No such file"):
        save_episodes(tmp_path / "nowhere" / "a.json", EpisodeSampler(images, way=2, shot=1, query=1, seed=0), 3)


def test_more_episodes_than_saved_are_an_error(path: Path, images: Glyphs) -> None:
    with pytest.raises(DataError, match="episode 20 is asked for, but the list has 20"):
        load_episodes(path, images)(0, 20)


def test_an_empty_list_is_refused(tmp_path: Path, images: Glyphs) -> None:
    with pytest.raises(DataError, match="at least 1"):
        save_episodes(tmp_path / "a.json", EpisodeSampler(images, way=2, shot=1, query=1, seed=0), 0)
