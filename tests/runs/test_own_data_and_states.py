"""A run's data, checkpoints and results are its own: others are refused, and none is replaced by a lesser one."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
import yaml
from PIL import Image
from toys import RESULT, change_json

from metadropout.cli import main
from metadropout.config import Config
from metadropout.data import Splits
from metadropout.learners import Learner
from metadropout.training.checkpoints import latest_checkpoint, read_checkpoint, tensors_digest
from metadropout.training.loop import open_parts

FAST = ["--episodes", "2", "--mc-samples", "2"]
ATTACK = ["--episodes", "1", "--steps", "1", "--mc-samples", "1", "--norm", "linf", "--epsilon", "0.1"]


def draw_classes(folder: Path, names: str) -> None:
    for name in names:
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number in range(3):
            colour = (ord(name) * 7 % 256, number * 60, 90)
            Image.new("RGB", (16, 16), colour).save(folder / name / f"{number}.png")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A place with a folder of images and a run on it."""
    place = tmp_path_factory.mktemp("trained")
    draw_classes(place / "birds", "abcdefghij")
    recipe = {
        "data": {"name": "folder", "directory": str(place / "birds"), "image_size": 16, "test_share": 0.3},
        "episode": {"way": 2, "query": 1},
        "network": {"channels": 2},
        "learner": {"steps": 1},
        "training": {"iterations": 3, "meta_batch": 1, "checkpoint_every": 1, "validation_episodes": 1},
        "machine": {"device": "cpu", "threads": 1},
    }
    (place / "birds.yaml").write_text(yaml.safe_dump(recipe))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("METADROPOUT_CACHE", str(place / "cache"))
        assert main(["train", str(place / "birds.yaml"), "--out", str(place / "run")]) == 0
    return place


@pytest.fixture
def place(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of that place, which a test may change."""
    copy = tmp_path / "place"
    shutil.copytree(trained, copy)
    monkeypatch.setenv("METADROPOUT_CACHE", str(copy / "cache"))
    (copy / "run" / "config.yaml").write_text(
        (copy / "run" / "config.yaml").read_text().replace(str(trained), str(copy))
    )
    return copy


OPENERS: dict[str, list[str]] = {
    "evaluate": FAST,
    "attack": ATTACK,
    "figures": ["--only", "multipliers"],
}


@pytest.mark.parametrize("command", OPENERS)
def test_classes_that_were_trained_on_are_never_tested_on(
    command: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draw_classes(place / "birds", "A")  # the split by shares is another one then
    assert main([command, str(place / "run"), *OPENERS[command]]) == 1
    said = capsys.readouterr().err
    assert "of the test classes are classes that this run was trained on, such as '" in said
    assert "because the data set has changed: " in said


def test_a_run_does_not_go_on_with_another_split(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draw_classes(place / "birds", "A")
    assert main(["train", "--resume", str(place / "run"), "--training.iterations", "4"]) == 1
    assert "the data set is not the one that this run began with: " in capsys.readouterr().err
    assert latest_checkpoint(place / "run" / "checkpoints").name == "iteration-00000003.safetensors"


def test_a_test_on_other_classes_names_the_change(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draw_classes(place / "others", "uvwxyz")
    other = ["--data.directory", str(place / "others"), "--data.test_share", "1", "--data.validation_share", "0"]
    assert main(["evaluate", str(place / "run"), *FAST, *other]) == 0
    assert "run: is tested on another data set than its own: " in capsys.readouterr().err
    (written,) = (place / "run").glob("evaluation-*.json")
    assert written.name.startswith("evaluation-test-folder-")


RESUME = ["train", "--training.iterations", "4", "--resume"]


@pytest.mark.parametrize("command", [["evaluate", *FAST], RESUME])
def test_without_a_list_of_classes_a_checkpoint_tells_that_the_data_set_has_changed(
    command: list[str], place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "run" / "data.json").unlink()
    assert main([*command, str(place / "run")]) == 0
    (place / "run" / "data.json").unlink(missing_ok=True)  # written anew on resuming
    draw_classes(place / "birds", "A")
    longer = [str(int(word) + 1) if word.isdecimal() else word for word in command]
    assert main([*longer, str(place / "run")]) == 1
    assert "the data set is not the one that this run began with, and data.json" in capsys.readouterr().err
    assert not (place / "run" / "data.json").exists()


@pytest.mark.parametrize("command", [["evaluate", *FAST], RESUME])
def test_a_checkpoint_of_a_run_on_other_images_is_refused(
    command: list[str], place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draw_classes(place / "others", "klmnopqrst")
    other = ["--out", str(place / "other"), "--data.directory", str(place / "others")]
    assert main(["train", str(place / "birds.yaml"), *other]) == 0
    name = "checkpoints/iteration-00000003.safetensors"
    shutil.copy(place / "other" / name, place / "run" / name)
    assert main([*command, str(place / "run")]) == 1
    assert "belongs to another run: there the data set's digest is" in capsys.readouterr().err


def test_trained_images_under_new_names_are_never_tested_on(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained_on = json.loads((place / "run" / "data.json").read_text())["classes"]["train"]
    for name in trained_on:
        shutil.copytree(place / "birds" / name, place / "renamed" / f"new-{name}")
    options = ["--data.directory", str(place / "renamed"), "--data.test_share", "1", "--data.validation_share", "0"]
    assert main(["evaluate", str(place / "run"), *FAST, *options]) == 1
    said = capsys.readouterr().err
    assert f"{len(trained_on)} of the test classes are classes that this run was trained on, such as 'new-" in said
    assert "there called '" in said


def test_a_checkpoint_under_another_ones_name_is_refused(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = place / "run" / "checkpoints"
    shutil.copy(folder / "iteration-00000003.safetensors", folder / "iteration-00000006.safetensors")
    assert main(["evaluate", str(place / "run"), *FAST]) == 1
    assert "is the state after 3 iterations, and not what its name says" in capsys.readouterr().err


def test_a_folder_with_a_checkpoints_name_is_passed_over(place: Path) -> None:
    (place / "run" / "checkpoints" / "iteration-00000099.safetensors").mkdir()
    assert main([*RESUME, str(place / "run")]) == 0
    assert main(["evaluate", str(place / "run"), *FAST]) == 0


def test_a_run_of_which_only_the_initial_state_is_left_says_that_it_begins_again(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = place / "run" / "checkpoints"
    for path in [*folder.glob("iteration-*")][1:]:
        path.unlink()
    (kept,) = folder.glob("iteration-*")
    again = place / "again"
    assert main(["train", str(place / "birds.yaml"), "--out", str(again), "--training.iterations", "1"]) == 0
    shutil.copy(again / "checkpoints" / "iteration-00000000.safetensors", folder)
    kept.unlink()
    assert main([*RESUME, str(place / "run")]) == 0
    assert "only the initial state is left of 3 iterations: training begins again" in capsys.readouterr().err


@pytest.mark.parametrize("command", [*OPENERS, "export", "resume"])
def test_another_runs_checkpoint_is_refused(command: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = place / "other"
    assert main(["train", str(place / "birds.yaml"), "--out", str(other), "--seed", "1"]) == 0
    for name in ("iteration-00000002.safetensors", "iteration-00000003.safetensors"):
        shutil.copy(other / "checkpoints" / name, place / "run" / "checkpoints" / name)
    words = {"export": ["--out", str(place / "out.safetensors")]} | OPENERS
    arguments = [command, str(place / "run"), *words.get(command, [])]
    if command == "resume":
        arguments = ["train", "--resume", str(place / "run"), "--training.iterations", "4"]
    assert main(arguments) == 1
    assert "belongs to another run: there seed is 1, here it is 0; put this run's own" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda tensor: torch.full_like(tensor, float("nan")), "has values that are not finite numbers"),
        (lambda tensor: tensor.to(torch.int32), "holds torch.int32 numbers, not torch.float32"),
        (lambda tensor: torch.full_like(tensor, 1e38), "answers are not finite numbers in 2 of 2 episodes"),
    ],
)
def test_spoilt_weights_give_no_accuracy(
    spoil: Callable[[torch.Tensor], torch.Tensor], said: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rewrite(place / "run", lambda tensors: {n: spoil(t) if "learner." in n else t for n, t in tensors.items()})
    assert main(["evaluate", str(place / "run"), *FAST]) == 1
    assert said in capsys.readouterr().err
    assert not list((place / "run").glob("evaluation-*"))


def rewrite(run: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    """Change what is in a run's newest checkpoint, with a checksum that is right."""
    path = latest_checkpoint(run / "checkpoints")
    assert path is not None
    tensors, metadata = read_checkpoint(path)
    tensors = change(tensors)
    said = {name: text for name, text in metadata.items() if name != "sha256"}
    path.write_bytes(safetensors.torch.save(tensors, {**said, "sha256": tensors_digest(tensors, said)}))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda state: {n: t for n, t in state.items() if ".exp_avg_sq." not in n}, "exp_avg_sq of '.*' is missing"),
        (
            lambda state: {n: -t - 1 if ".exp_avg_sq." in n else t for n, t in state.items()},
            "exp_avg_sq of '.*' has values that it cannot have",
        ),
        (
            lambda state: {n: t * float("nan") if ".exp_avg." in n else t for n, t in state.items()},
            "exp_avg of '.*' has values that it cannot have",
        ),
        (
            lambda state: {n: t.half() if ".exp_avg." in n else t for n, t in state.items()},
            "exp_avg of '.*' has values that it cannot have",
        ),
        (lambda state: {n: t.repeat(2) if ".step." in n else t for n, t in state.items()}, "step of '.*' has shape"),
    ],
)
def test_a_spoilt_state_of_the_optimiser_is_not_gone_on_with(
    change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]],
    said: str,
    place: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rewrite(place / "run", change)
    assert main(["train", "--resume", str(place / "run"), "--training.iterations", "4"]) == 1
    error = capsys.readouterr().err
    assert re.search(said, error), error
    assert "iteration-00000003.safetensors" in error


def test_a_run_without_checkpoints_does_not_begin_anew(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (place / "run" / "checkpoints").iterdir():
        path.unlink()
    assert main(["train", "--resume", str(place / "run"), "--training.iterations", "4"]) == 1
    assert "there is no checkpoint: they have been deleted or moved. Put them back" in capsys.readouterr().err


def test_a_shorter_test_never_replaces_a_longer_one(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = place / "run"
    assert main(["evaluate", str(run), "--episodes", "4", "--mc-samples", "2"]) == 0
    before = (run / RESULT).read_bytes()
    assert main(["evaluate", str(run), "--episodes", "2", "--mc-samples", "2"]) == 0
    assert (run / RESULT).read_bytes() == before
    assert f"{RESULT}: keeps the result of 4 episodes" in capsys.readouterr().err
    content = json.loads(before)
    recorded = {name: content[name] for name in ("data", "way", "shot", "query", "protocol", "seed", "split", "state")}
    assert recorded == {
        "data": "folder",
        "way": 2,
        "shot": 1,
        "query": 1,
        "protocol": "transductive",
        "seed": 0,
        "split": "test",
        "state": "last",
    }
    assert content["data_digest"] == json.loads((run / "data.json").read_text())["digest"]
    assert content["iteration"] == 3


@pytest.mark.parametrize(
    "options", [["--seed", "1"], ["--split", "train"], ["--episode.shot", "2"], ["--state", "best"]]
)
def test_other_measures_have_files_of_their_own(options: list[str], place: Path) -> None:
    run = place / "run"
    assert main(["evaluate", str(run), *FAST]) == 0
    before = (run / RESULT).read_bytes()
    assert main(["evaluate", str(run), *FAST, *options]) == 0
    assert (run / RESULT).read_bytes() == before
    assert len(list(run.glob("evaluation-*"))) == 2


def test_an_attack_says_on_which_data_it_was_measured(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = place / "run"
    assert main(["attack", str(run), *ATTACK]) == 0
    digest = json.loads((run / "data.json").read_text())["digest"]
    assert json.loads((run / "attack-run.json").read_text())["measured"]["data"] == digest
    change_json(run / "attack-run.json", lambda content: content["measured"].update(data="another"))
    assert main(["attack", str(run), *ATTACK]) == 1
    assert "was measured with data another, but now it is" in capsys.readouterr().err
    change_json(run / "attack-run.json", lambda content: content["measured"].pop("data"))
    assert main(["attack", str(run), *ATTACK]) == 0  # as an earlier version wrote it


def test_a_folder_is_free_only_while_it_is_held(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["train", str(place / "birds.yaml"), "--out", str(place / "same")]

    def open_parts_late(config: Config) -> tuple[Splits, Learner]:
        monkeypatch.undo()
        monkeypatch.setenv("METADROPOUT_CACHE", str(place / "cache"))
        assert main([*arguments, "--seed", "1"]) == 0  # another process, faster than this one
        return open_parts(config)

    monkeypatch.setattr("metadropout.cli.train.open_parts", open_parts_late)
    assert main(arguments) == 1
    assert "same: holds a run already" in capsys.readouterr().err
    assert yaml.safe_load((place / "same" / "config.yaml").read_text())["seed"] == 1
    assert main(["evaluate", str(place / "same"), *FAST]) == 0
