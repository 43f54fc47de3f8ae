import io
import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from metadropout.data.episodes import EpisodeSampler
from metadropout.data.folder import folder
from metadropout.data.images import Splits
from metadropout.data.inspection import check
from metadropout.errors import DataError

Write = Callable[..., Path]
CLASSES = {f"class{i}": 2 + i for i in range(10)}
HALVES: dict[str, Any] = {"validation_share": 0, "test_share": 0.5}


def sizes(splits: Splits) -> dict[str, int]:
    parts = [part for part in (splits.train, splits.validation, splits.test) if part is not None]
    return {name: size for part in parts for name, size in zip(part.class_names, part.class_sizes, strict=True)}


def test_classes_of_unequal_size_are_shared_out(tmp_path: Path, write_classes: Write) -> None:
    root = write_classes(tmp_path / "mine", CLASSES)
    splits = folder(directory=str(root), image_size=8, validation_share=0.2, test_share=0.3)
    assert splits.validation is not None
    assert [len(part) for part in (splits.train, splits.validation, splits.test)] == [5, 2, 3]
    assert sizes(splits) == CLASSES


def test_the_split_is_the_same_each_time_and_follows_its_seed(tmp_path: Path, write_classes: Write) -> None:
    root = str(write_classes(tmp_path / "mine", CLASSES))
    tests = [folder(directory=root, image_size=8, split_seed=seed).test.class_names for seed in (0, 0, 1)]
    assert tests[0] == tests[1] != tests[2]


def test_lists_of_classes_decide(tmp_path: Path, write_classes: Write) -> None:
    root = str(write_classes(tmp_path / "mine", CLASSES))
    splits = folder(directory=root, image_size=8, train_classes=["class3", "class1"], test_classes=["class7"])
    assert list(splits.train.class_names) == ["class3", "class1"]
    assert (splits.validation, list(splits.test.class_names)) == (None, ["class7"])
    with pytest.raises(DataError, match="'class7' would be in more than one split"):
        folder(directory=root, image_size=8, train_classes=["class7"], test_classes=["class7"])
    with pytest.raises(DataError, match="no class 'cat'"):
        folder(directory=root, image_size=8, train_classes=["cat"], test_classes=["class7"])
    with pytest.raises(DataError, match="lists of classes need test_classes"):
        folder(directory=root, image_size=8, train_classes=["class1"])


@pytest.mark.parametrize("validation", ["val", "valid", "validation"])
def test_folders_named_after_splits_are_the_splits(validation: str, tmp_path: Path, write_classes: Write) -> None:
    root = tmp_path / "mine"
    for part, names in (("train", "abc"), (validation, "d"), ("test", "ef")):
        write_classes(root / part, dict.fromkeys(names, 3))
    splits = folder(directory=str(root), image_size=8)
    assert splits.validation is not None
    assert [list(part.class_names) for part in (splits.train, splits.validation, splits.test)] == [
        ["a", "b", "c"],
        ["d"],
        ["e", "f"],
    ]


def test_the_same_class_in_train_and_test_is_refused(tmp_path: Path, write_classes: Write) -> None:
    for part in ("train", "test"):
        write_classes(tmp_path / "mine" / part, {"cat": 2, "dog": 2})
    with pytest.raises(DataError, match="'cat', 'dog' would be in more than one split"):
        folder(directory=str(tmp_path / "mine"))


def test_a_class_may_be_called_train(tmp_path: Path, write_classes: Write) -> None:
    root = write_classes(tmp_path / "mine", {"train": 2, "test": 2, "bus": 2, "tram": 2})
    splits = folder(directory=str(root), image_size=8, validation_share=0, test_share=0.5)
    assert sorted([*splits.train.class_names, *splits.test.class_names]) == ["bus", "test", "train", "tram"]


def test_images_deeper_down_belong_to_their_class(tmp_path: Path, write_classes: Write) -> None:
    root = write_classes(tmp_path / "mine", {"a/images": 2, "a/more": 3, "b/images": 2})
    splits = folder(directory=str(root), image_size=8, validation_share=0, test_share=0.5)
    assert {*zip(splits.train.class_names, splits.train.class_sizes, strict=True)} | {
        *zip(splits.test.class_names, splits.test.class_sizes, strict=True)
    } == {("a", 5), ("b", 2)}


def test_mixed_formats_sizes_and_colours_become_one_shape(tmp_path: Path, png: Callable[..., bytes]) -> None:
    for i, (format, size, mode) in enumerate(
        [("PNG", (30, 20), "L"), ("JPEG", (9, 40), "RGB"), ("BMP", (8, 8), "RGB"), ("GIF", (50, 50), "P")]
    ):
        for name in ("a", "b"):
            (tmp_path / "mine" / name).mkdir(parents=True, exist_ok=True)
            (tmp_path / "mine" / name / f"{i}.{format.upper()}").write_bytes(png(i, size, mode, format))
    (tmp_path / "mine" / "a" / "notes.txt").write_text("not an image")
    for name in ("a", "b"):
        for path in (tmp_path / "mine" / name).iterdir():
            path.rename(path.with_suffix({".JPEG": ".JPG"}.get(path.suffix, path.suffix)))
    for channels in (1, 3):
        splits = folder(
            directory=str(tmp_path / "mine"), image_size=12, channels=channels, validation_share=0, test_share=0.5
        )
        assert splits.train.image_shape == (channels, 12, 12)
        assert splits.train.class_sizes.tolist() == [4]


def test_exif_rotation_is_applied(tmp_path: Path) -> None:
    pixels = np.zeros((8, 8), dtype=np.uint8)
    pixels[:4] = 255
    exif = Image.Exif()
    exif[0x0112] = 3  # held upside down
    content = io.BytesIO()
    Image.fromarray(pixels).save(content, "PNG", exif=exif)
    for name in ("a", "b"):
        (tmp_path / "mine" / name).mkdir(parents=True)
        (tmp_path / "mine" / name / "1.png").write_bytes(content.getvalue())
    splits = folder(directory=str(tmp_path / "mine"), image_size=8, channels=1, validation_share=0, test_share=0.5)
    assert np.array_equal(splits.train.gather(np.array([0]), np.array([0]))[0, 0], pixels[::-1])


def test_a_zip_of_the_folder_does_as_well(tmp_path: Path, write_classes: Write) -> None:
    root = write_classes(tmp_path / "mine", CLASSES)
    with zipfile.ZipFile(tmp_path / "mine.zip", "w") as archive:
        for path in root.rglob("*.png"):
            archive.write(path, path.relative_to(tmp_path))
    one, other = (folder(directory=str(path), image_size=8).train for path in (root, tmp_path / "mine.zip"))
    assert one.checksum() == other.checksum()


def test_other_settings_have_a_cache_of_their_own(tmp_path: Path, write_classes: Write, cache_home: Path) -> None:
    root = str(write_classes(tmp_path / "mine", CLASSES))
    folder(directory=root, image_size=8)
    folder(directory=root, image_size=9)
    folder(directory=root, image_size=8)
    assert len(list(cache_home.glob("*.u8"))) == 2


def test_an_added_image_is_seen(tmp_path: Path, write_classes: Write, png: Callable[..., bytes]) -> None:
    root = write_classes(tmp_path / "mine", {"a": 2, "b": 2})
    options = {"directory": str(root), "image_size": 8, "validation_share": 0, "test_share": 0.5}
    folder(**options)  # type: ignore[arg-type]
    for name in ("a", "b"):
        (root / name / "new.png").write_bytes(png(77))
    assert folder(**options).train.class_sizes.tolist() == [3]  # type: ignore[arg-type]


def test_a_class_with_too_few_images_is_named(tmp_path: Path, write_classes: Write) -> None:
    root = write_classes(tmp_path / "mine", {f"class{i}": 6 for i in range(8)} | {"tiny": 2})
    train_classes = [f"class{i}" for i in range(6)] + ["tiny"]
    splits = folder(directory=str(root), image_size=8, train_classes=train_classes, test_classes=["class6", "class7"])
    with pytest.raises(DataError, match=r"1 support \+ 3 query images are more than the 2 images of class 'tiny'"):
        EpisodeSampler(splits.train, way=2, shot=1, query=3, seed=0)


def test_a_corrupt_image_among_good_ones_is_named(tmp_path: Path, write_classes: Write, cache_home: Path) -> None:
    root = write_classes(tmp_path / "mine", CLASSES)
    bad = root / "class3" / "0001.png"
    os.truncate(bad, 40)
    with pytest.raises(DataError, match=r"mine: 1 of the images cannot be read: class3/0001\.png \(.*\); replace or"):
        folder(directory=str(root), image_size=8)
    assert not list(cache_home.glob("*.json"))
    bad.unlink()
    folder(directory=str(root), image_size=8)


def test_unreadable_images_are_left_out_where_wanted(
    tmp_path: Path, write_classes: Write, caplog: pytest.LogCaptureFixture
) -> None:
    root = write_classes(tmp_path / "mine", {"a": 4, "b": 4, "c": 1})
    os.truncate(root / "a" / "0001.png", 40)
    os.truncate(root / "c" / "0000.png", 40)
    os.mkfifo(root / "b" / "pipe.png")
    with pytest.raises(DataError, match=r"3 of the images .*or leave them out with --data\.skip_unreadable true"):
        folder(directory=str(root), image_size=8, **HALVES)
    splits = folder(directory=str(root), image_size=8, skip_unreadable=True, **HALVES)
    assert sizes(splits) == {"a": 3, "b": 4}
    assert "mine: left out, 3 images that cannot be read: a/0001.png (" in caplog.text
    assert "b/pipe.png (it is a named pipe, not a regular file)" in caplog.text
    assert "none of their images can be read: classes 'c'" in caplog.text


@pytest.mark.timeout(60)
def test_pipes_devices_and_endless_files_are_named_and_not_read(tmp_path: Path, write_classes: Write) -> None:
    root = write_classes(tmp_path / "mine", CLASSES)
    os.mkfifo(root / "class0" / "pipe.png")
    (root / "class1" / "zero.png").symlink_to("/dev/zero")
    with (root / "class2" / "huge.png").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(
        DataError,
        match=r"3 of the images .*pipe\.png \(it is a named.*zero\.png \(it is a device.*huge\.png \(it has more",
    ):
        folder(directory=str(root), image_size=8)


def test_classes_with_too_few_images_are_left_out_where_wanted(
    tmp_path: Path, write_classes: Write, caplog: pytest.LogCaptureFixture
) -> None:
    root = write_classes(tmp_path / "mine", {**{f"class{i}": 6 for i in range(8)}, "tiny": 2, "small": 3})
    for lists in ({}, {"train_classes": ["tiny", "class1", "class2"], "test_classes": ["small", "class4"]}):
        caplog.clear()
        splits = folder(directory=str(root), image_size=8, min_images=4, **lists)  # type: ignore[arg-type]
        assert set(sizes(splits).values()) == {6}
        assert caplog.messages == [f"{root}: left out, 2 classes with fewer than 4 images: 'small' (3), 'tiny' (2)"]
    EpisodeSampler(splits.train, way=2, shot=1, query=5, seed=0)


def test_files_of_other_types_and_empty_classes_are_mentioned(
    tmp_path: Path, write_classes: Write, caplog: pytest.LogCaptureFixture
) -> None:
    root = write_classes(tmp_path / "mine", {"a": 3, "b": 3})
    (root / "a" / "1.heic").write_bytes(b"x")
    (root / "notes.txt").write_bytes(b"x")
    (root / "b" / "more").mkdir()
    (root / "empty").mkdir()
    (root / "only heic").mkdir()
    (root / "only heic" / "2.heic").write_bytes(b"x")
    left_out = [
        "3 files of other types than PNG, JPEG, BMP, GIF, WEBP, TIFF, PPM: a/1.heic, notes.txt, only heic/2.heic",
        "2 class folders without images: 'empty', 'only heic'",
    ]
    splits = folder(directory=str(root), image_size=8, **HALVES)
    assert caplog.messages == [f"{root}: left out: {text}" for text in left_out]
    findings = check(splits)
    assert [finding.text for finding in findings if not finding.in_order] == [f"left out: {text}" for text in left_out]


def test_empty_classes_of_splits_are_mentioned(
    tmp_path: Path, write_classes: Write, caplog: pytest.LogCaptureFixture
) -> None:
    for part, names in (("train", "abc"), ("test", "ef")):
        write_classes(tmp_path / "mine" / part, dict.fromkeys(names, 3))
    (tmp_path / "mine" / "train" / "nothing").mkdir()
    with zipfile.ZipFile(tmp_path / "mine.zip", "w") as archive:
        for path in (tmp_path / "mine").rglob("*"):
            archive.write(path, path.relative_to(tmp_path))
    for place, name in (("mine", "train/nothing"), ("mine.zip", "mine/train/nothing")):
        caplog.clear()
        folder(directory=str(tmp_path / place), image_size=8)
        assert caplog.messages == [f"{tmp_path / place}: left out: 1 class folder without images: '{name}'"]


@pytest.mark.parametrize("packed", [False, True])
def test_a_folder_can_be_for_testing_only(packed: bool, tmp_path: Path, write_classes: Write) -> None:
    root = write_classes(tmp_path / "mine" / "test", {"a": 3, "b": 3}).parent
    if packed:
        root = Path(shutil.make_archive(str(root), "gztar", tmp_path, "mine"))
    splits = folder(directory=str(root), image_size=8)
    assert (len(splits.train), splits.validation, list(splits.test.class_names)) == (0, None, ["a", "b"])
    assert splits.train.image_shape == (3, 8, 8)
    EpisodeSampler(splits.test, way=2, shot=1, query=1, seed=0)
    with pytest.raises(DataError, match="there are no classes here to draw episodes from"):
        EpisodeSampler(splits.train, way=2, shot=1, query=1, seed=0)


def test_classes_that_lie_flat_can_be_for_testing_only(tmp_path: Path, write_classes: Write) -> None:
    root = str(write_classes(tmp_path / "mine", CLASSES))
    for options in ({"validation_share": 0, "test_share": 1}, {"test_classes": sorted(CLASSES)}):
        splits = folder(directory=root, image_size=8, **options)  # type: ignore[arg-type]
        assert (len(splits.train), splits.validation, sorted(splits.test.class_names)) == (0, None, sorted(CLASSES))


def test_a_class_added_later_leaves_frozen_classes_as_they_were(tmp_path: Path, write_classes: Write) -> None:
    root = write_classes(tmp_path / "mine", CLASSES)
    before = folder(directory=str(root), image_size=8).identity
    write_classes(root, {"new": 4})
    now = folder(directory=str(root), image_size=8).identity
    assert before.changes(now)
    frozen = {f"{part}_classes": names for part, names in before.classes.items()}
    assert folder(directory=str(root), image_size=8, **frozen).identity == before  # type: ignore[arg-type]


def test_a_copy_elsewhere_is_the_same_data(tmp_path: Path, write_classes: Write) -> None:
    root = write_classes(tmp_path / "mine", CLASSES)
    shutil.copytree(root, tmp_path / "copy")
    one, other = (folder(directory=str(tmp_path / name), image_size=8).identity for name in ("mine", "copy"))
    assert one == other
    assert one.changes(other) == []
    (tmp_path / "copy" / "class3" / "0000.png").write_bytes((root / "class4" / "0000.png").read_bytes())
    changed = folder(directory=str(tmp_path / "copy"), image_size=8).identity
    assert one.changes(changed) == ["the classes are the same, but their images are not"]


def test_a_name_that_is_not_utf8_is_refused(tmp_path: Path, write_classes: Write) -> None:
    root = write_classes(tmp_path / "mine", CLASSES)
    os.rename(root / "class3", os.fsencode(root) + b"/caf\xe9")
    with pytest.raises(DataError, match=r"the name 'caf\\udce9' is not UTF-8; rename the folder"):
        folder(directory=str(root), image_size=8)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([], "no images in it"),
        (["a/readme.txt"], "no images in it"),
        (["1.png", "a/1.png"], r"'1\.png' lies outside of any class folder"),
        (["train/a/1.png", "test/b/1.png", "extra/c/1.png"], "neither in train, nor val, nor test"),
    ],
)
def test_layouts_that_make_no_sense_are_explained(
    files: list[str], message: str, tmp_path: Path, png: Callable[..., bytes]
) -> None:
    root = tmp_path / "mine"
    root.mkdir()
    for name in files:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(png(0))
    with pytest.raises(DataError, match=message):
        folder(directory=str(root))


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"there is no folder .*nowhere"):
        folder(directory=str(tmp_path / "nowhere"))
    with pytest.raises(DataError, match="which folder"):
        folder()
