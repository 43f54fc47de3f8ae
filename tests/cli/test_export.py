"""`metadropout export`: a run becomes a set of weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import metadropout as md
from metadropout.cli import main

FEW = ["--episodes", "3", "--calibration-episodes", "2", "--mc-samples", "2"]


def test_a_run_becomes_a_set_of_weights_with_what_was_measured_of_it(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = tmp_path / "run", tmp_path / "mine.safetensors"
    assert main(["train", str(recipe), "--out", str(run), "--training.iterations", "2"]) == 0
    assert main(["export", str(run), "--out", str(out), *FEW]) == 0
    weights = md.load_weights(out)
    assert weights.name == "mine"
    assert weights.card.iterations == 2
    trained = md.load_run(run).learner.state_dict()
    exported = weights.learner().state_dict()
    assert trained.keys() == exported.keys()
    assert all(torch.equal(trained[name], exported[name]) for name in trained)
    measured = json.loads((run / "evaluation-test-2samples.json").read_text())
    assert f"{100 * measured['mean']:.2f}" in out.with_suffix(".md").read_text()
    capsys.readouterr()
    assert main(["export", str(run), "--out", str(tmp_path / "mine.txt"), *FEW]) == 1
    assert "safetensors" in capsys.readouterr().err
