"""The demo: two methods are trained, tested, drawn, and compared in plain words."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from metadropout.cli import demo, main
from metadropout.evaluation import Evaluation

TINY: dict[str, Any] = {
    "data": {"name": "glyphs", "train_classes": 6, "validation_classes": 6, "test_classes": 6},
    "episode": {"way": 3, "query": 2},
    "network": {"channels": 2},
    "learner": {"steps": 1},
    "training": {"meta_batch": 1, "validation_episodes": 1},
    "machine": {"device": "cpu", "threads": 1},
}


def test_the_demo_prints_the_paired_difference_and_what_to_make_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("first", "second"):
        Path(f"{name}.yaml").write_text(yaml.safe_dump(TINY | {"perturbation": {"name": "none"}}))
    monkeypatch.setattr(demo, "METHODS", {"One": "first.yaml", "Other": "second.yaml"})
    assert main(["demo", "--out", "out", "--iterations", "2", "--episodes", "3"]) == 0
    printed = capsys.readouterr().out
    assert "glyphs, 3-way 1-shot, unseen classes: accuracy on 3 tasks, 95 % interval" in printed
    assert re.search(r"  One +\d+\.\d\d ± \d+\.\d\d %\n  Other +\d+\.\d\d ± \d+\.\d\d %\n", printed)
    assert "Other − One, task by task: +0.00 ± 0.00 points\n" in printed  # the same recipe and seed
    told = "Other and One cannot be told apart on these 3 tasks: the interval contains 0. More tasks (--episodes)"
    assert told in printed
    assert "one training run of each, of 2 iterations" in printed
    assert "Few-shot learning:" in printed
    assert Path("out/accuracy.png").exists()
    assert Path("out/curves.png").exists()


def test_a_difference_that_is_more_than_chance_is_called_that() -> None:
    results = {"MAML": Evaluation([0.5, 0.6, 0.7]), "MAML + Meta-dropout": Evaluation([0.4, 0.4, 0.6])}
    assert demo.comparison(results) == [
        "MAML + Meta-dropout − MAML, task by task: −13.33 ± 5.33 points",
        "MAML + Meta-dropout is behind MAML on these 3 tasks: the whole interval lies below 0.",
    ]
