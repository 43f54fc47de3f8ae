import hashlib
import io
import logging
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from metadropout.data import omniglot as module
from metadropout.data.images import ImageSet, UInt8Array
from metadropout.data.omniglot import PublishedArchive, omniglot
from metadropout.errors import DataError

COUNTS = {"images_background": 5, "images_evaluation": 3}


def drawing(seed: int, size: int = 105) -> bytes:
    """A black line on white, in one bit, as published."""
    pixels = np.ones((size, size), dtype=np.uint8) * 255
    rng = np.random.default_rng(seed)
    row, column = rng.integers(10, 60, 2)
    pixels[row : row + 6, column : column + 40] = 0
    content = io.BytesIO()
    Image.fromarray(pixels).convert("1").save(content, "PNG")
    return content.getvalue()


@pytest.fixture
def small(data_home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Omniglot with 5 + 3 characters, in two archives with the checksums that are expected."""
    folder = data_home / "omniglot"
    folder.mkdir()
    parts = []
    for offset, (name, count) in enumerate(COUNTS.items()):
        path = folder / f"{name}.zip"
        with zipfile.ZipFile(path, "w") as archive:
            for character in range(count):
                for drawer in range(1, 21):
                    file = (
                        f"{name}/Alphabet{character // 2}/character{character % 2:02d}/{character:04d}_{drawer:02d}.png"
                    )
                    archive.writestr(file, drawing(10_000 * offset + 100 * character + drawer))
        parts.append(PublishedArchive(name, count, hashlib.md5(path.read_bytes()).hexdigest()))
    monkeypatch.setattr(module, "PARTS", tuple(parts))
    monkeypatch.setattr(module, "TRAIN_CHARACTERS", 6)
    monkeypatch.setattr(module, "URL", "http://127.0.0.1:9/{name}.zip")  # nothing answers there
    return folder


def characters(images: ImageSet) -> set[str]:
    return {name.rsplit("/", 1)[0] for name in images.class_names}


def image(images: ImageSet, name: str) -> UInt8Array:
    return images.gather(np.array([list(images.class_names).index(name)]), np.array([0]))[0, 0]


def test_every_character_gives_four_classes_in_one_split(small: Path) -> None:
    splits = omniglot()
    assert (len(splits.train), splits.validation, len(splits.test)) == (24, None, 8)
    assert set(splits.train.class_sizes) == {20}
    assert characters(splits.train).isdisjoint(characters(splits.test))
    assert len(characters(splits.train)) == 6


def test_the_four_classes_are_quarter_turns(small: Path) -> None:
    train = omniglot().train
    upright = image(train, train.class_names[0])
    for turn, name in enumerate(train.class_names[:4]):
        assert np.array_equal(image(train, name), np.rot90(upright, turn))
    assert not np.array_equal(upright, np.rot90(upright, 2))


def test_ink_is_255_and_paper_0_by_lanczos(small: Path) -> None:
    train = omniglot(split="original").train
    pixels = image(train, "images_background/Alphabet0/character00/rot000")
    published = Image.open(io.BytesIO(drawing(1))).convert("L")
    expected = 255 - np.asarray(published.resize((28, 28), Image.Resampling.LANCZOS)).astype(int)
    assert np.abs(pixels.astype(int) - expected).max() <= 1
    assert (pixels.max(), pixels.min()) == (255, 0)
    assert len(np.unique(pixels)) > 2  # not binarised


def test_the_original_split_keeps_the_archives_apart(small: Path) -> None:
    splits = omniglot(split="original")
    assert {name.split("/")[0] for name in splits.train.class_names} == {"images_background"}
    assert {name.split("/")[0] for name in splits.test.class_names} == {"images_evaluation"}


@pytest.mark.parametrize("split", ["random", "original"])
def test_validation_characters_come_from_the_training_characters(split: Any, small: Path) -> None:
    without, splits = omniglot(split=split), omniglot(split=split, validation_characters=2)
    assert splits.validation is not None
    assert len(splits.validation) == 8
    assert characters(splits.train).isdisjoint(characters(splits.validation))
    assert characters(splits.train) | characters(splits.validation) == characters(without.train)
    assert splits.test.class_names == without.test.class_names


def test_the_split_depends_on_its_seed_alone(small: Path) -> None:
    assert omniglot(split_seed=1).test.class_names == omniglot(split_seed=1).test.class_names
    assert omniglot(split_seed=1).test.class_names != omniglot(split_seed=2).test.class_names


@pytest.mark.parametrize("value", [-1, 6])
def test_impossible_numbers_of_validation_characters_are_refused(value: int, small: Path) -> None:
    with pytest.raises(DataError, match=f"validation_characters is {value}; it has to be between 0 and 5"):
        omniglot(validation_characters=value)


def test_an_unknown_split_is_refused(small: Path) -> None:
    with pytest.raises(DataError, match="no split 'mine'; choose 'random' or 'original'"):
        omniglot(split="mine")  # type: ignore[arg-type]


@pytest.mark.parametrize("layout", ["top", "unpacked", "unpacked-top", "torchvision"])
def test_archives_and_folders_are_found_where_people_have_them(layout: str, small: Path, data_home: Path) -> None:
    expected = omniglot().train.checksum()
    for name in COUNTS:
        archive = small / f"{name}.zip"
        target = {"unpacked": small, "torchvision": data_home / "omniglot-py"}.get(layout, data_home)
        if layout.startswith("unpacked"):
            zipfile.ZipFile(archive).extractall(target)
            archive.unlink()
        else:
            target.mkdir(exist_ok=True)
            shutil.move(archive, target)
    assert omniglot().train.checksum() == expected


def test_another_directory_can_be_named(small: Path, tmp_path: Path) -> None:
    moved = small.rename(tmp_path / "downloads")
    assert len(omniglot(directory=str(moved)).train) == 24
    assert len(omniglot().train) == 24  # it is prepared now


def test_an_archive_with_another_checksum_is_used_with_a_warning(
    small: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with caplog.at_level(logging.WARNING):
        omniglot()
        assert caplog.messages == []
        monkeypatch.setattr(module, "PARTS", tuple(part._replace(md5="0" * 32) for part in module.PARTS))
        omniglot(image_size=20)
    assert len(caplog.messages) == 2
    assert "images_background.zip is not the published archive" in caplog.messages[0]


def rewrite(path: Path, change: Callable[[str, bytes], tuple[str, bytes] | None]) -> None:
    with zipfile.ZipFile(path) as archive:
        members = [change(name, archive.read(name)) for name in archive.namelist()]
    with zipfile.ZipFile(path, "w") as archive:
        for member in members:
            if member:
                archive.writestr(*member)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda n, c: None if "Alphabet2" in n else (n, c), r"background\.zip: 4 characters instead of 5"),
        (
            lambda n, c: None if n.endswith("0003_07.png") else (n, c),
            r"not 20 drawings of Alphabet1/character01 \(19\)",
        ),
        (
            lambda n, c: (n, drawing(0, 100)) if n.endswith("0003_07.png") else (n, c),
            r"0003_07\.png \(100 x 100 instead",
        ),
        (lambda n, c: (n, c[:60]) if n.endswith("0003_07.png") else (n, c), r"1 of the images.*0003_07\.png \(damaged"),
        (lambda n, c: ("../" + n, c), "leads out of its folder"),
    ],
    ids=["characters", "drawings", "size", "damaged", "escape"],
)
def test_contents_that_do_not_check_out_are_refused(change: Any, message: str, small: Path, cache_home: Path) -> None:
    rewrite(small / "images_background.zip", change)
    with pytest.raises(DataError, match=message):
        omniglot()
    assert not list(cache_home.glob("*.json"))


def test_a_missing_archive_is_downloaded(small: Path, server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = small / "images_evaluation.zip"
    server.content = path.read_bytes()
    path.unlink()
    monkeypatch.setattr(module, "URL", server.url.replace("file.zip", "{name}.zip"))
    assert len(omniglot().train) == 24
    assert path.read_bytes() == server.content
    assert len(server.ranges) == 1


def test_a_missing_data_directory_is_made_for_the_download_only(
    data_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("METADROPOUT_DATA")
    monkeypatch.setattr("metadropout.data.locations._user_cache", lambda: tmp_path / "nowhere")
    with pytest.raises(
        DataError, match=r"Omniglot is not in .*nowhere/metadropout/omniglot: put images_background\.zip and"
    ):
        omniglot(download=False)
    assert not (tmp_path / "nowhere").exists()


def test_without_a_network_the_message_says_what_to_put_where(small: Path) -> None:
    for path in small.iterdir():
        path.unlink()
    with pytest.raises(DataError, match=r"cannot be downloaded .*put it at .*omniglot/images_background\.zip"):
        omniglot()


def test_a_named_directory_without_omniglot_is_an_error_and_nothing_is_downloaded_there(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"Omniglot is not in .*empty"):
        omniglot(directory=str(tmp_path / "empty"))
    assert list((tmp_path / "empty").iterdir()) == []
