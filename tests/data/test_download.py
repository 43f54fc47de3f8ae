import errno
import hashlib
import socket
from pathlib import Path
from typing import Any

import pytest

from metadropout.data.download import ATTEMPTS, download
from metadropout.errors import DataError

CONTENT = bytes(range(256)) * 1000
MD5 = hashlib.md5(CONTENT).hexdigest()


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "sets" / "file.zip"


def left(target: Path) -> list[str]:
    return sorted(path.name for path in target.parent.iterdir() if path.suffix != ".lock")


def test_a_file_is_fetched_and_the_folder_made(server: Any, target: Path) -> None:
    server.content = CONTENT
    download(server.url, target, MD5)
    assert target.read_bytes() == CONTENT
    assert left(target) == ["file.zip"]


def test_a_file_that_is_there_is_not_fetched(server: Any, target: Path) -> None:
    target.parent.mkdir()
    target.write_bytes(b"mine")
    download(server.url, target, MD5)
    assert target.read_bytes() == b"mine"
    assert server.ranges == []


def test_a_connection_that_breaks_off_is_resumed_at_once(server: Any, target: Path) -> None:
    server.content, server.break_after = CONTENT, [70_000, 50_000, None]
    download(server.url, target, MD5)
    assert target.read_bytes() == CONTENT
    assert server.ranges == [None, "bytes=70000-", "bytes=120000-"]


def test_a_server_that_keeps_breaking_off_leaves_a_part_that_the_next_call_resumes(server: Any, target: Path) -> None:
    server.content, server.break_after = CONTENT, [1000] * ATTEMPTS
    with pytest.raises(DataError, match=rf"broke off\); {1000 * ATTEMPTS} bytes are kept and will be resumed; run the"):
        download(server.url, target, MD5)
    assert left(target) == ["file.zip.part"]
    download(server.url, target, MD5)
    assert target.read_bytes() == CONTENT
    assert server.ranges[-1] == f"bytes={1000 * ATTEMPTS}-"
    assert left(target) == ["file.zip"]


def test_a_server_that_sends_nothing_is_not_asked_for_ever(server: Any, target: Path) -> None:
    server.content, server.break_after = CONTENT, [0] * 100
    with pytest.raises(DataError, match="broke off"):
        download(server.url, target, MD5)
    assert len(server.ranges) == 1


def test_a_server_that_ignores_ranges_is_read_from_the_start(server: Any, target: Path) -> None:
    server.content, server.honours_ranges, server.break_after = CONTENT, False, [70_000, None]
    download(server.url, target, MD5)
    assert target.read_bytes() == CONTENT
    assert server.ranges == [None, "bytes=70000-"]


def test_wrong_bytes_are_thrown_away(server: Any, target: Path) -> None:
    server.content = CONTENT[::-1]
    with pytest.raises(DataError, match=rf"MD5 [0-9a-f]{{32}} instead of {MD5}; .*put it at .*file\.zip"):
        download(server.url, target, MD5)
    assert left(target) == []


def test_a_part_of_another_file_is_found_by_its_checksum(server: Any, target: Path) -> None:
    target.parent.mkdir()
    target.with_name("file.zip.part").write_bytes(b"something else")
    server.content = CONTENT
    with pytest.raises(DataError, match="instead of"):
        download(server.url, target, MD5)
    download(server.url, target, MD5)
    assert target.read_bytes() == CONTENT


def test_a_part_longer_than_the_file_is_started_anew(server: Any, target: Path) -> None:
    target.parent.mkdir()
    target.with_name("file.zip.part").write_bytes(bytes(len(CONTENT) + 5))
    server.content = CONTENT
    download(server.url, target, MD5)
    assert target.read_bytes() == CONTENT


def test_a_server_that_resumes_at_another_place_is_refused(
    server: Any, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target.parent.mkdir()
    target.with_name("file.zip.part").write_bytes(CONTENT[:100])
    server.content = CONTENT
    answer = server._answer

    def shifted(request: Any) -> None:
        del request.headers["Range"]
        request.headers["Range"] = "bytes=50-"
        answer(request)

    monkeypatch.setattr(server, "_answer", shifted)
    with pytest.raises(DataError, match="resumed at another place"):
        download(server.url, target, MD5)
    assert not target.exists()


def test_a_missing_page_is_reported_with_what_to_do(server: Any, target: Path) -> None:
    with pytest.raises(DataError, match=r"missing\.zip: cannot be downloaded \(Not Found\); .*put it at .*file\.zip"):
        download(server.url.replace("file.zip", "missing.zip"), target, MD5)
    assert left(target) == []


def test_a_server_that_is_not_there_is_reported(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/file.zip"
        with pytest.raises(DataError, match=r"cannot be downloaded \(.*refused\); .*put it at"):
            download(url, target, MD5)
    assert left(target) == []


def test_a_folder_that_cannot_be_made_is_named(server: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cannot write .*METADROPOUT_DATA"):
        download(server.url, tmp_path / "file" / "sets" / "a.zip", MD5)


def test_a_disk_that_fills_up_is_reported(server: Any, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server.content = CONTENT

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("metadropout.data.download._copy", full)
    with pytest.raises(DataError, match="No space left on device; make room"):
        download(server.url, target, MD5)
    assert not target.exists()
