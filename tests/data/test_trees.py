import os
from pathlib import Path

import pytest

from metadropout.data import trees
from metadropout.data.trees import FolderTree, UnreadableError


def test_what_desktops_leave_behind_is_not_seen(tmp_path: Path) -> None:
    for name in ["__MACOSX/a/._1.png", "a/.DS_Store", "a/Thumbs.db", ".git/config"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    assert FolderTree(tmp_path).names == []


def test_folders_without_files_are_known(tmp_path: Path) -> None:
    (tmp_path / "root" / "b" / "empty").mkdir(parents=True)
    (tmp_path / "root" / "a").mkdir()
    assert FolderTree(tmp_path / "root").folders == ["a", "b", "b/empty"]


def test_linked_classes_are_followed_and_circles_are_not(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "1.png").write_bytes(b"one")
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "cat").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "root" / "up").symlink_to(tmp_path / "root")
    assert FolderTree(tmp_path / "root").names == ["cat/1.png"]


def test_a_link_to_nowhere_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "1.png").symlink_to(tmp_path / "nowhere.png")
    with pytest.raises(UnreadableError, match="No such file"):
        FolderTree(tmp_path).read("1.png")


@pytest.mark.timeout(20)
def test_a_pipe_and_a_device_cannot_be_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "zero.png").symlink_to("/dev/zero")
    tree = FolderTree(tmp_path)
    assert tree.names == ["pipe.png", "zero.png"]
    with pytest.raises(UnreadableError, match="it is a named pipe, not a regular file"):
        tree.read("pipe.png")
    with pytest.raises(UnreadableError, match="it is a device, not a regular file"):
        tree.read("zero.png")


def test_a_file_of_absurd_size_cannot_be_read(tmp_path: Path) -> None:
    with (tmp_path / "1.png").open("wb") as file:
        file.truncate(2**40)  # takes no room on the disk
    with pytest.raises(UnreadableError, match=f"more than the {trees.MAX_FILE_BYTES} bytes allowed"):
        FolderTree(tmp_path).read("1.png")
