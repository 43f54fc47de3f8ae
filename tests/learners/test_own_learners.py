"""Learners of a user's own, each a file of at most 40 lines: they train, are killed, resume and are reported."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import yaml
from toys import assert_same_weights, finish, start, wait_for

from metadropout.cli import main
from metadropout.runs.folder import open_run
from metadropout.training.checkpoints import iteration_of, latest_checkpoint

FILES = sorted(Path(__file__).parent.parent.joinpath("toy_learners").glob("*.py"))

NAMES = {
    "metric": ("toy-metric", {}, "none"),
    "no_query": ("toy-no-query", {}, "none"),
    "gaussian_weights": ("toy-gaussian", {"steps": 2, "inner_lr": 0.05}, "metadropout"),
    "context": ("toy-context", {}, "none"),
    "masks": ("toy-masks", {"steps": 2}, "metadropout"),
    "learned_rule": ("toy-rule", {"steps": 2, "inner_lr": 0.05}, "metadropout"),
}


def test_each_file_is_short_and_tested() -> None:
    assert [path.stem for path in FILES] == sorted(NAMES)
    for path in FILES:
        assert len(path.read_text().splitlines()) <= 40, path.name


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.stem)
def test_it_trains_is_killed_resumes_is_evaluated_and_reported(file: Path, recipe: Path, tmp_path: Path) -> None:
    name, options, perturbation = NAMES[file.stem]
    config = yaml.safe_load(recipe.read_text())
    config |= {"learner": {"name": name, **options}, "perturbation": {"name": perturbation}}
    config["training"] |= {"iterations": 8, "checkpoint_every": 1}
    if file.stem == "context":
        config["network"] = {"name": "toy-context"}
    recipe.write_text(yaml.safe_dump(config))
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert main(["train", str(recipe), "--out", str(whole), "--import", str(file)]) == 0

    process = start("train", recipe, "--out", killed, "--import", file)
    wait_for(lambda: (path := latest_checkpoint(killed / "checkpoints")) and iteration_of(path) >= 2, process)
    process.send_signal(signal.SIGKILL)
    finish(process)
    assert main(["train", "--resume", str(killed), "--import", str(file), "--machine.threads", "2"]) == 0
    assert_same_weights(whole, killed)
    first, last = (open_run(whole).checkpoints / f"iteration-{n:08d}.safetensors" for n in (7, 8))
    assert first.read_bytes() != last.read_bytes()

    for run in (whole, killed):
        assert main(["evaluate", str(run), "--episodes", "3", "--mc-samples", "2", "--import", str(file)]) == 0
    page = tmp_path / "report.html"
    assert main(["report", str(whole), str(killed), "--out", str(page), "--import", str(file)]) == 0
    assert name in page.read_text()


def test_a_run_that_needs_a_module_says_so(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = yaml.safe_load(recipe.read_text())
    recipe.write_text(yaml.safe_dump(config | {"learner": {"name": "nobodys-learner"}}))
    assert main(["train", str(recipe), "--out", str(tmp_path / "run")]) == 1
    assert "name the module that registers it: --import MODULE" in capsys.readouterr().err
    monkeypatch.chdir(tmp_path)
    assert main(["train", str(recipe), "--out", str(tmp_path / "run"), "--import", "no_such_module"]) == 1
    assert "--import no_such_module: ModuleNotFoundError" in capsys.readouterr().err
