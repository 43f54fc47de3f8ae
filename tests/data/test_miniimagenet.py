import hashlib
import os
import pickle
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from metadropout.data import miniimagenet as module
from metadropout.data.images import ImageSet, Splits, UInt8Array
from metadropout.data.inspection import check, prepared_of
from metadropout.data.miniimagenet import PARTS, miniimagenet
from metadropout.errors import DataError

CLASSES = {"train": ["n01", "n05", "n02"], "val": ["n03", "n00"], "test": ["n04", "n06"]}
PER_CLASS = 4


def image(name: str, i: int) -> UInt8Array:
    return np.random.default_rng([int(name[1:]), i]).integers(0, 256, (84, 84, 3), dtype=np.uint8)


def file_name(name: str, i: int) -> str:
    return f"{name}{i:08d}.png"


def write_tables(root: Path) -> Path:
    (root / "images").mkdir(parents=True)
    for part, names in CLASSES.items():
        rows = [(file_name(name, i), name) for name in names for i in range(PER_CLASS)]
        (root / f"{part}.csv").write_text("filename,label\n" + "".join(f"{file},{name}\n" for file, name in rows))
        for name in names:
            for i in range(PER_CLASS):
                Image.fromarray(image(name, i)).save(root / "images" / file_name(name, i))
    return root


def write_pickles(root: Path, protocol: int = 2) -> Path:
    root.mkdir(parents=True)
    for part, names in CLASSES.items():
        content = {
            "image_data": np.stack([image(name, i) for name in names for i in range(PER_CLASS)]),
            "class_dict": {name: list(range(k * PER_CLASS, (k + 1) * PER_CLASS)) for k, name in enumerate(names)},
        }
        (root / f"mini-imagenet-cache-{part}.pkl").write_bytes(pickle.dumps(content, protocol))
    return root


def write_folders(root: Path) -> Path:
    for part, names in CLASSES.items():
        for name in names:
            (root / part / name).mkdir(parents=True)
            for i in range(PER_CLASS):
                Image.fromarray(image(name, i)).save(root / part / name / file_name(name, i))
    return root


def write_archives(root: Path, format: str = "gztar", top: bool = True) -> Path:
    write_folders(root)
    for part in CLASSES:
        if top:
            shutil.make_archive(str(root / part), format, root, part)
        else:
            shutil.make_archive(str(root / part), format, root / part)
        shutil.rmtree(root / part)
    return root


LAYOUTS: dict[str, Callable[[Path], Path]] = {
    "tables": write_tables,
    "pickles": write_pickles,
    "folders": write_folders,
    "archives": write_archives,
    "plain archives": partial(write_archives, format="tar", top=False),
}


def pixels(images: ImageSet) -> UInt8Array:
    n = len(images)
    return images.gather(np.repeat(np.arange(n), PER_CLASS), np.tile(np.arange(PER_CLASS), n))


def everything(splits: Splits) -> list[tuple[list[str], UInt8Array]]:
    assert splits.validation is not None
    return [(list(part.class_names), pixels(part)) for part in (splits.train, splits.validation, splits.test)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_names_and_arrays(layout: str, data_home: Path) -> None:
    LAYOUTS[layout](data_home / "miniimagenet")
    found = everything(miniimagenet())
    for (names, array), part in zip(found, CLASSES, strict=True):
        assert names == sorted(CLASSES[part])
        expected = [image(name, i).transpose(2, 0, 1) for name in names for i in range(PER_CLASS)]
        assert np.array_equal(array, np.stack(expected))


def test_all_layouts_have_one_checksum(tmp_path: Path) -> None:
    checksums = {
        miniimagenet(directory=str(write(tmp_path / layout))).train.checksum() for layout, write in LAYOUTS.items()
    }
    assert len(checksums) == 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_another_size_is_the_same_in_every_layout(layout: str, tmp_path: Path) -> None:
    splits = miniimagenet(image_size=32, directory=str(LAYOUTS[layout](tmp_path / layout)))
    expected = Image.fromarray(image("n01", 0)).resize((32, 32), Image.Resampling.LANCZOS)
    assert np.array_equal(pixels(splits.train)[0], np.asarray(expected).transpose(2, 0, 1))


def test_numbers_that_differ_from_the_published_are_mentioned(
    data_home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_folders(data_home / "mini-imagenet")
    miniimagenet()
    assert "3/2/2 classes instead of 64/16/20, 4 to 4 images each instead of 600" in caplog.text


def test_a_table_that_names_missing_files_is_refused(data_home: Path, cache_home: Path) -> None:
    root = write_tables(data_home / "miniimagenet")
    for i in (1, 3):
        (root / "images" / file_name("n03", i)).unlink()
    with pytest.raises(
        DataError,
        match=r"val\.csv: 2 of the files it names are not in .*images, the first is 'n0300000001\.png'; unpack",
    ):
        miniimagenet()
    assert not list(cache_home.glob("*.json"))


@pytest.mark.parametrize("name", ["../secret.png", "/etc/passwd"])
def test_a_table_that_leads_out_of_the_images_is_refused(name: str, data_home: Path) -> None:
    root = write_tables(data_home / "miniimagenet")
    (root / "secret.png").write_bytes((root / "images" / file_name("n01", 0)).read_bytes())
    with (root / "test.csv").open("a") as file:
        file.write(f"{name},n04\n")
    with pytest.raises(DataError, match=r"test\.csv: refused, because '.*' leads out"):
        miniimagenet()


@pytest.mark.parametrize("content", ["a,b\n1,2\n", "filename\nx.png\n", "\x00\xff", "filename,label\n,n01\n"])
def test_a_table_of_another_kind_is_refused(content: str, data_home: Path) -> None:
    root = write_tables(data_home / "miniimagenet")
    (root / "val.csv").write_bytes(content.encode("latin-1"))
    with pytest.raises(DataError, match=r"val\.csv|val classes"):
        miniimagenet()


INCOMPLETE = {"tables": "val.csv", "pickles": "mini-imagenet-cache-val.pkl", "archives": "val.tar.gz"}


@pytest.mark.parametrize("layout", INCOMPLETE)
def test_an_incomplete_layout_says_what_is_missing(layout: str, data_home: Path) -> None:
    root = LAYOUTS[layout](data_home / "miniimagenet")
    missing = INCOMPLETE[layout]
    (root / missing).unlink()
    with pytest.raises(DataError, match=f"is there, but not {missing}; miniImageNet needs all"):
        miniimagenet()


def test_tables_without_the_images_say_so(data_home: Path) -> None:
    root = write_tables(data_home / "miniimagenet")
    shutil.rmtree(root / "images")
    with pytest.raises(DataError, match=r"miniimagenet: train\.csv is there, but not images"):
        miniimagenet()


def test_a_class_in_two_splits_is_refused(data_home: Path) -> None:
    root = write_folders(data_home / "miniimagenet")
    shutil.copytree(root / "train" / "n01", root / "test" / "n01")
    with pytest.raises(DataError, match="'n01' would be in more than one split"):
        miniimagenet()


class Evil:
    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.witness}",)


def test_a_pickle_that_runs_code_is_refused_and_not_run(data_home: Path, tmp_path: Path, cache_home: Path) -> None:
    root = write_pickles(data_home / "miniimagenet")
    witness = tmp_path / "witness"
    (root / "mini-imagenet-cache-val.pkl").write_bytes(pickle.dumps({"image_data": Evil(witness), "class_dict": {}}))
    with pytest.raises(DataError, match=r"mini-imagenet-cache-val\.pkl: refused, .*nothing in it was executed"):
        miniimagenet()
    assert not witness.exists()
    assert not list(cache_home.glob("*.json"))


@pytest.mark.parametrize(
    "content",
    [
        [1, 2],
        np.zeros(3),
        {"image_data": np.zeros((2, 84, 84, 3), np.uint8)},
        {"image_data": np.zeros((2, 84, 84), np.uint8), "class_dict": {"a": [0, 1]}},
        {"image_data": np.zeros((2, 84, 84, 3)), "class_dict": {"a": [0, 1]}},
        {"image_data": np.zeros((2, 84, 84, 3), np.uint8), "class_dict": {"a": [0, 2]}},
        {"image_data": np.zeros((2, 84, 84, 3), np.uint8), "class_dict": {}},
    ],
    ids=["list", "array", "no-classes", "shape", "type", "range", "empty"],
)
def test_a_pickle_with_other_contents_is_refused(content: Any, data_home: Path) -> None:
    root = write_pickles(data_home / "miniimagenet")
    (root / "mini-imagenet-cache-test.pkl").write_bytes(pickle.dumps(content))
    with pytest.raises(DataError, match=r"cache-test\.pkl: not a miniImageNet cache"):
        miniimagenet()


def notes(directory: Path) -> dict[str, Any]:
    prepared = prepared_of(miniimagenet(directory=str(directory)).train)
    assert prepared is not None
    return prepared.manifest["notes"]


def test_lists_and_copy_are_recognised_in_every_layout_with_files(tmp_path: Path) -> None:
    found = [notes(write(tmp_path / layout)) for layout, write in LAYOUTS.items() if layout != "pickles"]
    assert all(item == found[0] for item in found)
    files = sorted(f"{name}/{file_name(name, i)}" for name in CLASSES["val"] for i in range(PER_CLASS))
    assert found[0]["files"]["validation"] == hashlib.sha256("\n".join(files).encode()).hexdigest()


def test_check_says_whether_lists_and_images_are_the_known_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = write_archives(tmp_path / "mini")
    known = notes(root)
    splits = miniimagenet(directory=str(root))

    def said() -> str:
        return "\n".join(str(finding) for finding in check(splits))

    assert "note the 3 train classes are Ravi and Larochelle's but for " in said()
    assert "note the train files are not those of their csv list" in said()
    assert "note another copy of the images" in said()
    assert f"28 files ({known['images'][:16]} instead of " in said()
    lists = {PARTS[part]: names for part, names in CLASSES.items()}
    monkeypatch.setattr(module, "published", lambda _: lists)
    monkeypatch.setattr(module, "FILE_LISTS", known["files"])
    monkeypatch.setattr(module, "OUR_COPY", known["images"])
    assert "ok   the 3 train classes are Ravi and Larochelle's\n" in said()
    assert "ok   the train files are those of their csv list" in said()
    assert "ok   the 28 images are the copy with which this project's results were measured" in said()


def test_another_picture_in_one_file_makes_another_copy(tmp_path: Path) -> None:
    before = notes(write_folders(tmp_path / "mini"))
    Image.fromarray(image("n09", 0)).save(tmp_path / "mini" / "test" / "n04" / file_name("n04", 0))
    after = notes(tmp_path / "mini")
    assert after["files"] == before["files"]
    assert after["images"] != before["images"]


def test_of_pickles_the_copy_cannot_be_told(tmp_path: Path) -> None:
    splits = miniimagenet(directory=str(write_pickles(tmp_path / "mini")))
    assert any("cannot be said which copy" in finding.text for finding in check(splits))


@pytest.mark.timeout(30)
@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout != "folders"])
def test_pipes_are_refused_in_every_layout(layout: str, tmp_path: Path) -> None:
    root = LAYOUTS[layout](tmp_path / "mini")
    path = min(path for path in root.iterdir() if path.is_file())
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(DataError, match=rf"{path.name}: cannot be read \(it is a named pipe"):
        miniimagenet(directory=str(root))


def test_a_damaged_archive_is_named(tmp_path: Path) -> None:
    root = write_archives(tmp_path / "mini")
    content = bytearray((root / "val.tar.gz").read_bytes())
    content[len(content) // 2] ^= 8
    (root / "val.tar.gz").write_bytes(content)
    with pytest.raises(DataError, match=r"val\.tar\.gz: not a readable tar archive"):
        miniimagenet(directory=str(root))


def test_what_is_missing_is_explained(data_home: Path) -> None:
    with pytest.raises(DataError, match=r"miniImageNet is not in .*data/miniimagenet, and its licence .*put there"):
        miniimagenet()
