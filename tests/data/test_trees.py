import io
import stat
import zipfile
from pathlib import Path

import pytest

from metadropout.data import trees
from metadropout.data.trees import FolderTree, ZipTree
from metadropout.errors import DataError


def make_zip(path: Path, *members: tuple[str | zipfile.ZipInfo, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members:
            archive.writestr(name, content)
    return path


def test_folder_and_archive_give_the_same_files(tmp_path: Path) -> None:
    files = {"b/2.png": b"two", "a/1.png": b"one", "a/deep/3.png": b"three"}
    for name, content in files.items():
        path = tmp_path / "folder" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    for tree in (FolderTree(tmp_path / "folder"), ZipTree(make_zip(tmp_path / "a.zip", *files.items()))):
        assert tree.names == sorted(files)
        assert {name: tree.read(name) for name in tree.names} == files


def test_what_packers_and_desktops_leave_behind_is_not_seen(tmp_path: Path) -> None:
    litter = ["__MACOSX/a/._1.png", "a/.DS_Store", "a/Thumbs.db", ".git/config"]
    assert ZipTree(make_zip(tmp_path / "a.zip", *((name, b"x") for name in [*litter, "a/1.png"]))).names == ["a/1.png"]
    for name in litter:
        (tmp_path / "folder" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "folder" / name).write_bytes(b"x")
    assert FolderTree(tmp_path / "folder").names == []


def test_linked_classes_are_followed_and_circles_are_not(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "1.png").write_bytes(b"one")
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "cat").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "root" / "up").symlink_to(tmp_path / "root")
    assert FolderTree(tmp_path / "root").names == ["cat/1.png"]


@pytest.mark.parametrize(
    "name", ["../evil.png", "a/../../evil.png", "/etc/evil.png", "..\\evil.png", "C:\\evil.png", "C:/evil.png"]
)
def test_names_that_lead_out_are_refused_and_nothing_is_written(name: str, tmp_path: Path) -> None:
    inside = tmp_path / "outside" / "inside"
    inside.mkdir(parents=True)
    path = make_zip(inside / "a.zip", ("a/good.png", b"x"), (name, b"evil"))
    with pytest.raises(DataError, match=r"a\.zip: refused, .*leads out of its folder"):
        ZipTree(path)
    assert [p.name for p in (tmp_path / "outside").rglob("*")] == ["inside", "a.zip"]


def test_a_link_in_an_archive_is_refused(tmp_path: Path) -> None:
    link = zipfile.ZipInfo("a/link.png")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    with pytest.raises(DataError, match=r"'a/link\.png' in it is a link"):
        ZipTree(make_zip(tmp_path / "a.zip", (link, b"/etc/passwd")))


def test_an_encrypted_archive_is_refused(tmp_path: Path) -> None:
    path = make_zip(tmp_path / "a.zip", ("a/1.png", b"x"))
    content = bytearray(path.read_bytes())
    content[content.index(b"PK\x01\x02") + 8] |= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match="is encrypted"):
        ZipTree(path)


def test_a_file_that_unpacks_to_too_much_is_refused_without_unpacking(tmp_path: Path) -> None:
    path = make_zip(tmp_path / "a.zip", ("a/1.png", bytes(trees.MAX_FILE_BYTES + 1)))
    assert path.stat().st_size < 100_000
    with pytest.raises(DataError, match="decompression bomb"):
        ZipTree(path)


def test_many_files_that_unpack_to_too_much_together_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trees, "MAX_SLACK", 2**20)
    path = make_zip(tmp_path / "a.zip", *((f"a/{i}.png", bytes(2**20)) for i in range(8)))
    with pytest.raises(DataError, match="8 files unpack to 8388608 bytes, as a decompression bomb"):
        ZipTree(path)


def test_an_archive_that_lies_about_sizes_gives_no_more_than_it_declared(tmp_path: Path) -> None:
    path = make_zip(tmp_path / "a.zip", ("a/1.png", bytes(10_000)))
    content = path.read_bytes().replace((10_000).to_bytes(4, "little"), (10).to_bytes(4, "little"))
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"'a/1\.png' in it cannot be read"):
        ZipTree(path).read("a/1.png")


def test_an_archive_cut_short_is_refused(tmp_path: Path) -> None:
    path = make_zip(tmp_path / "a.zip", ("a/1.png", b"x" * 1000))
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(DataError, match=r"a\.zip: not a readable zip archive .* fetch it again"):
        ZipTree(path)


def test_damage_inside_an_archive_names_the_file(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("a/1.png", b"the content")
    path = tmp_path / "a.zip"
    path.write_bytes(buffer.getvalue().replace(b"the content", b"thE content"))
    with pytest.raises(DataError, match=r"a\.zip: 'a/1\.png' in it cannot be read .*damaged"):
        ZipTree(path).read("a/1.png")


def test_a_broken_link_in_a_folder_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "1.png").symlink_to(tmp_path / "nowhere.png")
    tree = FolderTree(tmp_path)
    with pytest.raises(DataError, match=r"a/1\.png: cannot be read \(No such file"):
        tree.read("a/1.png")
