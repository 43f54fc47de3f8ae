import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from metadropout.cli import main

GLYPHS = ["--data.train_classes", "8", "--data.validation_classes", "5", "--data.test_classes", "5"]


@pytest.fixture
def root(tmp_path: Path, write_classes: Callable[..., Path]) -> Path:
    return write_classes(tmp_path / "mine", {f"class{i}": 6 for i in range(10)})


def test_list_names_every_data_set_and_both_directories(capsys: pytest.CaptureFixture[str], data_home: Path) -> None:
    assert main(["data", "list"]) == 0
    output = capsys.readouterr().out
    for name in ("cifar_fs", "fc100", "folder", "glyphs", "miniimagenet", "omniglot", str(data_home)):
        assert name in output


def test_prepare_takes_a_folder_and_options(root: Path, capsys: pytest.CaptureFixture[str], cache_home: Path) -> None:
    assert main(["data", "prepare", "folder", "--from", str(root), "--data.image_size", "8"]) == 0
    output = capsys.readouterr().out
    assert "folder: 6 training, 2 validation, 2 test classes, 60 images of 8x8x3" in output
    assert f"from {root}" in output
    assert str(cache_home) in output


def test_prepare_force_prepares_again(root: Path, cache_home: Path) -> None:
    command = ["data", "prepare", "folder", "--from", str(root), "--data.image_size", "8"]
    times = []
    for arguments in ([], [], ["--force"]):
        assert main(command + arguments) == 0
        (manifest,) = cache_home.glob("*.json")
        times.append(manifest.stat().st_mtime_ns)
    assert times[0] == times[1] < times[2]


@pytest.mark.parametrize("damage", [b"", b"{}", b"[" * 100_000, b"\xff"])
def test_prepare_force_repairs_a_damaged_set(damage: bytes, root: Path, cache_home: Path) -> None:
    command = ["folder", "--from", str(root), "--data.image_size", "8"]
    assert main(["data", "prepare", *command]) == 0
    for path in cache_home.iterdir():
        path.write_bytes(damage)
    assert main(["data", "prepare", *command, "--force"]) == 0
    assert main(["data", "check", *command]) == 0


def test_check_reports_and_fails_on_damage(root: Path, cache_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["data", "check", "folder", "--from", str(root), "--data.image_size", "8"]
    assert main(command) == 0
    assert capsys.readouterr().out.count("ok  ") == 7
    (pixels,) = cache_home.glob("*.u8")
    pixels.write_bytes(bytes(pixels.stat().st_size))
    assert main(command) == 1
    assert "its bytes have changed" in capsys.readouterr().err


def test_show_writes_a_picture_of_the_episode(tmp_path: Path) -> None:
    path = tmp_path / "picture.png"
    assert main(["data", "show", "glyphs", *GLYPHS, "--way", "3", "--query", "4", "--out", str(path)]) == 0
    pixels = np.asarray(Image.open(path).convert("L"))
    assert pixels.shape[0] > 100
    assert (pixels < 50).mean() > 0.1  # the black paper of the glyphs


@pytest.mark.parametrize("names", [["猫", "東京タワー"], ["$x$", "$\\frac{$"], ["ᶁ", "a\nb"]])
def test_show_draws_any_name(names: list[str], tmp_path: Path, write_classes: Callable[..., Path]) -> None:
    root = write_classes(tmp_path / "mine", dict.fromkeys(names, 6))
    options = ["--data.image_size", "8", "--data.validation_share", "0", "--data.test_share", "1"]
    command = ["data", "show", "folder", "--from", str(root), *options, "--split", "test", "--way", "2"]
    assert main([*command, "--out", str(tmp_path / "a.png")]) == 0  # a missing glyph would be a warning, so an error


def test_show_without_matplotlib_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    path = tmp_path / "picture.png"
    assert main(["data", "show", "glyphs", *GLYPHS, "--out", str(path)]) == 1
    assert "pip install 'metadropout[plots]'" in capsys.readouterr().err
    assert not path.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["prepare", "nothing"], "no data set 'nothing'; known are cifar_fs"),
        (["prepare", "folder"], "which folder?"),
        (["prepare", "fc100"], "CIFAR-100 is not in"),
        (["check", "miniimagenet"], "miniImageNet is not in"),
        (["show", "glyphs", "--way", "1000", *GLYPHS], "a 1000-way task needs 1000 classes"),
        (["show", "glyphs", "--out", "/nowhere/picture.png", *GLYPHS], "cannot write /nowhere/picture.png"),
        (["prepare", "glyphs", "--data.colour", "red"], "data.colour is not an option"),
        (["prepare", "glyphs", "--learner.steps", "3"], "--learner.steps is not understood"),
        (["check", "folder", "--from", "/dev/zero"], "/dev/zero: cannot be read (it is a device, not a regular file)"),
        (["prepare", "glyphs", "--from", "/somewhere"], "data.directory is not an option"),
        (["prepare", "folder", "--from", "/nowhere"], "there is no folder /nowhere"),
    ],
)
def test_mistakes_are_explained_in_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", *arguments]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
