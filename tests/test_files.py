import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from metadropout.files import check_regular, open_regular, read_json, read_regular

READERS: list[Callable[[Path, int], object]] = [check_regular, open_regular, read_regular, read_json]
pytestmark = pytest.mark.timeout(20)


def test_a_regular_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    assert read_regular(tmp_path / "file", 5) == b"12345"
    with open_regular(tmp_path / "file", 5) as file:
        assert file.read() == b"12345"


def test_a_link_to_a_regular_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    (tmp_path / "link").symlink_to("file")
    assert read_regular(tmp_path / "link", 5) == b"12345"


@pytest.mark.parametrize("reader", READERS)
def test_what_is_not_a_regular_file_is_named_and_not_waited_for(
    reader: Callable[[Path, int], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.chdir(tmp_path)  # the path of a socket may not be long
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket")
        for path, kind in {"pipe": "named pipe", "socket": "socket", "/dev/zero": "device", ".": "folder"}.items():
            with pytest.raises(OSError, match=f"it is a {kind}, not a regular file"):
                reader(Path(path), 100)


@pytest.mark.parametrize("reader", READERS)
def test_a_file_that_is_too_large_is_refused_unread(reader: Callable[[Path, int], object], tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as file:
        file.truncate(2**40)  # takes no room on the disk
    with pytest.raises(OSError, match="it has more than the 1000000 bytes allowed"):
        reader(tmp_path / "file", 10**6)


def test_a_file_that_is_longer_than_it_says_is_read_to_the_limit() -> None:
    path = Path("/proc/self/maps")  # a regular file of no bytes, if one believes its status
    if not path.exists():
        pytest.skip("there is no /proc")
    assert len(read_regular(path, 10**7)) > 100
    with pytest.raises(OSError, match="more than the 100 bytes allowed"):
        read_regular(path, 100)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe\x00", b"[" * 100_000, b"1" * 5000])
def test_what_is_not_json_is_a_value_error(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(ValueError):  # noqa: PT011 - json words it
        read_json(tmp_path / "file", 10**6)
