"""Training from Python: any module, any images, with all that the command line gives."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from toys import UsersModel, assert_same_weights, weights

import metadropout as md
from metadropout.cli import main
from metadropout.ops import kernels
from metadropout.training.checkpoints import iteration_of, latest_checkpoint

PROGRAM = textwrap.dedent("""
    import sys
    import numpy as np, torch
    import metadropout as md
    from toys import UsersModel

    rng = np.random.default_rng(0)
    images, labels = rng.random((120, 1, 16, 16), dtype=np.float32), np.arange(120) % 12
    splits = md.split_classes(md.ArrayImages(images, labels), validation_share=0.2, seed=0)
    torch.manual_seed(0)
    model = UsersModel(way=3)
    learner = md.MAML(model, md.MetaDropout(model), inner_lr=0.05, steps=2)
    md.fit(learner, splits, sys.argv[1], way=2, shot=1, query=3, train_way=3, iterations=30, checkpoint_every=1,
           meta_batch=2, validate_every=15, validation_episodes=2, validation_samples=2, threads=1)
""")


def run_program(folder: Path) -> subprocess.Popen[bytes]:
    path = [str(Path(__file__).parent.parent), *sys.path]
    code = f"import sys; sys.path[:0] = {path!r}\n{PROGRAM}"
    return subprocess.Popen([sys.executable, "-c", code, str(folder)], stderr=subprocess.PIPE, stdout=subprocess.PIPE)


def test_a_users_model_on_users_arrays_is_killed_and_resumed_to_the_same_weights(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    first = run_program(whole)
    _, err = first.communicate(timeout=200)
    assert first.returncode == 0, err
    process = run_program(killed)
    end = time.monotonic() + 120
    while not ((path := latest_checkpoint(killed / "checkpoints")) and iteration_of(path) >= 3):
        assert time.monotonic() < end
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)
    process.kill()
    process.communicate()
    resumed = run_program(killed)
    _, err = resumed.communicate(timeout=200)
    assert resumed.returncode == 0, err
    assert b"resuming after iteration" in err
    assert_same_weights(whole, killed)
    assert {"config.yaml", "data.json", "metrics.jsonl", "curves.png", "README.md"} <= {p.name for p in whole.iterdir()}


@pytest.fixture
def splits() -> md.Splits:
    rng = np.random.default_rng(1)
    images = rng.integers(0, 256, (90, 16, 16), dtype=np.uint8)
    return md.split_classes(md.ArrayImages(images, [f"class {n % 9}" for n in range(90)]), validation_share=0.25)


def make_learner(way: int = 3) -> md.MAML:
    torch.manual_seed(0)
    model = UsersModel(way=way)
    return md.MAML(model, md.MetaDropout(model), inner_lr=0.05, steps=2)


OPTIONS = {"way": 2, "query": 3, "train_way": 3, "meta_batch": 2, "threads": 1, "validation_episodes": 2}


def test_testing_shows_how_far_it_is_unless_told_otherwise(
    splits: md.Splits, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("metadropout.cli.progress.SECONDS_BETWEEN_LINES", 0.0)
    for quiet, seen in [(False, "testing: 3/3"), (True, "")]:
        md.evaluate(make_learner(), splits.test, way=2, query=3, episodes=3, mc_samples=1, quiet=quiet)
        err = capsys.readouterr().err
        assert seen in err
        assert bool(seen) == bool(err)


def test_a_run_is_loaded_with_the_learner_it_was_made_with(
    splits: md.Splits, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    learner = make_learner()
    assert md.fit(learner, splits, folder, iterations=2, **OPTIONS).iteration == 2
    advised = f'md.evaluate(md.load_run("{folder}", learner=learner).learner, splits.test, ...)'
    assert advised in capsys.readouterr().out
    assert advised in (folder / "README.md").read_text()
    assert "metadropout evaluate" not in (folder / "README.md").read_text()
    loaded = md.load_run(folder, learner=make_learner(), splits=splits)
    assert loaded.iteration == 2
    for (name, a), b in zip(learner.named_parameters(), loaded.learner.parameters(), strict=True):
        assert torch.equal(a, b), name
    results = [
        md.evaluate(one, splits.test, way=2, query=3, episodes=3, mc_samples=2) for one in (learner, loaded.learner)
    ]
    assert results[0] == results[1]
    with pytest.raises(md.ConfigError, match=r"give load_run\(..., learner=...\)"):
        md.load_run(folder)
    assert main(["evaluate", str(folder), "--episodes", "2"]) == 1
    assert "md.load_run(folder, learner=...)" in capsys.readouterr().err


def test_fitting_again_goes_on_and_another_run_in_the_folder_is_refused(splits: md.Splits, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    md.fit(make_learner(), splits, folder, iterations=1, **OPTIONS)
    assert md.fit(make_learner(), splits, folder, iterations=2, **OPTIONS).iteration == 2
    at_once = tmp_path / "at-once"
    md.fit(make_learner(), splits, at_once, iterations=2, **OPTIONS)
    first, second = weights(folder), weights(at_once)
    assert all(torch.equal(first[name], second[name]) for name in first)
    with pytest.raises(md.ConfigError, match=r"holds a run with training\.meta_lr 0\.001, not 0\.01"):
        md.fit(make_learner(), splits, folder, iterations=3, meta_lr=0.01, **OPTIONS)
    with pytest.raises(md.ConfigError, match="has no option 'iteration'"):
        md.fit(make_learner(), splits, folder, iteration=3)


def test_other_images_in_a_runs_data_are_refused(splits: md.Splits, tmp_path: Path) -> None:
    md.fit(make_learner(), splits, tmp_path / "run", iterations=1, **OPTIONS)
    rng = np.random.default_rng(2)
    others = md.ArrayImages(rng.integers(0, 256, (90, 16, 16), dtype=np.uint8), [f"class {n % 9}" for n in range(90)])
    with pytest.raises(md.DataError, match="the classes are the same, but their images are not"):
        md.fit(
            make_learner(), md.split_classes(others, validation_share=0.25), tmp_path / "run", iterations=2, **OPTIONS
        )


def test_bad_arrays_are_refused_with_the_fix() -> None:
    labels = [0, 1]
    for images, words in (
        (np.zeros((2, 4, 4), np.int64), r"images / 255"),
        (np.zeros((2, 4)), r"it must be \(n, channels, height, width\)"),
        (np.full((2, 4, 4), np.nan), "not finite"),
        (np.zeros((3, 4, 4)), "there are 3 images, but 2 labels"),
    ):
        with pytest.raises(md.DataError, match=words):
            md.ArrayImages(images, labels)
    with pytest.raises(md.DataError, match="written alike"):
        md.ArrayImages(np.zeros((2, 4, 4)), [1, "1"])
    with pytest.raises(md.DataError, match="too few"):
        md.split_classes(md.ArrayImages(np.zeros((2, 4, 4)), [0, 1]), validation_share=0.5)


def test_a_run_notes_how_it_computes_convolutions_and_keeps_to_what_is_given(tmp_path: Path) -> None:
    splits = md.open_dataset("glyphs", train_classes=6, validation_classes=5, test_classes=5)
    found = []
    for number, given in enumerate((None, {"16x16x14x14": "winograd-2"})):
        torch.manual_seed(0)
        learner = md.MAML(md.Conv4(3, in_channels=1, image_size=28, channels=16), steps=1)
        options = {"way": 3, "query": 2, "meta_batch": 1, "threads": 1, "validation_episodes": 1}
        run = md.fit(learner, splits, tmp_path / str(number), iterations=1, convolutions=given, **options).run
        found.append(run.config.training.convolutions)
        assert (
            md.fit(learner, splits, run.folder, iterations=2, **options).run.config.training.convolutions == found[-1]
        )
    assert found[1] == {"16x16x14x14": "winograd-2"}
    assert found[0] is not None
    assert (set(found[0]) >= {"16x16x14x14", "16x16x7x7"}) == kernels.available()
