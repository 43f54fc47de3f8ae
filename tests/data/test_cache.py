import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from toys import small_files

from metadropout.data import cache
from metadropout.data.cache import Contents, Preparation, open_prepared
from metadropout.data.images import ImageShape, UInt8Array
from metadropout.data.sources import Source
from metadropout.errors import DataError

SHAPE = ImageShape(1, 4, 4)
CLASSES = {"a": 3, "b": 5}


class Toy:
    """A data set whose source is one file: every byte is the grey of one image."""

    def __init__(self, home: Path) -> None:
        self.home, self.path, self.reads = home, home / "toy.bin", 0
        self.path.write_bytes(bytes(range(8)))

    def read(self, source: Source) -> Contents:
        self.reads += 1
        greys = source.inputs[0].read_bytes()

        def images() -> Iterator[UInt8Array]:
            for grey in greys:
                yield np.full(SHAPE, grey, dtype=np.uint8)

        return Contents(CLASSES, images(), splits={"own": {"train": ["b"], "test": ["a"]}})

    def find_in(self, directory: Path) -> Source | None:
        return Source(directory, (directory / "toy.bin",)) if (directory / "toy.bin").exists() else None

    def obtain(self) -> Source:
        raise DataError("the toy is missing")

    def open(self, **changes: Any) -> cache.PreparedSet:
        options: dict[str, Any] = {
            "stem": "toy",
            "image_shape": SHAPE,
            "settings": {"size": 4},
            "directory": None,
            "find_in": self.find_in,
            "read": self.read,
            "obtain": self.obtain,
        }
        return open_prepared(Preparation(**{**options, **changes}))


@pytest.fixture
def toy(data_home: Path) -> Toy:
    return Toy(data_home)


def greys(prepared: cache.PreparedSet) -> list[int]:
    which = np.repeat(np.arange(2), list(CLASSES.values()))
    return prepared.gather(which, np.array([0, 1, 2, 0, 1, 2, 3, 4]))[:, 0, 0, 0].tolist()


def files(folder: Path) -> list[str]:
    return sorted(path.suffix for path in folder.iterdir()) if folder.exists() else []


def test_a_set_is_prepared_once_and_then_only_opened(toy: Toy) -> None:
    assert greys(toy.open()) == greys(toy.open()) == list(range(8))
    assert toy.reads == 1


def test_the_manifest_says_what_where_from_and_how_split(toy: Toy, cache_home: Path) -> None:
    toy.open()
    manifest = json.loads((cache_home / "toy.json").read_text())
    assert manifest["version"] == cache.VERSION
    assert manifest["classes"] == CLASSES
    assert manifest["splits"] == {"own": {"train": ["b"], "test": ["a"]}}
    assert manifest["source"]["directory"] == str(toy.home)
    assert manifest["source"]["inputs"][0]["sha256"] == cache.file_digest(toy.path)
    pixels = cache_home / manifest["pixels"]["file"]
    assert (pixels.stat().st_size, cache.file_digest(pixels)) == (128, manifest["pixels"]["sha256"])


def test_gathered_images_are_the_callers_own(toy: Toy) -> None:
    prepared = toy.open()
    prepared.gather(np.array([0]), np.array([0]))[:] = 99
    assert greys(prepared)[0] == 0


def test_a_changed_source_is_prepared_again(toy: Toy, cache_home: Path) -> None:
    old = toy.open()
    toy.path.write_bytes(bytes(range(10, 18)))
    assert greys(toy.open()) == list(range(10, 18))
    assert greys(old) == list(range(8))  # who has the old one open keeps it
    assert files(cache_home) == [".json", ".lock", ".u8"]  # and it is not left lying about


def test_a_source_that_changes_while_it_is_read_is_prepared_again(toy: Toy) -> None:
    def read(source: Source) -> Contents:
        contents = toy.read(source)
        toy.path.write_bytes(bytes(range(20, 28)))
        return contents

    assert greys(toy.open(read=read)) == list(range(8))
    assert greys(toy.open()) == list(range(20, 28))


def test_a_copied_source_is_the_same_source(toy: Toy) -> None:
    toy.open()
    os.utime(toy.path, (1, 1))
    toy.open()
    assert toy.reads == 1


def test_another_version_of_the_code_prepares_again(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    toy.open()
    monkeypatch.setattr(cache, "VERSION", cache.VERSION + 1)
    toy.open()
    assert toy.reads == 2


def test_a_set_of_another_version_is_not_called_damaged(
    toy: Toy, cache_home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache_home.mkdir()
    (cache_home / "toy.json").write_text(json.dumps({"version": cache.VERSION - 1, "name": "toy"}))
    toy.open()
    assert not caplog.messages


def test_other_settings_prepare_again(toy: Toy) -> None:
    toy.open()
    toy.open(settings={"size": 4, "fit": "crop"})
    assert toy.reads == 2


@pytest.mark.parametrize("suffix", [".u8", ".json"])
@pytest.mark.parametrize("keep", [0, 0.5, 0.99])
def test_a_cache_cut_short_is_prepared_again(suffix: str, keep: float, toy: Toy, cache_home: Path) -> None:
    toy.open()
    (path,) = cache_home.glob(f"*{suffix}")
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * keep)])
    assert greys(toy.open()) == list(range(8))
    assert toy.reads == 2


def test_a_cache_cut_short_is_refused_when_its_source_is_gone(toy: Toy, cache_home: Path) -> None:
    toy.open()
    (pixels,) = cache_home.glob("*.u8")
    pixels.write_bytes(pixels.read_bytes()[:-1])
    toy.path.unlink()
    with pytest.raises(DataError, match="the toy is missing"):
        toy.open()


def test_any_flipped_bit_of_the_manifest_is_found_and_repaired(toy: Toy, cache_home: Path) -> None:
    toy.open()
    path = cache_home / "toy.json"
    whole = path.read_bytes()
    for place in range(0, len(whole), 7):
        content = bytearray(whole)
        content[place] ^= 1 << place % 8
        path.write_bytes(content)
        assert greys(toy.open()) == list(range(8)), content
        assert path.read_bytes() == whole, content


def test_a_damaged_manifest_is_mentioned_once(toy: Toy, cache_home: Path, caplog: pytest.LogCaptureFixture) -> None:
    toy.open()
    (cache_home / "toy.json").write_text("[" * 100_000)
    toy.open()
    assert caplog.messages == [
        f"{cache_home / 'toy.json'}: the prepared set is damaged (nested too deeply), so it is prepared again"
    ]


def forge(path: Path, **changes: Any) -> None:
    """Change a manifest so that its checksum is right nevertheless."""
    content = {**json.loads(path.read_text()), **changes}
    del content["sha256"]
    path.write_text(json.dumps({**content, "sha256": cache._checksum(content)}))


@pytest.mark.parametrize(
    "damage",
    [
        {"classes": None},
        {"classes": {"a": -3, "b": 5}},
        {"classes": {"a": 10**30, "b": 5}},
        {"classes": {}},
        {"image_shape": [1]},
        {"image_shape": [1, "x", 4]},
        {"pixels": {}},
        {"pixels": {"file": "../toy.u8", "bytes": 128, "sha256": ""}},
        {"pixels": {"file": "nothing.u8", "bytes": 128, "sha256": ""}},
        {"source": 3},
        {"source": {"directory": "\0", "inputs": [{}]}},
        {"splits": None},
        {"splits": {"own": 3}},
        {"class_digests": 3},
        {"class_digests": {"a": "0"}},
        {"notes": {"left out": 3}},
        {"source": {"directory": "/", "inputs": [{"path": "/"}]}},
        {"classes": {"\ud800": 3, "b": 5}, "class_digests": {"\ud800": "0", "b": "1"}},
    ],
    ids=str,
)
def test_a_forged_manifest_is_not_trusted(damage: dict[str, Any], toy: Toy, cache_home: Path) -> None:
    toy.open()
    forge(cache_home / "toy.json", **damage)
    assert greys(toy.open()) == list(range(8))
    assert toy.reads == 2


@pytest.mark.parametrize("lists", [{}, {"own": {"train": ["a"]}}, {"own": {"train": ["a"], "test": ["nothing"]}}])
def test_a_manifest_without_its_splits_says_how_to_get_them_back(
    lists: dict[str, Any], toy: Toy, cache_home: Path
) -> None:
    assert toy.open().lists_of_source("own") == {"train": ["b"], "test": ["a"]}
    forge(cache_home / "toy.json", splits=lists)
    with pytest.raises(DataError, match=r"toy\.json: does not have the split 'own' .*prepare it again with --force"):
        toy.open().lists_of_source("own")
    with cache.preparing_again():
        assert toy.open().lists_of_source("own") == {"train": ["b"], "test": ["a"]}


def test_preparing_again_needs_nothing_of_what_is_there(toy: Toy, cache_home: Path) -> None:
    toy.open()
    for path in cache_home.glob("toy*"):
        path.write_bytes(b"nonsense")
    with cache.preparing_again():
        assert greys(toy.open()) == list(range(8))
    assert toy.reads == 2
    toy.open().verify()


def test_preparing_again_without_a_source_leaves_what_there_is(toy: Toy) -> None:
    toy.open()
    toy.path.unlink()
    with cache.preparing_again(), pytest.raises(DataError, match="the toy is missing"):
        toy.open()
    assert greys(toy.open()) == list(range(8))


@pytest.mark.timeout(20)
@pytest.mark.parametrize("suffix", [".json", ".u8"])
def test_a_pipe_in_the_place_of_a_prepared_file_is_replaced(suffix: str, toy: Toy, cache_home: Path) -> None:
    toy.open()
    (path,) = cache_home.glob(f"*{suffix}")
    path.unlink()
    os.mkfifo(path)
    assert greys(toy.open()) == list(range(8))


@pytest.mark.timeout(20)
def test_a_pipe_in_the_place_of_the_lock_is_named(toy: Toy, cache_home: Path) -> None:
    cache_home.mkdir()
    os.mkfifo(cache_home / "toy.lock")
    with pytest.raises(DataError, match=r"cannot write the prepared cache .* at .*toy\.lock"):
        toy.open()


def test_images_that_are_left_out_are_not_counted_and_empty_classes_are_gone(
    toy: Toy, caplog: pytest.LogCaptureFixture
) -> None:
    def read(source: Source) -> Contents:
        contents = toy.read(source)
        return replace(contents, images=[None, None, None, *list(contents.images)[3:7], None])

    prepared = toy.open(read=read)
    assert (list(prepared.class_names), prepared.class_sizes.tolist()) == (["b"], [4])
    assert prepared.lists_of_source("own") == {"train": ["b"], "test": []}
    assert "left out, as none of their images can be read: classes 'a'" in caplog.text


def test_without_any_readable_image_nothing_is_prepared(toy: Toy, cache_home: Path) -> None:
    with pytest.raises(DataError, match="there is no image that can be read"):
        toy.open(read=lambda _: Contents(CLASSES, [None] * 8))
    assert files(cache_home) == [".lock"]


def test_a_prepared_set_does_without_its_source(toy: Toy) -> None:
    toy.open()
    toy.path.unlink()
    assert greys(toy.open()) == list(range(8))


def test_a_set_prepared_from_elsewhere_opens_without_saying_where(toy: Toy, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    moved = toy.path.rename(elsewhere / "toy.bin")
    toy.open(directory=str(elsewhere))
    assert greys(toy.open()) == list(range(8))
    moved.write_bytes(bytes(8))  # and changes there still count
    assert greys(toy.open()) == [0] * 8


def test_a_directory_without_the_source_is_an_error_even_if_a_set_is_prepared(toy: Toy, tmp_path: Path) -> None:
    toy.open()
    with pytest.raises(DataError, match="the toy is missing"):
        toy.open(directory=str(tmp_path / "nothing"))


def test_nothing_found_and_nothing_prepared_is_an_error(toy: Toy) -> None:
    toy.path.unlink()
    with pytest.raises(DataError, match="the toy is missing"):
        toy.open()


@pytest.mark.parametrize("error", [DataError("damaged"), KeyboardInterrupt()])
def test_a_preparation_that_fails_leaves_nothing_behind(error: BaseException, toy: Toy, cache_home: Path) -> None:
    def read(source: Source) -> Contents:
        def images() -> Iterator[UInt8Array]:
            yield np.zeros(SHAPE, dtype=np.uint8)
            raise error

        return Contents(CLASSES, images())

    with pytest.raises(type(error)):
        toy.open(read=read)
    assert files(cache_home) == [".lock"]


def test_too_few_images_are_an_error(toy: Toy, cache_home: Path) -> None:
    toy.path.write_bytes(bytes(7))
    with pytest.raises(DataError, match="7 images were read where 8 were announced"):
        toy.open()
    assert files(cache_home) == [".lock"]


def test_a_write_that_fails_leaves_nothing_behind(toy: Toy, cache_home: Path) -> None:
    with (
        small_files(64),
        pytest.raises(DataError, match=r"cannot write the prepared cache .*toy\.json.* METADROPOUT_CACHE"),
    ):
        toy.open()
    assert files(cache_home) == [".lock"]


def test_a_full_disk_is_noticed_before_the_work(toy: Toy, cache_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1000, 990, 10))
    with pytest.raises(DataError, match=r"128 bytes are needed and 10 are free; make room"):
        toy.open()
    assert files(cache_home) == [".lock"]


def test_a_disk_that_fills_up_when_the_manifest_is_written_leaves_no_manifest(
    toy: Toy, cache_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(cache, "write_atomically", full)
    with pytest.raises(DataError, match="No space left on device"):
        toy.open()
    assert ".json" not in files(cache_home)


def test_a_cache_directory_that_cannot_be_made_is_named(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("METADROPOUT_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(DataError, match=r"file/cache.*: Not a directory at .*; .*METADROPOUT_CACHE"):
        toy.open()


def test_a_read_only_cache_directory_is_named(toy: Toy, cache_home: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write anywhere")
    cache_home.mkdir()
    cache_home.chmod(0o500)
    with pytest.raises(DataError, match=r"Permission denied; .*METADROPOUT_CACHE"):
        toy.open()


def test_a_read_only_file_system_is_named(toy: Toy, cache_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(DataError, match=r"Read-only file system; .*METADROPOUT_CACHE"):
        toy.open()


def test_a_prepared_set_opens_where_nothing_can_be_written(
    toy: Toy, cache_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy.open()

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    for name in ("mkdir", "unlink"):
        monkeypatch.setattr(Path, name, refuse)
    assert greys(toy.open()) == list(range(8))


def test_what_a_killed_process_left_is_cleared_away(toy: Toy, cache_home: Path) -> None:
    cache_home.mkdir()
    (cache_home / "toy-abc.tmp").write_bytes(b"half")
    (cache_home / "other-abc.tmp").write_bytes(b"not ours")
    toy.open()
    assert [path.name for path in cache_home.glob("*.tmp")] == ["other-abc.tmp"]


def test_a_flipped_bit_is_found_by_checking(toy: Toy, cache_home: Path) -> None:
    toy.open().verify()
    (pixels,) = cache_home.glob("*.u8")
    content = bytearray(pixels.read_bytes())
    content[77] ^= 1
    pixels.write_bytes(content)
    with pytest.raises(DataError, match=r"\.u8: its bytes have changed .* prepare it again with --force"):
        toy.open().verify()


def test_two_processes_at_once_prepare_one_set(
    data_home: Path, cache_home: Path, tmp_path: Path, write_classes: Callable[..., Path]
) -> None:
    root = write_classes(tmp_path / "images", {f"class{i}": 10 for i in range(10)}, size=(40, 40))
    program = (
        "import sys; from metadropout.data import open_dataset\n"
        "input()\n"  # both have everything imported and start together
        f"print(open_dataset('folder', directory={str(root)!r}, image_size=20).train.checksum())"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    checksums = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert checksums[0] == checksums[1] != ""
    assert files(cache_home) == [".json", ".lock", ".u8"]
