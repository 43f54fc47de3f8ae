import io
import os
import tarfile
from pathlib import Path

import pytest

from metadropout.data import tar
from metadropout.data.tar import read_members
from metadropout.errors import DataError


def make_tar(path: Path, *members: tuple[str, bytes] | tarfile.TarInfo) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                archive.addfile(member)
            else:
                info = tarfile.TarInfo(member[0])
                info.size = len(member[1])
                archive.addfile(info, io.BytesIO(member[1]))
    return path


def test_wanted_members_are_read_in_place(tmp_path: Path) -> None:
    path = make_tar(tmp_path / "a.tar.gz", ("top/x", b"one"), ("top/other", b"no"), ("top/y", b"two"))
    assert dict(read_members(path, ("x", "y"))) == {"top/x": b"one", "top/y": b"two"}
    assert list((tmp_path).glob("top*")) == []


@pytest.mark.parametrize("name", ["../x", "/x", "a/../../x"])
def test_names_that_lead_out_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a\.tar\.gz: refused, .*leads out of its folder"):
        list(read_members(make_tar(tmp_path / "a.tar.gz", (name, b"evil")), ("x",)))


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE])
def test_links_and_devices_are_refused(kind: bytes, tmp_path: Path) -> None:
    member = tarfile.TarInfo("x")
    member.type, member.linkname = kind, "/etc/passwd"
    with pytest.raises(DataError, match="'x' in it is a link or a device"):
        list(read_members(make_tar(tmp_path / "a.tar.gz", member), ("x",)))


def test_a_member_that_unpacks_to_too_much_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tar, "MAX_MEMBER_BYTES", 1000)
    with pytest.raises(DataError, match="decompression bomb"):
        list(read_members(make_tar(tmp_path / "a.tar.gz", ("x", bytes(1001))), ("x",)))


def test_an_archive_cut_short_is_refused(tmp_path: Path) -> None:
    path = make_tar(tmp_path / "a.tar.gz", ("x", b"12345" * 1000), ("y", bytes(range(256)) * 100))
    path.write_bytes(path.read_bytes()[:150])
    with pytest.raises(DataError, match="not a readable tar archive"):
        list(read_members(path, ("x", "y")))


def test_damage_in_the_middle_is_reported(tmp_path: Path) -> None:
    path = make_tar(tmp_path / "a.tar.gz", ("x", os.urandom(5000)))
    content = bytearray(path.read_bytes())
    content[100:4000] = bytes(3900)
    path.write_bytes(content)
    with pytest.raises(DataError, match="not a readable tar archive"):
        list(read_members(path, ("x",)))


def test_a_missing_member_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="y not in it"):
        list(read_members(make_tar(tmp_path / "a.tar.gz", ("x", b"")), ("x", "y")))
