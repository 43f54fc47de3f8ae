import io
import pickle
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from metadropout.data.cifar import cifar_fs, fc100
from metadropout.data.class_lists import published
from metadropout.data.images import ImageSet, UInt8Array
from metadropout.errors import DataError

NAMES = sorted(name for part in published("cifar_fs").values() for name in part)
TRAIN, TEST = 2, 1  # images of each class in the two files of the published archive


def batches() -> dict[str, Any]:
    rng = np.random.default_rng(0)

    def batch(per_class: int) -> dict[str, Any]:
        labels = rng.permutation(np.repeat(np.arange(100), per_class)).tolist()
        return {"data": rng.integers(0, 256, (len(labels), 3072), dtype=np.uint8), "fine_labels": labels}

    return {"meta": {"fine_label_names": NAMES}, "train": batch(TRAIN), "test": batch(TEST)}


def write_tar(path: Path, content: dict[str, Any]) -> None:
    with tarfile.open(path, "w:gz") as archive:
        for name, value in content.items():
            raw = pickle.dumps(value, 2)
            info = tarfile.TarInfo(f"cifar-100-python/{name}")
            info.size = len(raw)
            archive.addfile(info, io.BytesIO(raw))


def write_images(content: dict[str, Any], write: Callable[[str, bytes], object]) -> None:
    """One folder of PNGs for each class, numbered in the order of the published files."""
    count = dict.fromkeys(NAMES, 0)
    for part in ("train", "test"):
        for row, label in zip(content[part]["data"], content[part]["fine_labels"], strict=True):
            name = NAMES[label]
            png = io.BytesIO()
            Image.fromarray(row.reshape(3, 32, 32).transpose(1, 2, 0)).save(png, "PNG")
            write(f"{name}/{count[name]:05d}.png", png.getvalue())
            count[name] += 1


def pixels(images: ImageSet) -> UInt8Array:
    classes, n = len(images), TRAIN + TEST
    return images.gather(np.repeat(np.arange(classes), n), np.tile(np.arange(n), classes))


@pytest.fixture
def archive(data_home: Path) -> Path:
    write_tar(data_home / "cifar-100-python.tar.gz", batches())
    return data_home / "cifar-100-python.tar.gz"


def test_the_published_class_lists_are_the_benchmarks() -> None:
    for name, sizes in (("cifar_fs", (64, 16, 20)), ("fc100", (60, 20, 20))):
        lists = published(name)
        assert tuple(len(lists[part]) for part in ("train", "validation", "test")) == sizes
        assert len({c for part in lists.values() for c in part}) == 100


def test_both_benchmarks_open_from_one_cache(archive: Path, cache_home: Path) -> None:
    for benchmark, name in ((cifar_fs, "cifar_fs"), (fc100, "fc100")):
        splits = benchmark()
        lists = published(name)
        assert splits.validation is not None
        assert list(splits.train.class_names) == lists["train"]
        assert list(splits.validation.class_names) == lists["validation"]
        assert list(splits.test.class_names) == lists["test"]
        assert set(splits.train.class_sizes) == {TRAIN + TEST}
    assert len(list(cache_home.glob("*.u8"))) == 1


def test_every_layout_gives_identical_arrays(archive: Path, data_home: Path, tmp_path: Path) -> None:
    content = batches()
    expected = pixels(cifar_fs().test)
    row = content["train"]["fine_labels"].index(NAMES.index("whale"))
    assert np.array_equal(expected[0], content["train"]["data"][row].reshape(3, 32, 32))

    unpacked = tmp_path / "unpacked" / "cifar-100-python"
    unpacked.mkdir(parents=True)
    for name, value in content.items():
        (unpacked / name).write_bytes(pickle.dumps(value))
    zipped = tmp_path / "zipped"
    zipped.mkdir()
    with zipfile.ZipFile(zipped / "cifar100.zip", "w") as file:
        write_images(content, lambda name, png: file.writestr(f"cifar100/data/{name}", png))
    zipfile.ZipFile(zipped / "cifar100.zip").extractall(tmp_path / "folders")
    for directory in (
        unpacked.parent,
        unpacked,
        zipped,
        zipped / "cifar100.zip",
        tmp_path / "folders",
        tmp_path / "folders" / "cifar100" / "data",
    ):
        assert np.array_equal(pixels(cifar_fs(directory=str(directory)).test), expected), directory


def test_another_size_is_resized(archive: Path) -> None:
    assert cifar_fs(image_size=16).train.image_shape == (3, 16, 16)
    assert pixels(cifar_fs(image_size=16).test).mean() == pytest.approx(pixels(cifar_fs().test).mean(), abs=1)


def test_an_archive_with_another_checksum_is_used_with_a_warning(
    archive: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cifar_fs()
    assert "cifar-100-python.tar.gz is not the published archive" in caplog.text


def test_other_classes_are_refused(data_home: Path) -> None:
    content = batches()
    content["meta"] = {"fine_label_names": ["zebra", *NAMES[1:]]}
    write_tar(data_home / "cifar-100-python.tar.gz", content)
    with pytest.raises(DataError, match=r"100 classes that are not the 100 of CIFAR-100 \(missing: apple\)"):
        cifar_fs()


@pytest.mark.parametrize(
    "change",
    [
        {"train": {"data": np.zeros((3, 3072), np.uint8), "fine_labels": [0]}},
        {"train": {"data": np.zeros((1, 3072)), "fine_labels": [0]}},
        {"train": {"data": np.zeros((1, 3072), np.uint8), "fine_labels": [100]}},
        {"train": {"data": np.zeros((1, 3000), np.uint8), "fine_labels": [0]}},
        {"train": [1, 2]},
        {"meta": {}},
        {"meta": np.zeros(3)},
    ],
    ids=["labels", "type", "range", "shape", "list", "names", "array"],
)
def test_contents_that_do_not_fit_are_refused(change: dict[str, Any], data_home: Path, cache_home: Path) -> None:
    write_tar(data_home / "cifar-100-python.tar.gz", {**batches(), **change})
    with pytest.raises(DataError, match="not CIFAR-100 as published"):
        cifar_fs()
    assert not list(cache_home.glob("*.json"))


def test_a_missing_archive_is_explained(data_home: Path) -> None:
    with pytest.raises(DataError, match=r"CIFAR-100 is not in .*data: download https://.*tar\.gz and put it there"):
        fc100()
