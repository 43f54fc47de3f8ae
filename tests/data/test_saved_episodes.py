import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from metadropout.data.episodes import EpisodeSampler
from metadropout.data.glyphs import Glyphs
from metadropout.data.saved_episodes import _checksum, load_episodes, save_episodes
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
    with pytest.raises(DataError, match=r"episodes\.json: not a usable episode list \(not JSON, or cut short"):
        load_episodes(path, images)


@pytest.mark.parametrize("content", ["[]", "{}", '{"format": "other"}'])
def test_another_file_is_refused(content: str, path: Path, images: Glyphs) -> None:
    path.write_text(content)
    with pytest.raises(DataError, match=r"not a usable episode list \(its format is not"):
        load_episodes(path, images)


def forge(path: Path, **changes: Any) -> None:
    """Change a list so that its checksum is right nevertheless."""
    body = {**json.loads(path.read_text()), **changes}
    del body["checksum"]
    path.write_text(json.dumps({**body, "checksum": _checksum(body)}))


EPISODE = {"classes": [0, 1, 2], "images": [[0, 1, 2, 3, 4, 5]] * 3}


@pytest.mark.parametrize(
    "changes",
    [
        {"episodes": []},
        {"episodes": None},
        {"episodes": [3]},
        {"episodes": [{}]},
        {"episodes": [{**EPISODE, "classes": [0, 1]}]},
        {"episodes": [{**EPISODE, "classes": [0, 1, 8]}]},
        {"episodes": [{**EPISODE, "classes": [0, 1, -1]}]},
        {"episodes": [{**EPISODE, "classes": [0, 1, 10**30]}]},
        {"episodes": [{**EPISODE, "classes": ["a", "b", "c"]}]},
        {"episodes": [{**EPISODE, "images": [[0, 1, 2, 3, 4, 10]] * 3}]},
        {"episodes": [{**EPISODE, "images": [[0, 1], [2], [3]]}]},
        {"episodes": [EPISODE], "shot": 6},
        {"episodes": [EPISODE], "shot": "two"},
        {"episodes": [EPISODE], "query": None},
        {"episodes": [EPISODE], "shot": 1.0},
    ],
    ids=str,
)
def test_a_forged_list_is_refused(changes: dict[str, Any], path: Path, images: Glyphs) -> None:
    forge(path, **changes)
    with pytest.raises(
        DataError, match=r"episodes\.json: not a usable episode list \(.*; get it again .* or delete it"
    ):
        load_episodes(path, images)


def test_any_flipped_bit_is_found(path: Path, images: Glyphs) -> None:
    whole = path.read_bytes()
    for place in range(0, len(whole), 37):
        content = bytearray(whole)
        content[place] ^= 1 << place % 8
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"episodes\.json: not a usable episode list"):
            load_episodes(path, images)


@pytest.mark.timeout(20)
def test_a_pipe_is_not_waited_for(tmp_path: Path, images: Glyphs) -> None:
    os.mkfifo(tmp_path / "list.json")
    with pytest.raises(DataError, match=r"cannot read the episode list .*: it is a named pipe"):
        load_episodes(tmp_path / "list.json", images)


def test_absurd_nesting_is_refused(path: Path, images: Glyphs) -> None:
    path.write_text("[" * 100_000)
    with pytest.raises(DataError, match="nested too deeply"):
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
