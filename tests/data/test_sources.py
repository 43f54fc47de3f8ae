import os
from collections.abc import Callable
from pathlib import Path

import pytest

from metadropout.data import sources
from metadropout.data.sources import Source
from metadropout.errors import DataError


@pytest.fixture
def source(tmp_path: Path, write_classes: Callable[..., Path]) -> Source:
    root = write_classes(tmp_path / "images", {"a": 2, "b": 2})
    (tmp_path / "list.csv").write_text("x")
    return Source(tmp_path, (root, tmp_path / "list.csv"))


def test_an_untouched_source_matches(source: Source) -> None:
    assert source.matches(source.describe())
    assert source.matches(source.describe(), thorough=True)


def test_every_change_of_a_folder_is_noticed(source: Source) -> None:
    recorded, image = source.describe(), source.inputs[0] / "a" / "0000.png"
    content = image.read_bytes()
    image.write_bytes(content[::-1])  # in place, of the same length
    assert not source.matches(recorded)
    recorded = source.describe()
    image.rename(image.with_name("0009.png"))
    assert not source.matches(recorded)
    recorded = source.describe()
    image.write_bytes(content)
    assert not source.matches(recorded)


def test_a_file_is_compared_by_content_where_its_time_differs(source: Source) -> None:
    recorded = source.describe()
    os.utime(source.inputs[1], (1, 1))
    assert source.matches(recorded)
    source.inputs[1].write_text("y")
    assert not source.matches(recorded)


def test_a_change_that_keeps_size_and_time_is_found_by_a_thorough_look(source: Source) -> None:
    os.utime(source.inputs[1], (1, 1))
    recorded = source.describe()
    source.inputs[1].write_text("y")
    os.utime(source.inputs[1], (1, 1))
    assert source.matches(recorded)
    assert not source.matches(recorded, thorough=True)


def test_of_a_very_large_folder_added_and_removed_files_are_noticed(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "MAX_FILES_STAMPED", 0)
    recorded = source.describe()
    assert source.matches(recorded)
    (source.inputs[0] / "b" / "new.png").write_bytes(b"")
    assert not source.matches(recorded)


@pytest.mark.timeout(20)
def test_a_pipe_as_source_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "train.tar.gz")
    with pytest.raises(DataError, match=r"train\.tar\.gz: cannot be read \(it is a named pipe"):
        Source(tmp_path, (tmp_path / "train.tar.gz",)).describe()


def test_a_link_to_nowhere_does_no_harm(source: Source) -> None:
    (source.inputs[0] / "a" / "note.txt").symlink_to("nowhere")
    assert source.matches(source.describe())
