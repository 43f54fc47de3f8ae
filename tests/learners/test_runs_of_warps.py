"""A whole life on the command line of T-Net, MT-Net, CAVIA, ANIL, UNICORN-MAML and MAML++."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from toys import assert_same_weights, finish, start, wait_for, weights

from metadropout.cli import main
from metadropout.learners import LEARNERS
from metadropout.training.checkpoints import iteration_of, latest_checkpoint

KINDS: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "tnet": ({}, "metadropout", {}),
    "mtnet": ({}, "none", {}),
    "cavia": ({"inner_lr": 1.0}, "metadropout", {"context": 5, "norm": "batch"}),
    "anil": ({}, "none", {}),
    "unicorn": ({}, "metadropout", {}),
    "unicorn-metasgd": ({}, "none", {}),
    "mamlpp": ({"multi_step_iterations": 5}, "metadropout", {}),
}
"""Options of the learner, a perturbation, and options of the network."""


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def write_recipe(recipe: Path, kind: str, **training: Any) -> None:
    learner, perturbation, network = KINDS[kind]
    config = yaml.safe_load(recipe.read_text())
    config["learner"] |= {"name": kind, **learner}
    config["perturbation"] = {"name": perturbation}
    config["network"] |= network
    config["training"] |= training
    recipe.write_text(yaml.safe_dump(config))


def test_a_run_is_the_same_killed_and_resumed_on_threads_and_on_processes(
    kind: str, recipe: Path, tmp_path: Path
) -> None:
    write_recipe(recipe, kind, iterations=8, checkpoint_every=1, meta_batch=3)
    whole, killed, processes = tmp_path / "whole", tmp_path / "killed", tmp_path / "processes"
    assert main(["train", str(recipe), "--out", str(whole)]) == 0
    process = start("train", recipe, "--out", killed)
    wait_for(lambda: (path := latest_checkpoint(killed / "checkpoints")) and iteration_of(path) >= 2, process)
    process.send_signal(signal.SIGKILL)
    finish(process)
    assert main(["train", "--resume", str(killed), "--machine.threads", "2"]) == 0
    assert_same_weights(whole, killed)
    out, err = finish(start("train", recipe, "--out", processes, processes=2))
    assert "trained to iteration 8" in out, err
    assert_same_weights(whole, processes)
    if kind == "mamlpp":
        assert weights(whole)["outer_steps"] == 8
    if kind == "cavia":
        assert (weights(whole)["network.blocks.2.film.context"] == 0).all()


def test_tasks_side_by_side_give_the_run_but_for_rounding(kind: str, recipe: Path, tmp_path: Path) -> None:
    write_recipe(recipe, kind, iterations=1, meta_batch=3)
    one, side = tmp_path / "one", tmp_path / "side"
    assert main(["train", str(recipe), "--out", str(one)]) == 0
    assert main(["train", str(recipe), "--out", str(side), "--machine.tasks", "batched"]) == 0
    for name, value in weights(one).items():
        # Adam's first step is of the size of the rate, whatever the gradient: where that is rounding, its sign is too.
        torch.testing.assert_close(value, weights(side)[name], rtol=0, atol=2.1e-3, msg=name)


def test_a_run_is_evaluated_attacked_drawn_and_reported(
    kind: str, recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("sklearn")
    monkeypatch.setattr("metadropout.analysis.figures.runs.TASKS", 1)
    write_recipe(recipe, kind, iterations=2)
    run, page = tmp_path / "run", tmp_path / "report.html"
    assert main(["train", str(recipe), "--out", str(run)]) == 0
    assert main(["evaluate", str(run), "--episodes", "3", "--mc-samples", "2"]) == 0
    assert main(["evaluate", str(run), "--episodes", "3", "--mc-samples", "2", "--episode.protocol", "inductive"]) == 0
    capsys.readouterr()
    wider = ["evaluate", str(run), "--episodes", "2", "--mc-samples", "2", "--episode.way", "5", "--episode.shot", "2"]
    assert main(wider) == (1 if kind == "cavia" else 0)
    assert ("cannot do tasks of 5: it does not adapt its head" in capsys.readouterr().err) == (kind == "cavia")
    attack = ["attack", str(run), "--episodes", "1", "--steps", "2", "--norm", "linf", "--epsilon", "0.1"]
    assert main([*attack, "--mc-samples", "2"]) == 0
    figures = ["figures", str(run), "--out", str(tmp_path / "figures"), "--episodes", "1", "--decoder-iterations", "2"]
    assert main(figures) == 0
    assert (tmp_path / "figures" / "boundaries.png").exists() == (kind != "cavia")
    assert main(["report", str(run), "--out", str(page)]) == 0
    assert LEARNERS[kind].title in page.read_text()
