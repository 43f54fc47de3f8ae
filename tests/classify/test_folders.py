"""Folders of files: a table and a page of answers, and a clear word on everything that can be wrong with a folder."""

from __future__ import annotations

import csv
import html
import io
import os
import re
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from toy_weights import drawings, toy_weights

import metadropout as md
from metadropout.cli import main
from metadropout.data.locations import data_directory

KINDS = ["kind 0", "kind 1", "kind 2"]


def write(folder: Path, count: int, seed: int, kinds: int = 3) -> None:
    images, labels = drawings(count, kinds=kinds, seed=seed)
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        (folder / label).mkdir(parents=True, exist_ok=True)
        Image.fromarray((255 - 255 * image).astype(np.uint8)).save(folder / label / f"{number}.png")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with weights, examples and new images."""
    monkeypatch.chdir(tmp_path)
    toy_weights(tmp_path)
    write(tmp_path / "examples", 6, seed=0)
    write(tmp_path / "new", 12, seed=1)
    return tmp_path


def predict(*options: str, weights: str = "toy.safetensors") -> int:
    words = ["--support", "examples", "--query", "new", "--out", "table.csv", "--mc-samples", "2"]
    return main(["predict", weights, *words, *options])


def table() -> list[dict[str, str]]:
    return list(csv.DictReader(Path("table.csv").read_text().splitlines()))


def test_the_table_holds_what_the_estimator_says(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert predict() == 0
    files = sorted(Path("new").rglob("*.png"))
    examples = sorted(Path("examples").rglob("*.png"))
    classifier = md.FewShotClassifier("toy.safetensors", mc_samples=2).fit(examples, [p.parent.name for p in examples])
    probabilities = classifier.predict_proba(files)
    rows = table()
    assert [row["file"] for row in rows] == [str(path.relative_to("new")) for path in files]
    assert [row["class"] for row in rows] == classifier.predict(files).tolist()
    assert [float(row["probability"]) for row in rows] == pytest.approx(probabilities.max(axis=1), abs=1e-4)
    score = classifier.score(files, [path.parent.name for path in files])
    assert f"{100 * score:.2f} % of the answers" in capsys.readouterr().out


def test_shipped_weights_recognise_drawings_in_folders(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert predict(weights="omniglot-5way-1shot-maml") == 0
    assert "100.00 % of the answers" in capsys.readouterr().out


def test_accuracy_is_not_spoken_of_where_folders_are_no_classes(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("new/kind 0").rename("new/holidays")
    assert predict() == 0
    assert "of the answers" not in capsys.readouterr().out


def test_below_the_threshold_the_table_says_not_sure(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert predict("--threshold", "1") == 0
    assert {row["class"] for row in table()} == {"not sure"}
    assert "not sure of 12" in capsys.readouterr().out


def test_the_page_shows_the_five_most_and_least_certain_and_asks_for_nothing_from_outside(here: Path) -> None:
    (Path("new") / "<b>&.png").write_bytes((Path("new") / "kind 0" / "0.png").read_bytes())
    assert predict("--html", "page.html") == 0
    text = Path("page.html").read_text()
    most, least = re.findall(r"<h2>(?:Most|Least) certain</h2>(.*?)</ul>", text, re.S)
    assert most.count("<img") == least.count("<img") == 5
    rows = sorted(table(), key=lambda row: -float(row["probability"]))
    assert f'value="{rows[0]["probability"]}"' in most
    assert f'value="{rows[-1]["probability"]}"' in least
    assert "<b>" not in text
    assert "default-src 'none'" in html.unescape(text)
    assert not re.search(r"""(src|href)=["'](?!data:)""", text)


def test_pictures_on_the_page_hold_pixels_and_nothing_else(here: Path) -> None:
    polyglot = Path("new/kind 0/0.png").read_bytes() + b"<script>alert(1)</script>PK\x03\x04"
    Path("new/kind 0/0.png").write_bytes(polyglot)
    for path in Path("new").rglob("*.png"):
        if path.name not in ("0.png", "1.png"):
            path.unlink()
    assert predict("--html", "page.html") == 0
    assert len(table()) == 2
    assert "script" not in Path("page.html").read_text()


def test_a_file_that_is_an_archive_under_an_images_name_is_left_out(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with zipfile.ZipFile("new/kind 0/0.png", "w") as archive:
        archive.writestr("evil.py", "raise SystemExit")
    assert predict() == 0
    assert "left out, 1 image that cannot be read: kind 0/0.png (not an image" in capsys.readouterr().err
    assert len(table()) == 11


def test_unreadable_images_are_named_and_skipped(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("new/kind 0/0.png").write_bytes(b"")
    Path("new/kind 1/1.png").write_bytes(Path("new/kind 1/1.png").read_bytes()[:60])
    huge = io.BytesIO()
    Image.new("1", (30_000, 30_000)).save(huge, "PNG")
    Path("new/huge.png").write_bytes(huge.getvalue())
    Path("examples/kind 0/0.png").write_bytes(b"nothing")
    assert predict() == 0
    errors = capsys.readouterr().err
    assert "examples: left out, 1 image that cannot be read: kind 0/0.png" in errors
    assert "new: left out, 3 images that cannot be read: huge.png (more than the 50000000 pixels allowed)" in errors
    assert len(table()) == 10


def test_a_named_pipe_among_the_images_does_not_stop_it(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo("new/pipe.png")
    assert predict() == 0
    assert "pipe.png" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["rm examples/*/*"], "examples: no images in it; put the examples of each class into a folder of its own"),
        (["rm -r examples"], "examples: there is no such folder"),
        (["mv 'examples/kind 0/0.png' examples"], "lies outside of any class folder"),
        (["rm -r 'examples/kind 0' 'examples/kind 1'"], "examples: has one class only, 'kind 2'"),
        (["cp 'examples/kind 0/0.png' 'examples/kind 1/x.png'"], "are the same image in two classes"),
        (["cp toy.safetensors 'examples/kind 0/0.png'", "cp toy.safetensors 'examples/kind 0/3.png'"], "kind 0"),
        (["rm -r new/*"], "new: there are no images in it"),
        (["rm -r new"], "new: there is no such folder"),
        (["rm -r new/*", "echo > new/a.png"], "new: none of its images can be read: a.png"),
        (["rm toy.safetensors"], "toy.safetensors: there is no such file"),
        (["echo > toy.safetensors"], "is damaged or not a file of weights"),
    ],
)
def test_what_cannot_be_answered_is_said_in_a_line(
    here: Path, capsys: pytest.CaptureFixture[str], change: list[str], message: str
) -> None:
    for command in change:
        assert os.system(command) == 0
    assert predict() == 1
    error = capsys.readouterr().err.strip()
    assert message in error
    assert error.startswith("metadropout: error:")
    assert not Path("table.csv").exists()


def test_an_image_that_is_an_example_too_is_named(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("new/again.png").write_bytes(Path("examples/kind 0/0.png").read_bytes())
    assert predict() == 0
    assert "new: 1 image is an example, too" in capsys.readouterr().err


def test_many_images_are_answered_a_few_at_a_time(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = []
    whole = md.FewShotClassifier.proba_of_prepared

    def watched(self: md.FewShotClassifier, x: object) -> object:
        sizes.append(len(x))  # type: ignore[arg-type]
        return whole(self, x)  # type: ignore[arg-type]

    monkeypatch.setattr(md.FewShotClassifier, "proba_of_prepared", watched)
    content = Path("new/kind 0/0.png").read_bytes()
    Path("many").mkdir()
    for number in range(1001):
        Path(f"many/{number:05}.png").write_bytes(content)
    assert predict("--query", "many") == 0
    assert max(sizes) <= 64
    assert len(table()) == sum(sizes) == 1001
    assert predict("--query", "many", "--transductive") == 1
    assert "too many to be normalised together" in capsys.readouterr().err


def test_the_adapted_model_is_saved_where_asked(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert predict("--save-model", "model.pt2") == 0
    assert Path("model.pt2").stat().st_size > 10_000
    assert predict("--save-model", "model.pkl") == 1
    assert "ends in .onnx or .pt2" in capsys.readouterr().err
    assert predict("--save-model", "model.pt2", "--transductive") == 1


def test_archives_are_read_like_folders(here: Path) -> None:
    assert predict() == 0
    wanted = table()
    for name in ("examples", "new"):
        with zipfile.ZipFile(f"{name}.zip", "w") as archive:
            for path in sorted(Path(name).rglob("*.png")):
                archive.write(path, path.relative_to(name))
    assert predict("--support", "examples.zip", "--query", "new.zip") == 0
    assert table() == wanted


@pytest.mark.skipif(
    not (data_directory() / "omniglot" / "images_evaluation.zip").exists()
    or not (data_directory() / "cifar100.zip").exists(),
    reason="needs Omniglot and CIFAR-100 in METADROPOUT_DATA",
)
@pytest.mark.parametrize("name", ["omniglot-5way-1shot-maml", "cifar-fs-5way-1shot-maml"])
def test_on_published_files_predict_is_as_accurate_as_evaluate(name: str) -> None:
    from metadropout.bench.folders import measure  # noqa: PLC0415 - needs the data sets

    found, wanted = measure(md.load_weights(name), tasks=8, way=5)
    # The same tasks, pixels and rows: only classes are in another order, by name, and so are their rows.
    assert abs(found.mean - wanted.mean) < 3 * max(0.03, wanted.interval)
