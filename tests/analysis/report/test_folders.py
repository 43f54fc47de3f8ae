"""What is read from run folders, what is missing in them, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from toys import RESULT, change_config, change_json

from metadropout.analysis.report import read_figures, read_runs
from metadropout.cli import main
from metadropout.errors import ConfigError, MetadropoutError, RunFileError


def gaps(run: Path) -> dict[str, tuple[str, str]]:
    return {gap.part: (gap.reason, gap.command) for gap in read_runs([run])[0].gaps}


def test_a_run_is_read_whole(runs: list[Path]) -> None:
    (summary,) = read_runs([runs[2]])
    assert (summary.name, summary.iteration, summary.finished) == ("metadropout", 2, True)
    assert [line.iteration for line in summary.training] == [1, 2]
    assert [line.iteration for line in summary.validation] == [1, 2]
    assert [len(test.accuracies) for test in summary.tests] == [4]
    assert summary.attack is not None
    assert [picture.name for picture in summary.figures.pictures] == ["noise"]
    assert summary.figures.pictures[0].uri.startswith("data:image/webp;base64,")
    assert summary.gaps == []
    train, evaluate, attack = summary.commands()
    assert train == summary.starts[0].command
    assert evaluate == f"metadropout evaluate {runs[2]} --episodes 4 --mc-samples 2 --seed 0"
    options = "--episodes 2 --steps 2 --restarts 1 --mc-samples 2 --seed 0 --norm linf --epsilon 0.01 0.1"
    assert attack == f"metadropout attack {runs[2]} {options}"


def test_the_commands_of_tests_and_attacks_are_told_from_their_results(runs: list[Path], tmp_path: Path) -> None:
    change_json(runs[2] / RESULT, lambda r: r.update(state="best", split="validation", seed=3))
    attacked = {"l2": {2.0: 0.5, 0.5: 0.5}, "linf": {0.1: 0.5}}
    (tmp_path / "attacks").mkdir()
    path = (runs[2] / "attack-metadropout.json").rename(tmp_path / "attacks" / "attack-metadropout.json")
    change_json(path, lambda r: r.update(episodes=[{"clean": 0.5, "attacked": attacked}], state="best"))
    change_json(path, lambda r: (r["measured"].update(protocol="inductive"), r.pop("asked")))
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
    assert "there is no checkpoint: they have been deleted or moved" in gaps(runs[0])["checkpoint"][0]
    (summary,) = read_runs([runs[0]])
    assert (summary.iteration, len(summary.tests)) == (2, 1)


def test_results_that_are_older_than_the_weights_are_named(runs: list[Path]) -> None:
    change_json(runs[2] / RESULT, lambda summary: summary.update(iteration=1))
    change_json(runs[2] / "attack-metadropout.json", lambda summary: summary["measured"].update(iteration=1))
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
    (summary,) = read_runs([runs[2]])
    assert summary.figures.pictures == []
    assert any("noise.png is listed in figures.json, but it does not exist" in gap.reason for gap in summary.gaps)


def test_attacks_are_found_in_a_folder_of_their_own(runs: list[Path], tmp_path: Path) -> None:
    (tmp_path / "attacks").mkdir()
    (runs[2] / "attack-metadropout.json").rename(tmp_path / "attacks" / "attack-metadropout.json")
    assert read_runs([runs[2]])[0].attack is None
    assert read_runs([runs[2]], tmp_path / "attacks")[0].attack is not None


def test_runs_of_one_name_are_called_by_their_paths(runs: list[Path], tmp_path: Path) -> None:
    other = Path(shutil.copytree(runs[0], tmp_path / "others" / "maml"))
    assert [summary.name for summary in read_runs([runs[0], other, runs[1]])] == [str(runs[0]), str(other), "maml-1"]
    with pytest.raises(MetadropoutError, match="is named twice"):
        read_runs([runs[0], runs[0] / ".." / "maml"])


def write(name: str, text: str) -> Callable[[Path], object]:
    return lambda run: (run / name).write_text(text, errors="surrogateescape")


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
        "evaluation-test-2samples.json: is damaged: invalid JSON: .*; delete it and evaluate again",
    ),
    "a test without results": (
        write("evaluation-test-2samples.json", '{"accuracies": [], "iteration": 2, "mc_samples": 1}'),
        "evaluation-test-2samples.json: is damaged: accuracies: list should have at least 1 item",
    ),
    "an accuracy in per cent": (
        write("evaluation-test-2samples.json", '{"accuracies": [0.5, 96.1], "iteration": 2, "mc_samples": 1}'),
        "evaluation-test-2samples.json: is damaged: accuracies.1: input should be less than or equal to 1",
    ),
    "a start without its command": (
        write("environment.json", '{"starts": [{"started": "now"}]}'),
        "environment.json: is damaged: starts.0.command: field required; restore or delete it",
    ),
    "damaged results of attacks": (
        write("attack-metadropout.json", '{"run": "metadropout", "episodes": 3}'),
        "attack-metadropout.json: is damaged: measured: field required; delete it and attack again",
    ),
    "an attack without its steps": (
        lambda run: change_json(run / "attack-metadropout.json", lambda summary: summary["measured"].pop("steps")),
        "attack-metadropout.json: is damaged: measured.steps is missing",
    ),
    "an index of figures without words": (
        write("figures/figures.json", '{"noise": {"files": ["noise.png"]}}'),
        "figures.json: is damaged: noise.title: field required; delete it and draw",
    ),
    "a figure from elsewhere": (
        write("figures/figures.json", '{"a": {"files": ["../x.png"], "title": "", "caption": "", "alt": ""}}'),
        "figures.json: is damaged: a: ../x.png is not in this folder",
    ),
    "a figure with a name that no system takes": (
        write("figures/figures.json", json.dumps({"a": {"files": ["x" * 300], "title": "", "caption": "", "alt": ""}})),
        r"figures.json: is damaged: a: x+\.\.\. is not in this folder",
    ),
    "a picture that is none": (write("figures/noise.png", "hello"), "noise.png: cannot be shown: not an image of"),
}  # fmt: skip


def replaced_by(name: str, make: Callable[[Path], object]) -> Callable[[Path], object]:
    def damage(run: Path) -> None:
        (run / name).unlink()
        make(run / name)

    return damage


SIDE_FILES = [
    RESULT,
    "environment.json",
    "metrics.jsonl",
    "attack-metadropout.json",
    "figures/figures.json",
    "data.json",
]
SIDE_FILES += ["figures/noise.png"]
REFUSED |= {
    f"{name} as {kind}": (
        replaced_by(name, make),
        f"{name}: cannot be (read|shown): it is {kind}, not a regular file; ",
    )
    for name in SIDE_FILES
    for kind, make in {"a named pipe": os.mkfifo, "a folder": Path.mkdir}.items()
}
REFUSED |= {
    f"{name} of random bytes": (write(name, "\x00\udcff{["), f"{name}: is damaged: .*; (delete|restore)")
    for name in SIDE_FILES
    if name.endswith(".json")
}


@pytest.mark.parametrize("mistake", REFUSED)
def test_what_is_damaged_is_refused_with_file_field_and_fix(mistake: str, runs: list[Path]) -> None:
    damage, message = REFUSED[mistake]
    damage(runs[2])
    with pytest.raises((RunFileError, ConfigError), match=message) as raised:
        read_runs([runs[2]])
    assert "\n" not in str(raised.value)


def test_damaged_lines_of_metrics_are_left_out_and_named(runs: list[Path]) -> None:
    append("metrics.jsonl", {"kind": "training", "iteration": 7, "loss": "low", "accuracy": 0.5})(runs[2])
    append("metrics.jsonl", {"kind": "training", "iteration": 8, "loss": 0.5, "accuracy": 0.5})(runs[2])
    (summary,) = read_runs([runs[2]])
    assert [line.iteration for line in summary.training] == [1, 2, 8]
    assert "1 line is damaged in" in gaps(runs[2])["learning curves"][0]
    assert "loss: input should be a valid number" in gaps(runs[2])["learning curves"][0]


def test_an_attack_that_was_stopped_is_named_with_the_command_that_goes_on(runs: list[Path]) -> None:
    path = runs[2] / "attack-metadropout.json"
    change_json(path, lambda results: results.update(episodes=results["episodes"][:1]))
    options = "--episodes 2 --steps 2 --restarts 1 --mc-samples 2 --seed 0 --norm linf --epsilon 0.01 0.1"
    assert gaps(runs[2])["attacks"] == (
        "stopped after 1 of 2 episodes in the linf norm",
        f"metadropout attack {runs[2]} {options}",
    )
    change_json(path, lambda results: results.update(episodes=[]))  # stopped before the first was done
    assert gaps(runs[2])["attacks"][0] == "stopped after 0 of 2 episodes in the linf norm"
    assert main(gaps(runs[2])["attacks"][1].split()[1:]) == 0
    assert "attacks" not in gaps(runs[2])


def test_an_attack_that_does_not_say_what_was_asked_for_is_not_called_complete(runs: list[Path]) -> None:
    change_json(runs[2] / "attack-metadropout.json", lambda results: results.pop("asked"))
    reason, command = gaps(runs[2])["attacks"]
    assert "an earlier version did not record how many were asked for" in reason
    assert main(command.split()[1:]) == 0
    assert "attacks" not in gaps(runs[2])


def test_figures_that_were_not_got_to_are_named_with_the_command_that_goes_on(runs: list[Path]) -> None:
    def stop(index: dict[str, Any]) -> None:
        asked = {"runs": ["elsewhere/metadropout", "other"], "options": ["--seed", "3"]}
        index["pending"] = {"accuracies": asked, "boundaries": asked}

    change_json(runs[2] / "figures" / "figures.json", stop)
    assert gaps(runs[2])["figures"] == (
        "stopped before these were drawn: accuracies, boundaries",
        f"metadropout figures {runs[2]} --only accuracies boundaries --compare other --seed 3",
    )
    assert read_figures(runs[2] / "figures").gaps[0].command == (
        "metadropout figures elsewhere/metadropout --only accuracies boundaries --compare other --seed 3 "
        f"--out {runs[2] / 'figures'}"
    )


def test_figures_of_earlier_weights_are_named(runs: list[Path]) -> None:
    change_json(runs[2] / "figures" / "figures.json", lambda index: index["figures"]["noise"].update(iteration=1))
    assert gaps(runs[2])["figures"][0] == "noise shows iteration 1, the run is at 2"


def test_an_index_of_figures_of_earlier_versions_is_read(runs: list[Path]) -> None:
    path = runs[2] / "figures" / "figures.json"
    entry = json.loads(path.read_text())["figures"]["noise"]
    path.write_text(json.dumps({"noise": {name: entry[name] for name in ("files", "title", "caption", "alt")}}))
    (summary,) = read_runs([runs[2]])
    assert [picture.name for picture in summary.figures.pictures] == ["noise"]
    assert summary.gaps == []


def test_a_test_that_was_stopped_is_named_with_the_command_that_goes_on(runs: list[Path]) -> None:
    change_json(runs[0] / RESULT, lambda result: result.update(asked_episodes=1000))
    assert gaps(runs[0])["evaluation"] == (
        "stopped after 4 of 1000 episodes",
        f"metadropout evaluate {runs[0]} --episodes 1000 --mc-samples 2 --seed 0",
    )


def test_a_result_of_an_earlier_state_that_was_kept_does_not_hide_the_present_one(runs: list[Path]) -> None:
    older = runs[0] / f"{Path(RESULT).stem}-iteration-1.json"
    shutil.copy(runs[0] / RESULT, older)
    change_json(older, lambda result: result.update(iteration=1))
    assert "evaluation" not in gaps(runs[0])


def test_tests_on_other_tasks_are_kept_apart_with_their_commands(runs: list[Path]) -> None:
    for name, changes in {
        "2way": {"way": 2, "shot": 3},
        "inductive": {"protocol": "inductive"},
        "images": {"data_digest": "0" * 64},
        "data": {"data": "omniglot", "data_digest": "1" * 64},
        "steps": {"test_steps": 7},
    }.items():
        shutil.copy(runs[0] / RESULT, runs[0] / f"evaluation-test-{name}.json")
        change_json(runs[0] / f"evaluation-test-{name}.json", lambda result, changes=changes: result.update(changes))
    (summary,) = read_runs([runs[0]])
    assert len(summary.tests) == 1
    assert len(summary.other_tests) == 5
    usual = f"metadropout evaluate {runs[0]} --episodes 4 --mc-samples 2 --seed 0"
    assert summary.commands()[1:] == [
        usual,
        f"{usual} --episode.way 2 --episode.shot 3",
        f"{usual} --data.name omniglot",
        f"{usual} --data.directory FOLDER",
        f"{usual} --episode.protocol inductive",
        f"{usual} --learner.test_steps 7",
    ]


def test_a_folder_without_figures_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no figures\.json; draw figures with"):
        read_figures(tmp_path)
