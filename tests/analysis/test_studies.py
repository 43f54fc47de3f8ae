"""A study is trained, tested and printed from its file."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from metadropout.analysis.studies import read_study
from metadropout.cli import main
from metadropout.errors import ConfigError

STUDY = {
    "title": "A small study",
    "tables": ["table3", "table2"],
    "settings": ["glyphs-5way-1shot"],
    "rows": {"maml": [0, 1], "deterministic": [1]},
    "scale": 0.001,
    "episodes": 2,
    "options": {
        "training.meta_batch": 1,
        "training.validation_episodes": 1,
        "network.channels": 2,
        "episode.query": 1,
        "data.train_classes": 6,
        "data.validation_classes": 6,
        "data.test_classes": 6,
    },
}


def write(path: Path, **changes: object) -> Path:
    path.write_text(yaml.safe_dump({**STUDY, **changes}))
    return path


def test_a_study_trains_its_rows_with_their_seeds_and_prints_its_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    study = str(write(tmp_path / "mine" / "study.yaml"))
    assert main(["reproduce", study, "--machine.threads", "1"]) == 0
    trained = capsys.readouterr().out
    folders = {path.parent.name for path in Path("runs/mine").glob("*/evaluation-test.json")}
    assert folders == {f"glyphs-5way-1shot-{name}" for name in ("maml-seed0", "maml-seed1", "deterministic-seed1")}
    assert trained.startswith("A small study\n")
    assert trained.count("| MAML |") == 2  # in both tables
    assert trained.count("(2 seeds, std ") == 2
    assert trained.count("| MAML + deterministic Meta-dropout |") == 1
    assert main(["reproduce", study, "--show", "--out", "runs/mine"]) == 0
    tables = [line for line in trained.splitlines() if line.startswith("|")]
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")] == tables
    assert main(["reproduce", study, "--show"]) == 0  # of the study's own folder, which has no runs
    assert "| MAML | not yet |" in capsys.readouterr().out


def test_what_a_study_says_cannot_be_said_otherwise(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study = write(tmp_path / "study.yaml")
    for given in (["--seeds", "3"], ["--rows", "maml"], ["--network.channels", "4"], ["--scale", "1"]):
        assert main(["reproduce", str(study), *given]) == 1
        assert f"{given[0]} is for {study} to say" in capsys.readouterr().err
    assert main(["reproduce", str(study), "--show", "--figure", "a.png"]) == 1
    assert "has 2 tables" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tables": ["table9"]}, "tables: there is no table 'table9'; known are: small, table1"),
        ({"rows": {"mamml": [0]}}, "rows: none of the tables has a row 'mamml'; known are: maml"),
        ({"rows": {"maml": []}}, "rows.maml: list should have at least 1 item"),
        ({"rows": {"maml": [-1]}}, "rows.maml.0: it must be from 0"),
        ({"episodes": 0}, "episodes: it must be from 1"),
        ({"scale": "half"}, "scale: input should be a valid number"),
        ({"seed": 1}, "seed: extra inputs are not permitted"),
    ],
)
def test_mistakes_in_a_study_are_named_with_the_field(changes: dict[str, object], message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "study.yaml", **changes)
    with pytest.raises(ConfigError) as raised:
        read_study(path)
    assert str(raised.value).startswith(f"{path}: {message}")


def test_a_file_that_is_no_study_is_refused(tmp_path: Path) -> None:
    (tmp_path / "study.yaml").write_text("- 1\n")
    with pytest.raises(ConfigError, match="a study is a YAML file with tables, settings and rows"):
        read_study(tmp_path / "study.yaml")
