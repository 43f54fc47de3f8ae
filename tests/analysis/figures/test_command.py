"""`metadropout figures` and `reproduce figureN`: pictures from trained runs, and clear words where there are none."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

import metadropout.analysis.figures.drawing
from metadropout.analysis.figures.runs import FIGURES
from metadropout.cli import main

pytest.importorskip("sklearn")
TINY = [
    "--learner.steps", "1", "--training.meta_batch", "1", "--training.validation_episodes", "1",
    "--network.channels", "2", "--episode.query", "2",
    "--data.train_classes", "6", "--data.validation_classes", "6", "--data.test_classes", "6",
]  # fmt: skip


def train(folder: Path, row: str, *options: str) -> Path:
    arguments = ["train", f"glyphs-5way-1shot-{row}", "--out", str(folder), "--training.iterations", "2", *TINY]
    assert main([*arguments, "--training.log_every", "1", *options]) == 0
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    train(folder / "maml", "maml")
    train(folder / "metadropout", "metadropout")
    return folder


def test_all_figures_of_two_runs_are_drawn_and_described(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("metadropout.analysis.figures.runs.TASKS", 2)
    command = ["figures", str(runs / "metadropout"), "--compare", str(runs / "maml"), "--out", str(tmp_path)]
    assert main([*command, "--episodes", "1", "--decoder-iterations", "2"]) == 0
    printed = capsys.readouterr().out
    content = json.loads((tmp_path / "figures.json").read_text())
    index = content["figures"]
    assert list(index) == list(FIGURES)
    assert content["pending"] == {}
    for name, entry in index.items():
        assert all(entry[word] for word in ("title", "caption", "alt"))
        for file in entry["files"]:
            with Image.open(tmp_path / file) as picture:
                assert picture.width > 300
        assert f"{name}: {tmp_path / entry['files'][0]}" in printed
    assert index["activations"]["files"] == ["activations.png", "activations.gif"]
    assert "MAML + Meta-dropout: strength of layer 1" in index["noise"]["caption"]
    assert "left out" not in printed
    assert (tmp_path / "decoder.safetensors").exists()


def test_what_does_not_apply_to_maml_is_named_with_the_reason(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn_above = ("boundary-steps", "boundary-tasks", "accuracies")
    others = {name: kind for name, kind in FIGURES.items() if name not in drawn_above}
    monkeypatch.setattr("metadropout.cli.figures.FIGURES", others)
    assert main(["figures", str(runs / "maml"), "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "multipliers: left out: multipliers show what layers are multiplied by, and NoPerturbation" in printed
    assert "activations: left out: activations show noise on features, and NoPerturbation draws none" in printed
    assert "reconstructions: left out: reconstructions show noise on features" in printed
    assert "noise: left out: noise is drawn from what a run logs while it is trained, and MAML logged none" in printed
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["boundaries.png", "figures.json"]
    assert main(["figures", str(runs / "maml"), "--out", str(tmp_path), "--only", "activations"]) == 1
    assert "NoPerturbation draws none" in capsys.readouterr().err


def test_a_stop_leaves_the_names_of_what_is_not_drawn_and_how(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(subjects: object, options: object) -> None:
        raise KeyboardInterrupt

    kind = replace(FIGURES["accuracies"], compute=stopped)
    monkeypatch.setitem(FIGURES, "accuracies", kind)
    run, other = runs / "metadropout", runs / "maml"
    names = ["noise", "accuracies", "multipliers"]
    command = ["figures", str(run), "--compare", str(other), "--only", *names, "--out", str(tmp_path)]
    assert main([*command, "--episodes", "7", "--state", "best"]) == 130
    content = json.loads((tmp_path / "figures.json").read_text())
    assert list(content["figures"]) == ["noise"]
    asked = {"runs": [str(run), str(other)], "options": ["--episodes", "7", "--state", "best"]}
    assert content["pending"] == {"accuracies": asked, "multipliers": asked}


def test_a_damaged_index_is_refused_with_the_way_out(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "figures.json").write_text('{"noise": ')
    assert main(["figures", str(runs / "metadropout"), "--only", "noise", "--out", str(tmp_path)]) == 1
    err = capsys.readouterr().err
    assert "figures.json: is damaged: invalid JSON" in err
    assert "delete it and draw the figures again" in err


def test_mistakes_are_told(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def error(*arguments: str) -> str:
        assert main(["figures", *arguments, "--out", str(tmp_path / "out")]) == 1
        return capsys.readouterr().err

    run = str(runs / "metadropout")
    assert "there is no figure 'nonsense'; known are: boundaries, boundary-steps" in error(run, "--only", "nonsense")
    assert "is not a run's folder" in error(str(tmp_path))
    assert "--episodes is 0; it must be from 1 to 1000000" in error(run, "--episodes", "0")
    assert "--learner.steps cannot change here" in error(run, "--learner.steps", "3")
    other = train(tmp_path / "way", "maml", "--episode.way", "3")
    assert "its way is 3, not 5" in error(run, "--compare", str(other), "--only", "boundaries")
    other = train(tmp_path / "data", "maml", "--data.test_classes", "7")
    assert "cannot be compared with" in error(run, "--compare", str(other), "--only", "boundaries")
    shutil.copytree(run, tmp_path / "empty", ignore=shutil.ignore_patterns("*.safetensors"))
    assert "there is no checkpoint: they have been deleted" in error(str(tmp_path / "empty"), "--only", "noise")
    assert not (tmp_path / "out").exists()


def test_an_unfinished_run_is_drawn_and_named(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = shutil.copytree(runs / "metadropout", tmp_path / "copy")
    text = (copy / "config.yaml").read_text()
    (copy / "config.yaml").write_text(text.replace("iterations: 2\n", "iterations: 9\n"))
    assert main(["figures", str(copy), "--only", "noise"]) == 0
    assert f"{copy}: not finished; drawn as it is after 2 of 9 iterations" in capsys.readouterr().out
    assert (
        "Meta-dropout, 2 of 9 iterations"
        in json.loads((copy / "figures" / "figures.json").read_text())["figures"]["noise"]["alt"]
    )


def test_a_missing_package_is_named_with_its_extra(
    runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        metadropout.analysis.figures.drawing, "find_spec", lambda name: None if name == "sklearn" else name
    )
    assert main(["figures", str(runs / "maml"), "--only", "boundaries"]) == 1
    assert "figures need scikit-learn, which is not installed" in (err := capsys.readouterr().err)
    assert "pip install 'metadropout[figures]'" in err


def test_a_figure_of_the_paper_is_drawn_from_given_runs_or_trains_its_own(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["reproduce", "figure8", "--runs", str(runs / "metadropout"), "--out", str(tmp_path / "given")]) == 0
    assert (tmp_path / "given" / "activations.gif").exists()
    own = [
        "--settings",
        "glyphs-5way-1shot",
        "--scale",
        "0.002",
        "--episodes",
        "1",
        "--out",
        str(tmp_path / "own"),
        *TINY,
    ]
    assert main(["reproduce", "figure8", *own]) == 0
    assert (tmp_path / "own" / "glyphs-5way-1shot-metadropout-seed0" / "evaluation-test.json").exists()
    assert (tmp_path / "own" / "figure8-glyphs-5way-1shot-seed0" / "activations.png").exists()
    assert main(["reproduce", "table3", "--runs", str(runs / "maml")]) == 1
    assert "--runs is for figures" in capsys.readouterr().err


@pytest.mark.parametrize(
    "unused", ["--seeds 1", "--scale 0.5", "--episodes 5", "--jobs 2", "--rows maml", "--training.meta_lr 0.1"]
)
def test_what_says_how_to_train_is_refused_beside_trained_runs(
    unused: str, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["reproduce", "figure8", "--runs", str(runs / "maml"), *unused.split()]) == 1
    assert f"{unused.split(maxsplit=1)[0]} says what to train" in capsys.readouterr().err
