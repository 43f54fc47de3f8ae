import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from metadropout.data import cache, open_dataset
from metadropout.data.images import ClassSubset, Splits
from metadropout.data.inspection import check, prepared_of, state_of
from metadropout.errors import DataError

Write = Callable[..., Path]


@pytest.fixture
def root(tmp_path: Path, write_classes: Write) -> Path:
    return write_classes(tmp_path / "mine", {f"class{i}": 4 for i in range(6)})


def mine(root: Path) -> Splits:
    return open_dataset("folder", directory=str(root), image_size=8, validation_share=0, test_share=0.5)


def texts(splits: Splits) -> list[str]:
    return [finding.text for finding in check(splits)]


def test_what_is_in_order_is_listed(root: Path) -> None:
    found = texts(mine(root))
    assert found[:3] == [
        "train: 3 classes, 12 images, 4 to 4 images each",
        "test: 3 classes, 12 images, 4 to 4 images each",
        "no class is in two splits",
    ]
    assert "have the checksum of the manifest" in found[3]
    assert "is what was prepared" in found[4]
    assert found[5:] == ["no image is in two splits"]


def test_a_source_that_is_gone_does_not_matter(root: Path) -> None:
    splits = mine(root)
    root.rename(root.with_name("away"))
    assert "is gone; the prepared set does without it" in texts(splits)[-2]


def test_a_source_whose_name_no_file_can_have_does_not_matter(root: Path) -> None:
    splits = mine(root)
    prepared = prepared_of(splits.train)
    assert prepared is not None
    prepared.manifest["source"]["inputs"][0]["path"] = 5000 * "x"
    assert "is gone; the prepared set does without it" in texts(splits)[-2]


def test_a_source_that_has_changed_is_found(root: Path) -> None:
    splits = mine(root)
    os.truncate(root / "class0" / "0000.png", 10)
    with pytest.raises(DataError, match=r"mine is not what .*json was prepared from; prepare again with --force"):
        check(splits)


def test_a_flipped_bit_is_found(root: Path) -> None:
    splits = mine(root)
    prepared = prepared_of(splits.train)
    assert prepared is not None
    content = bytearray(prepared.pixel_path.read_bytes())
    content[100] ^= 1
    prepared.pixel_path.write_bytes(content)
    with pytest.raises(DataError, match="its bytes have changed"):
        check(splits)


def test_a_class_in_two_splits_is_found(root: Path) -> None:
    splits = mine(root)
    with pytest.raises(DataError, match="in two splits"):
        check(Splits(splits.train, None, ClassSubset(splits.train, np.array([0]))))


def test_an_image_in_two_splits_is_reported(root: Path) -> None:
    splits = mine(root)
    one, other = splits.train.class_names[1], splits.test.class_names[0]
    shutil.copy(root / one / "0002.png", root / other / "0003.png")
    *_, finding = check(mine(root))
    assert finding == (
        False,
        f"1 image is in two splits (class and number from 0): train '{one}' 2 = test '{other}' 3",
    )
    assert str(finding).startswith("note 1 image")


def test_a_data_set_for_testing_only_can_be_checked(root: Path) -> None:
    splits = open_dataset("folder", directory=str(root), image_size=8, validation_share=0, test_share=1)
    assert texts(splits)[0] == "test: 6 classes, 24 images, 4 to 4 images each"


def test_a_class_with_a_single_image_is_found(tmp_path: Path, write_classes: Write) -> None:
    root = write_classes(tmp_path / "mine", {"a": 4, "b": 1})
    with pytest.raises(DataError, match="class 'b' has 1 image, too few"):
        check(mine(root))


def test_a_forged_manifest_with_a_number_beyond_all_files_is_no_prepared_set(root: Path) -> None:
    prepared = prepared_of(mine(root).train)
    assert prepared is not None
    content = json.loads(prepared.manifest_path.read_text())
    content["pixels"]["bytes"] = 10**400
    del content["sha256"]
    prepared.manifest_path.write_text(json.dumps({**content, "sha256": cache._checksum(content)}))
    assert state_of("folder").summary == "yours"


def test_the_state_of_every_data_set_is_known(root: Path, data_home: Path) -> None:
    assert state_of("glyphs").summary == "built in"
    assert state_of("omniglot").summary == "downloaded when needed"
    assert state_of("fc100").summary == "not here"
    assert state_of("folder").summary == "yours"
    mine(root)
    assert state_of("folder").summary == "prepared"
    (data_home / "cifar100.zip").write_bytes(b"")
    assert state_of("fc100") == ("found", str(data_home / "cifar100.zip"))
    (data_home / "train.csv").write_text("")
    assert state_of("miniimagenet").summary == "incomplete"
