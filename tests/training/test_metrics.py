"""Metrics: damaged lines are left out and named, and a run goes on without any file beside its checkpoints."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from toys import assert_same_weights

from metadropout.cli import main
from metadropout.errors import RunFileError
from metadropout.training.metrics import MAX_BYTES, load_metrics, newest_iteration, read_metrics

TINY = {
    "data": {"name": "glyphs", "train_classes": 6, "validation_classes": 6, "test_classes": 6},
    "episode": {"way": 3, "query": 2},
    "network": {"channels": 2},
    "learner": {"steps": 1},
    "training": {"meta_batch": 1, "validation_episodes": 1},
    "machine": {"device": "cpu", "threads": 1},
}
WHOLE = [
    '{"kind": "training", "iteration": 1, "loss": 1.5, "accuracy": 0.5, "tasks_per_second": null, "seconds": 2}',
    '{"kind": "noise", "iteration": 1, "strength/conv1": 0.5}',
    '{"kind": "validation", "iteration": 2, "accuracy": 0.5, "interval": 0}',
]
DAMAGED = {
    "": "invalid JSON",
    "[" * 100_000: "invalid JSON: recursion limit exceeded",
    "1" * 5000: "invalid JSON",
    '{"kind": ["training"], "iteration": 1}': "kind: input should be 'training', 'validation' or 'noise'",
    '{"kind": "training", "iteration": "1", "loss": 1, "accuracy": 0}': "iteration: input should be a valid integer",
    '{"kind": "training", "iteration": 1, "loss": NaN, "accuracy": 0}': "loss: input should be a finite number",
    '{"kind": "training", "iteration": 1, "accuracy": 0}': "loss: field required",
    '{"kind": "noise", "iteration": 1, "strength/a": "x"}': "strength/a",
    '{"kind": "noise", "iteration": 1, "strength/a": "noise"}': "strength/a must be a number",
    "\udcff\udcfe": "input should be",
}


@pytest.mark.parametrize("line", DAMAGED, ids=lambda line: repr(line[:40]))
def test_a_damaged_line_is_left_out_and_named(line: str, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("\n".join([*WHOLE[:2], line, *WHOLE[2:]]) + "\n", errors="surrogateescape")
    metrics = load_metrics(path)
    assert metrics.lines == [json.loads(text) for text in WHOLE]
    (told,) = metrics.damaged
    assert told.startswith("line 3: ")
    assert newest_iteration(path) == 2


def test_a_last_line_that_was_cut_short_is_no_damage(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("\n".join(WHOLE) + '\n{"kind": "training", "itera')
    metrics = load_metrics(path)
    assert (len(metrics.lines), metrics.damaged) == (3, [])
    assert [line.loss for line in metrics.training] == [1.5]
    assert [line.iteration for line in metrics.validation] == [2]


def test_no_file_is_no_lines_and_what_is_no_file_is_refused(tmp_path: Path) -> None:
    assert read_metrics(tmp_path / "none") == []
    assert newest_iteration(tmp_path / "none") == 0
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").touch()
    os.truncate(tmp_path / "large", MAX_BYTES + 1)
    for name, reason in {"pipe": "it is a named pipe", ".": "it is a folder", "large": "it has more than"}.items():
        with pytest.raises(RunFileError, match=f"cannot be read: {reason}.*a run needs none"):
            read_metrics(tmp_path / name)
        assert newest_iteration(tmp_path / name) == 0


def pipe(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def folder(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir()


def noise(path: Path) -> None:
    path.write_bytes(os.urandom(5000))


def one_wrong_number(path: Path) -> None:
    path.write_text(path.read_text().replace('"iteration": 2', '"iteration": "2"'))


SIDE_FILES: dict[str, list[Callable[[Path], object]]] = {
    "metrics.jsonl": [pipe, folder, noise, one_wrong_number, Path.unlink],
    "environment.json": [pipe, folder, noise, Path.unlink],
    "README.md": [pipe, noise, Path.unlink],
    "events": [lambda path: (shutil.rmtree(path), path.touch()), lambda path: (shutil.rmtree(path), os.mkfifo(path))],
    "evaluation-test.json": [pipe, folder, noise],
    "attack-run.json": [pipe, noise],
    "figures": [pipe],
    "checkpoints/stray.tmp": [pipe, folder, noise],
    "checkpoints/iteration-00000000.safetensors": [pipe, folder, noise],
    "checkpoints/iteration-1.safetensors": [folder, noise],
    "checkpoints/notes": [folder, noise],
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run of three iterations, and the same of six."""
    out = tmp_path_factory.mktemp("runs")
    recipe = out / "tiny.yaml"
    recipe.write_text(yaml.safe_dump(TINY))
    for name, iterations in (("run", "3"), ("longer", "6")):
        options = ["--training.iterations", iterations, "--training.log_every", "1"]
        assert main(["train", str(recipe), "--out", str(out / name), *options]) == 0
    return out / "run", out / "longer"


@pytest.mark.slow
@pytest.mark.parametrize("name", SIDE_FILES)
def test_a_run_goes_on_without_any_file_beside_its_checkpoints(
    name: str, trained: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, damage in enumerate(SIDE_FILES[name]):
        run = Path(shutil.copytree(trained[0], tmp_path / str(number)))
        damage(run / name)
        capsys.readouterr()
        assert main(["train", "--resume", str(run), "--training.iterations", "6"]) == 0, capsys.readouterr().err
        assert_same_weights(run, trained[1])
        iterations = [line["iteration"] for line in read_metrics(run / "metrics.jsonl") if line["kind"] == "training"]
        assert iterations[-3:] == [4, 5, 6]
        assert json.loads((run / "environment.json").read_text())["starts"]
        if name in ("metrics.jsonl", "environment.json", "events") and damage is not Path.unlink:
            assert (run / f"{name}.damaged").exists()
            assert f"{name}: is damaged; it is kept as {name}.damaged" in capsys.readouterr().err
