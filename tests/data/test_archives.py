import gzip
import io
import os
import stat
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from metadropout.data import archives
from metadropout.data.archives import Archive, TarTree, ZipTree, open_tree, paths_in
from metadropout.data.trees import FolderTree, UnreadableError
from metadropout.errors import DataError


def make_zip(path: Path, *members: tuple[str | zipfile.ZipInfo, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members:
            archive.writestr(name, content)
    return path


def make_tar(path: Path, *members: tuple[str, bytes] | tarfile.TarInfo) -> Path:
    with tarfile.open(path, "w" if path.suffix == ".tar" else "w:gz") as archive:
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                archive.addfile(member)
            else:
                info = tarfile.TarInfo(member[0])
                info.size = len(member[1])
                archive.addfile(info, io.BytesIO(member[1]))
    return path


MAKERS: dict[str, Callable[..., Path]] = {"a.zip": make_zip, "a.tar.gz": make_tar, "a.tar": make_tar, "a.tgz": make_tar}
every_kind = pytest.mark.parametrize("kind", MAKERS)


@every_kind
def test_an_archive_has_the_files_of_the_folder(kind: str, tmp_path: Path) -> None:
    files = {"b/2.png": b"two", "a/1.png": b"one", "a/deep/3.png": b"three"}
    for name, content in files.items():
        path = tmp_path / "folder" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    for tree in (FolderTree(tmp_path / "folder"), open_tree(MAKERS[kind](tmp_path / kind, *files.items()))):
        assert tree.names == sorted(files)
        assert {name: tree.read(name) for name in tree.names} == files
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([kind, "data", "folder"])  # nothing is unpacked


@every_kind
def test_what_packers_leave_behind_is_not_seen(kind: str, tmp_path: Path) -> None:
    names = ["__MACOSX/a/._1.png", "a/.DS_Store", "a/Thumbs.db", ".git/config", "a/1.png"]
    assert open_tree(MAKERS[kind](tmp_path / kind, *((name, b"x") for name in names))).names == ["a/1.png"]


@every_kind
@pytest.mark.parametrize(
    "name", ["../evil.png", "a/../../evil.png", "/etc/evil.png", "..\\evil.png", "C:\\evil.png", "C:/evil.png"]
)
def test_names_that_lead_out_are_refused_and_nothing_is_written(name: str, kind: str, tmp_path: Path) -> None:
    inside = tmp_path / "outside" / "inside"
    inside.mkdir(parents=True)
    path = MAKERS[kind](inside / kind, ("a/good.png", b"x"), (name, b"evil"))
    with pytest.raises(DataError, match=r"a\.[a-z.]+: refused, .*leads out of its folder"):
        open_tree(path)
    assert [p.name for p in (tmp_path / "outside").rglob("*")] == ["inside", kind]


@every_kind
def test_many_files_that_unpack_to_too_much_together_are_refused(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archives, "MAX_SLACK", 2**20)
    monkeypatch.setattr(archives, "MAX_RATIO", 0)
    path = MAKERS[kind](tmp_path / kind, *((f"a/{i}.png", bytes(2**20)) for i in range(8)))
    with pytest.raises(DataError, match="8 files unpack to 8388608 bytes, as a decompression bomb"):
        open_tree(path)


@every_kind
def test_a_file_that_is_too_large_is_refused(kind: str, tmp_path: Path) -> None:
    path = MAKERS[kind](tmp_path / kind, ("a/1.png", bytes(1001)))
    tree = TarTree if "t" in kind else ZipTree
    with pytest.raises(DataError, match=r"'a/1\.png' in it unpacks to 1001 bytes, as a decompression bomb"):
        tree(path, max_file_bytes=1000)


@every_kind
@pytest.mark.parametrize("keep", [0.3, 0.9, 0.999])
def test_an_archive_cut_short_is_refused(keep: float, kind: str, tmp_path: Path) -> None:
    path = MAKERS[kind](tmp_path / kind, ("x", b"12345" * 1000), ("y", os.urandom(50_000)))
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * keep)])
    if kind == "a.tar" and keep == 0.999:
        assert open_tree(path).names == ["x", "y"]  # only zeros were cut
        return
    with pytest.raises(DataError, match=r"a\.[a-z.]+: not a readable (zip|tar) archive .* fetch it again"):
        open_tree(path)


@every_kind
@pytest.mark.timeout(20)
def test_a_pipe_and_a_device_are_not_opened_as_archives(kind: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / kind)
    with pytest.raises(DataError, match=r"archive \(it is a named pipe, not a regular file\)"):
        open_tree(tmp_path / kind)
    (tmp_path / kind).unlink()
    (tmp_path / kind).symlink_to("/dev/zero")
    with pytest.raises(DataError, match=r"archive \(it is a device, not a regular file\)"):
        open_tree(tmp_path / kind)


@every_kind
def test_an_archive_of_absurd_size_is_not_opened(kind: str, tmp_path: Path) -> None:
    with (tmp_path / kind).open("wb") as file:
        file.truncate(2**43)
    with pytest.raises(DataError, match=r"more than the .* bytes allowed"):
        open_tree(tmp_path / kind)


@every_kind
def test_one_folder_around_everything_does_not_count(kind: str, tmp_path: Path) -> None:
    tree = open_tree(
        MAKERS[kind](tmp_path / kind, ("top/in/a/1.png", b"1"), ("top/in/b/2.png", b"2"), ("top/x.txt", b""))
    )
    assert paths_in(tree, (".png",)) == {"top/in/a/1.png": ("a", "1.png"), "top/in/b/2.png": ("b", "2.png")}
    assert paths_in(tree, (".png",), keep={"in"})["top/in/a/1.png"] == ("in", "a", "1.png")


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
    path = make_zip(tmp_path / "a.zip", ("a/1.png", bytes(archives.MAX_FILE_BYTES + 1)))
    assert path.stat().st_size < 100_000
    with pytest.raises(DataError, match="decompression bomb"):
        ZipTree(path)


def test_a_zip_that_lies_about_sizes_gives_no_more_than_it_declared(tmp_path: Path) -> None:
    path = make_zip(tmp_path / "a.zip", ("a/1.png", bytes(10_000)))
    content = path.read_bytes().replace((10_000).to_bytes(4, "little"), (10).to_bytes(4, "little"))
    path.write_bytes(content)
    with pytest.raises(UnreadableError):
        ZipTree(path).read("a/1.png")


def test_a_zip_that_says_its_index_is_huge_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_zip(tmp_path / "a.zip", *((f"a/{i}.png", b"") for i in range(100)))
    monkeypatch.setattr(archives, "MAX_INDEX_BYTES", 1000)
    with pytest.raises(DataError, match="more than 1000 bytes in one go"):
        ZipTree(path)


def test_damage_inside_a_zip_is_found_when_the_file_is_read(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("a/1.png", b"the content")
    path = tmp_path / "a.zip"
    path.write_bytes(buffer.getvalue().replace(b"the content", b"thE content"))
    with pytest.raises(UnreadableError, match="the archive is damaged"):
        ZipTree(path).read("a/1.png")


def test_a_flipped_bit_in_a_gzipped_tar_is_found(tmp_path: Path) -> None:
    path = make_tar(tmp_path / "a.tar.gz", ("x", os.urandom(5000)))
    whole = path.read_bytes()
    for place in (100, 2500, 4900, len(whole) - 6):
        content = bytearray(whole)
        content[place] ^= 4
        path.write_bytes(content)
        with pytest.raises(DataError, match="not a readable tar archive"):
            TarTree(path)


def test_a_tar_is_read_in_any_order_and_keeps_only_what_was_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {f"{i}": bytes([i]) * 1000 for i in range(5)}
    path = make_tar(tmp_path / "a.tar.gz", *files.items())
    monkeypatch.setattr(archives, "MAX_KEPT_BYTES", 3000)
    for order in ("01234", "10324", "30124"):
        tree = TarTree(path)
        assert [tree.read(name) for name in order] == [files[name] for name in order]
    with pytest.raises(DataError, match="more than 3000 bytes of memory are needed; unpack it"):
        TarTree(path).read("4")


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE])
def test_links_and_devices_in_a_tar_are_refused(kind: bytes, tmp_path: Path) -> None:
    member = tarfile.TarInfo("x")
    member.type, member.linkname = kind, "/etc/passwd"
    with pytest.raises(DataError, match="'x' in it is a link or a device"):
        TarTree(make_tar(tmp_path / "a.tar.gz", member))


def test_a_tar_with_one_name_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="'x' is in it twice"):
        TarTree(make_tar(tmp_path / "a.tar", ("x", b"1"), ("x", b"2")))


def test_a_tar_with_a_name_that_unpacks_to_gigabytes_is_refused(tmp_path: Path) -> None:
    header = tarfile.TarInfo("././@LongLink")
    header.type, header.size = tarfile.GNUTYPE_LONGNAME, 4 * 2**30
    with gzip.open(tmp_path / "a.tar.gz", "wb") as file:
        file.write(header.tobuf(tarfile.GNU_FORMAT) + bytes(2**28))
    with pytest.raises(DataError, match=f"more than {archives.MAX_FILE_BYTES} bytes in one go"):
        TarTree(tmp_path / "a.tar.gz")


def test_a_tar_that_goes_on_after_its_end_is_refused(tmp_path: Path) -> None:
    path = make_tar(tmp_path / "a.tar.gz", ("x", b"1"))
    path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes()) + bytes(2**21)))
    with pytest.raises(DataError, match="it goes on after its end"):
        TarTree(path)


def test_an_empty_tar_holds_nothing(tmp_path: Path) -> None:
    tree = TarTree(make_tar(tmp_path / "a.tar.gz"))
    assert isinstance(tree, Archive)
    assert tree.names == []
