"""What all tests share: one thread, so that results do not depend on the machine, and small learners."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from toys import NETWORKS, make_episode, randomise

import metadropout as md


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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
