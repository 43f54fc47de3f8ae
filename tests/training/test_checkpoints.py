"""Checkpoints: written atomically, and never trusted when damaged or foreign."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import safetensors.torch
import torch
from toys import make_episode, small_files

import metadropout as md
from metadropout.training.checkpoints import Progress, latest_checkpoint, load_checkpoint, save_checkpoint


def make_learner(seed: int = 0, channels: int = 4) -> tuple[md.MAML, torch.optim.Adam]:
    torch.manual_seed(seed)
    network = md.Conv4(way=3, image_size=16, channels=channels)
    learner = md.MAML(network, md.MetaDropout(network), steps=1)
    return learner, torch.optim.Adam(learner.parameters(), lr=1e-3)


def outer_step(learner: md.MAML, optimizer: torch.optim.Adam, seed: int) -> None:
    result = learner.task_gradient(make_episode(seed=seed, dtype=torch.float32), generator=md.SeededNoise(seed))
    for name, parameter in learner.named_parameters():
        parameter.grad = result.gradients[name]
    optimizer.step()


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    learner, optimizer = make_learner()
    outer_step(learner, optimizer, 0)
    path = tmp_path / "iteration-00000001.safetensors"
    save_checkpoint(path, learner, optimizer, Progress(1, 2.5, 0.5, 1))
    return path


def test_a_loaded_state_goes_on_exactly_like_the_saved_one(saved: Path) -> None:
    expected, expected_optimizer = make_learner()
    for seed in range(3):
        outer_step(expected, expected_optimizer, seed)
    learner, optimizer = make_learner(seed=9)
    assert load_checkpoint(saved, learner, optimizer) == Progress(1, 2.5, 0.5, 1)
    for seed in (1, 2):
        outer_step(learner, optimizer, seed)
    for (name, a), b in zip(learner.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("where", [0, 3, 200, -3], ids=["length", "header start", "header", "data"])
def test_one_flipped_bit_is_noticed(saved: Path, where: int) -> None:
    data = bytearray(saved.read_bytes())
    data[where] ^= 1
    saved.write_bytes(data)
    learner, _ = make_learner(seed=9)
    before = [p.clone() for p in learner.parameters()]
    with pytest.raises(
        md.CheckpointError, match=r"iteration-00000001\.safetensors: (is damaged|was not|has checkpoint)"
    ):
        load_checkpoint(saved, learner)
    assert all(torch.equal(a, b) for a, b in zip(learner.parameters(), before, strict=True))


@pytest.mark.parametrize("keep", [0.0, 0.3, 0.99])
def test_a_truncated_file_is_refused(saved: Path, keep: float) -> None:
    data = saved.read_bytes()
    saved.write_bytes(data[: int(len(data) * keep)])
    with pytest.raises(md.CheckpointError, match="is damaged or not a checkpoint"):
        load_checkpoint(saved, make_learner()[0])


@pytest.mark.timeout(20)
def test_a_pipe_or_an_endless_file_is_refused_without_waiting(saved: Path) -> None:
    saved.unlink()
    os.mkfifo(saved)
    with pytest.raises(md.CheckpointError, match="it is a named pipe, not a regular file"):
        load_checkpoint(saved, make_learner()[0])
    saved.unlink()
    with saved.open("wb") as file:
        file.truncate(2**40)  # takes no room on the disk
    with pytest.raises(md.CheckpointError, match=r"it has more than the .* bytes allowed"):
        load_checkpoint(saved, make_learner()[0])


def test_a_damaged_newest_file_names_the_one_before_it(saved: Path) -> None:
    newest = saved.with_name("iteration-00000002.safetensors")
    newest.write_bytes(saved.read_bytes()[:-1])
    with pytest.raises(md.CheckpointError, match=r"delete it to go on from iteration-00000001\.safetensors"):
        load_checkpoint(newest, make_learner()[0])
    assert latest_checkpoint(saved.parent) == newest


def test_a_foreign_file_a_pickle_and_another_model_are_refused(tmp_path: Path, saved: Path) -> None:
    learner, _ = make_learner()
    foreign = tmp_path / "foreign.safetensors"
    safetensors.torch.save_file({"weight": torch.zeros(2)}, foreign)
    with pytest.raises(md.CheckpointError, match="was not written by metadropout"):
        load_checkpoint(foreign, learner)
    pickle = tmp_path / "pickle.safetensors"
    torch.save({"weight": torch.zeros(2)}, pickle)
    with pytest.raises(md.CheckpointError, match="is damaged or not a checkpoint"):
        load_checkpoint(pickle, learner)
    with pytest.raises(md.CheckpointError, match=r"another model: 'network.*' has shape"):
        load_checkpoint(saved, make_learner(channels=5)[0])
    network = md.Conv4(way=3, image_size=16, channels=4)
    with pytest.raises(md.CheckpointError, match="another model: 'perturbation"):
        load_checkpoint(saved, md.MAML(network))
    with pytest.raises(md.CheckpointError, match="there is no such checkpoint"):
        load_checkpoint(tmp_path / "missing.safetensors", learner)


def test_a_full_disk_leaves_the_old_file_and_no_remains(saved: Path) -> None:
    learner, optimizer = make_learner()
    before = saved.read_bytes()
    message = "cannot be written: File too large; the one before it is kept"
    with small_files(1000), pytest.raises(md.TrainingError, match=message):
        save_checkpoint(saved, learner, optimizer, Progress(2, 0.0))
    assert saved.read_bytes() == before
    assert list(saved.parent.iterdir()) == [saved]
