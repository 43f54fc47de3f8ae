"""What all tests share: one thread, so that results do not depend on the machine, and small learners."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml
from torch import nn
from toys import NETWORKS, make_episode, randomise

import metadropout as md
from metadropout.config import AXES
from metadropout.registry import REGISTRIES, imported

TINY = {
    "data": {"name": "glyphs", "train_classes": 12, "validation_classes": 6, "test_classes": 6},
    "episode": {"way": 3, "query": 2},
    "network": {"channels": 4},
    "learner": {"steps": 2},
    "training": {
        "iterations": 12,
        "meta_batch": 2,
        "checkpoint_every": 3,
        "log_every": 2,
        "validate_every": 4,
        "validation_episodes": 3,
        "validation_samples": 2,
    },
    "machine": {"device": "cpu", "threads": 1},
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _own_parts_stay_in_their_test() -> Iterator[None]:
    before, modules = {axis: dict(AXES[axis]) for axis in AXES}, list(imported)
    yield
    for axis, parts in before.items():
        REGISTRIES[axis].clear()
        REGISTRIES[axis].update(parts)
    imported[:] = modules


@pytest.fixture
def episode() -> md.Episode:
    return make_episode()


@pytest.fixture(params=list(NETWORKS))
def network(request: pytest.FixtureRequest) -> nn.Module:
    torch.manual_seed(0)
    model = NETWORKS[request.param]().double()
    randomise(model, scale=0.1)
    return model


@pytest.fixture
def conv4() -> md.Conv4:
    torch.manual_seed(0)
    model = md.Conv4(way=3, in_channels=1, image_size=16, channels=4).double()
    randomise(model)
    return model


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(TINY))
    return path
