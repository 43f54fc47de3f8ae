"""What is read from run folders, what is missing in them, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from toys import RESULT, change_config, change_json

from metadropout.analysis.report import read_pictures, read_runs
from metadropout.errors import MetadropoutError


def gaps(run: Path) -> dict[str, tuple[str, str]]:
    return {gap.part: (gap.reason, gap.command) for gap in read_runs([run])[0].gaps}


def test_a_run_is_read_whole(runs: list[Path]) -> None:
    (record,) = read_runs([runs[2]])
    assert (record.name, record.iteration, record.finished) == ("metadropout", 2, True)
    assert [line.iteration for line in record.training] == [1, 2]
    assert [line.iteration for line in record.validation] == [1, 2]
    assert [len(test.accuracies) for test in record.tests] == [4]
    assert record.attack is not None
    assert [picture.name for picture in record.pictures] == ["noise"]
    assert record.pictures[0].uri.startswith("data:image/webp;base64,")
    assert record.gaps == []
    train, evaluate, attack = record.commands()
    assert train == record.starts[0].command
    assert evaluate == f"metadropout evaluate {runs[2]} --episodes 4 --mc-samples 2 --seed 0"
    options = "--episodes 2 --steps 2 --restarts 1 --mc-samples 2 --seed 0 --norm linf --epsilon 0.01 0.1"
    assert attack == f"metadropout attack {runs[2]} {options}"


def test_the_commands_of_tests_and_attacks_are_told_from_their_results(runs: list[Path], tmp_path: Path) -> None:
    change_json(runs[2] / RESULT, lambda r: r.update(state="best", split="validation", seed=3))
    attacked = {"l2": {2.0: 0.5, 0.5: 0.5}, "linf": {0.1: 0.5}}
    (tmp_path / "attacks").mkdir()
    path = (runs[2] / "attack-metadropout.json").rename(tmp_path / "attacks" / "attack-metadropout.json")
    change_json(path, lambda r: r.update(episodes=[{"clean": 0.5, "attacked": attacked}], state="best"))
    change_json(path, lambda r: r["measured"].update(protocol="inductive"))
    *_, evaluate, attack = read_runs([runs[2]], tmp_path / "attacks")[0].commands()
    assert evaluate.endswith("--episodes 4 --mc-samples 2 --seed 3 --split validation --state best")
    radii = "--norm l2 --epsilon 0.5 2 --norm linf --epsilon 0.1"
    options = f"--steps 2 --restarts 1 --mc-samples 2 --seed 0 --state best --inductive --out {tmp_path / 'attacks'}"
    assert attack.endswith(f"{options} {radii}")


def test_what_was_never_made_is_named_with_the_command_that_makes_it(runs: list[Path]) -> None:
    run = runs[0]
    (run / RESULT).unlink()
    assert gaps(run) == {
        "evaluation": ("the last state has not been tested on unseen classes", f"metadropout evaluate {run}"),
        "attacks": ("the run has not been attacked", f"metadropout attack {run} --episodes 100"),
        "figures": ("none have been drawn", f"metadropout figures {run}"),
    }


def test_a_run_that_never_finished_is_named_with_its_iteration(runs: list[Path]) -> None:
    change_config(runs[0], "training", iterations=500)
    assert gaps(runs[0])["training"] == (
        "not finished: iteration 2 of 500",
        f"metadropout train --resume {runs[0]}",
    )


def test_a_missing_or_damaged_checkpoint_is_named_and_the_rest_is_shown(runs: list[Path]) -> None:
    for path in (runs[0] / "checkpoints").glob("iteration-*2.safetensors"):
        path.write_bytes(path.read_bytes()[:-5])
    assert "is damaged or not a checkpoint" in gaps(runs[0])["checkpoint"][0]
    shutil.rmtree(runs[0] / "checkpoints")
    assert "there is none in" in gaps(runs[0])["checkpoint"][0]
    (record,) = read_runs([runs[0]])
    assert (record.iteration, len(record.tests)) == (2, 1)


def test_results_that_are_older_than_the_weights_are_named(runs: list[Path]) -> None:
    change_json(runs[2] / RESULT, lambda record: record.update(iteration=1))
    change_json(runs[2] / "attack-metadropout.json", lambda record: record["measured"].update(iteration=1))
    found = gaps(runs[2])
    assert found["evaluation"][0] == "is of iteration 1, the run is at 2"
    assert found["attacks"][0].startswith("are of iteration 1, the run is at 2")


def test_a_run_of_another_version_is_named(runs: list[Path]) -> None:
    change_json(runs[2] / "environment.json", lambda e: e["starts"][0]["versions"].update(metadropout="0.0.1"))
    assert "trained by metadropout 0.0.1" in gaps(runs[2])["version"][0]


def test_a_run_without_records_is_shown_with_what_it_has(runs: list[Path]) -> None:
    for name in ("environment.json", "metrics.jsonl"):
        (runs[2] / name).unlink()
    shutil.rmtree(runs[2] / "figures")
    assert list(gaps(runs[2])) == ["learning curves", "environment", "figures"]


def test_a_picture_that_is_gone_is_named(runs: list[Path]) -> None:
    (runs[2] / "figures" / "noise.png").unlink()
    (record,) = read_runs([runs[2]])
    assert record.pictures == []
    assert any("noise.png is listed in figures.json, but it is not there" in gap.reason for gap in record.gaps)


def test_attacks_are_found_in_a_folder_of_their_own(runs: list[Path], tmp_path: Path) -> None:
    (tmp_path / "attacks").mkdir()
    (runs[2] / "attack-metadropout.json").rename(tmp_path / "attacks" / "attack-metadropout.json")
    assert read_runs([runs[2]])[0].attack is None
    assert read_runs([runs[2]], tmp_path / "attacks")[0].attack is not None


def test_runs_of_one_name_are_called_by_their_paths(runs: list[Path], tmp_path: Path) -> None:
    other = Path(shutil.copytree(runs[0], tmp_path / "others" / "maml"))
    assert [record.name for record in read_runs([runs[0], other, runs[1]])] == [str(runs[0]), str(other), "maml-1"]
    with pytest.raises(MetadropoutError, match="is named twice"):
        read_runs([runs[0], runs[0] / ".." / "maml"])


def write(name: str, text: str) -> Callable[[Path], object]:
    return lambda run: (run / name).write_text(text)


def append(name: str, line: dict[str, object]) -> Callable[[Path], object]:
    return lambda run: (run / name).write_text((run / name).read_text() + json.dumps(line) + "\n")


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "no run": (lambda run: (run / "config.yaml").unlink(), "metadropout: is not a run's folder: it has no config.yaml"),
    "an option of another version": (
        lambda run: change_config(run, "learner", warmth=3),
        "config.yaml: learner.warmth is not an option here.*if another version of metadropout wrote this run, use",
    ),
    "a test that is cut short": (
        write("evaluation-test-2samples.json", '{"accuracies": [0.5'),
        "evaluation-test-2samples.json: invalid JSON: .*; delete the file and evaluate again",
    ),
    "a test without results": (
        write("evaluation-test-2samples.json", '{"accuracies": [], "iteration": 2, "mc_samples": 1}'),
        "evaluation-test-2samples.json: accuracies: list should have at least 1 item",
    ),
    "an accuracy in per cent": (
        write("evaluation-test-2samples.json", '{"accuracies": [0.5, 96.1], "iteration": 2, "mc_samples": 1}'),
        "evaluation-test-2samples.json: accuracies.1: input should be less than or equal to 1",
    ),
    "a start without its command": (
        write("environment.json", '{"starts": [{"started": "now"}]}'),
        "environment.json: starts.0.command: field required",
    ),
    "a loss that is no number": (
        append("metrics.jsonl", {"kind": "training", "iteration": 7, "loss": "low", "accuracy": 0.5}),
        "metrics.jsonl: line of training at iteration 7, loss: input should be a valid number",
    ),
    "a damaged record of attacks": (
        write("attack-metadropout.json", '{"run": "metadropout", "episodes": 3}'),
        "attack-metadropout.json: measured: field required",
    ),
    "an attack without its steps": (
        lambda run: change_json(run / "attack-metadropout.json", lambda record: record["measured"].pop("steps")),
        "attack-metadropout.json: measured.steps is missing",
    ),
    "an index of figures without words": (
        write("figures/figures.json", '{"noise": {"files": ["noise.png"]}}'),
        "figures.json: noise.title: field required",
    ),
    "a figure from elsewhere": (
        write("figures/figures.json", '{"a": {"files": ["../x.png"], "title": "", "caption": "", "alt": ""}}'),
        "figures.json: a.files: ../x.png is not in this folder",
    ),
    "a picture that is none": (write("figures/noise.png", "hello"), "noise.png: is not a picture that can be read"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", REFUSED)
def test_what_is_damaged_is_refused_with_file_field_and_fix(mistake: str, runs: list[Path]) -> None:
    damage, message = REFUSED[mistake]
    damage(runs[2])
    with pytest.raises(MetadropoutError, match=message) as raised:
        read_runs([runs[2]])
    assert "\n" not in str(raised.value)


def test_a_folder_without_figures_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MetadropoutError, match=r"has no figures\.json; draw figures with"):
        read_pictures(tmp_path)
