"""Small networks and tasks for tests, the command line in processes of its own, and run folders that are changed."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor, nn
from torch.nn import functional as F

import metadropout as md
from metadropout.perturbations import PERTURBATIONS, Perturbation
from metadropout.training.checkpoints import latest_checkpoint, read_checkpoint

RESULT = "evaluation-test-2samples.json"
"""Where `evaluate --mc-samples 2` writes."""


class UsersModel(nn.Module):
    """A model as users write them: its own BatchNorm with running averages, a hidden linear layer, `view`, dropout."""

    def __init__(self, way: int = 3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, stride=2, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(4)
        self.body = nn.Sequential(nn.Conv2d(4, 6, 3, padding=1, groups=2), nn.GroupNorm(2, 6), nn.ReLU())
        self.hidden = nn.Linear(6 * 4, 8)
        self.dropout = nn.Dropout(0.5)
        self.fc = nn.Linear(8, way)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn(self.stem(x)))
        x = F.adaptive_avg_pool2d(self.body(x), 2)
        x = self.dropout(torch.tanh(self.hidden(x.view(x.size(0), -1))))
        return self.fc(x)


class Given(nn.Module):
    """Takes features in place of images and gives them back."""

    def __init__(self, features: int | None = None) -> None:
        super().__init__()
        self.features = features
        self.unused = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1)


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "conv4": lambda: md.Conv4(way=3, in_channels=1, image_size=16, channels=4),
    "resnet12": lambda: md.ResNet12(way=3, in_channels=1, image_size=16, channels=(3, 4, 5, 6)),
    "users-model": UsersModel,
}


def make_episode(
    way: int = 3,
    shot: int = 2,
    query: int = 2,
    size: int = 16,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    inductive: bool = False,
) -> md.Episode:
    g = torch.Generator().manual_seed(seed)

    def images(n: int) -> Tensor:
        return torch.rand(n, 1, size, size, generator=g, dtype=dtype)

    labels = torch.arange(way)
    support = images(way * shot), labels.repeat_interleave(shot)
    return md.Episode(*support, images(way * query), labels.repeat_interleave(query), inductive=inductive)


def given_task(way: int = 3, shot: int = 2, query: int = 4, features: int = 5) -> md.Episode:
    """Return a task whose images are features, for the network `Given`."""
    g = torch.Generator().manual_seed(3)
    labels = torch.arange(way)
    return md.Episode(
        torch.randn(way * shot, features, generator=g, dtype=torch.float64),
        labels.repeat_interleave(shot),
        torch.randn(way * query, features, generator=g, dtype=torch.float64),
        labels.repeat_interleave(query),
    )


def randomise(module: nn.Module, scale: float = 0.3, seed: int = 0) -> None:
    """Give all parameters values that are large enough for every path to matter."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=g, dtype=parameter.dtype) * scale)


DIVERGING = ["--perturbation.name", "vib", "--perturbation.kl_weight", "1000"]
DIVERGING += ["--learner.inner_lr", "1000", "--learner.steps", "5"]
"""Options with which the first inner loop overflows."""

PERTURBATION_OPTIONS: dict[str, dict[str, Any]] = {
    "combined": {"parts": [{"name": "metadropout"}, {"name": "mixup", "gamma": 1.0}]},
    "vib": {"kl_weight": 1e-3},
    "information-dropout": {"kl_weight": 1e-3},
}


def make_perturbation(name: str, network: nn.Module, **options: Any) -> Perturbation:
    """Build a perturbation by its name, with weights that matter."""
    torch.manual_seed(1)
    perturbation = PERTURBATIONS[name](network, **{**PERTURBATION_OPTIONS.get(name, {}), **options}).double()
    randomise(perturbation, scale=0.1, seed=1)
    return perturbation


@contextmanager
def small_files(limit: int) -> Iterator[None]:
    """Let the system refuse to write more than so many bytes to a file, as a full disk would.

    Only around the call under test: the limit also holds for a log file to which the tests' own output goes.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def weights(run: Path) -> dict[str, torch.Tensor]:
    path = latest_checkpoint(run / "checkpoints")
    assert path is not None
    return read_checkpoint(path)[0]


def assert_same_weights(a: Path, b: Path) -> None:
    first, second = weights(a), weights(b)
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name


def start(*arguments: str | Path, processes: int = 0) -> subprocess.Popen[str]:
    """Start the command line in a process of its own, or in several by torchrun."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)] if processes else []
    return subprocess.Popen(
        [sys.executable, *torchrun, "-m", "metadropout", *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for(condition: Callable[[], object], process: subprocess.Popen[str], seconds: float = 240) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()
        if time.monotonic() > end:
            process.terminate()
            raise AssertionError("the process did not get that far", process.communicate())
        time.sleep(0.01)


def finish(process: subprocess.Popen[str], seconds: float = 240) -> tuple[str, str]:
    """Wait for a process to end and return what it wrote; one that hangs is stopped, with its children."""
    try:
        return process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.terminate()
        raise AssertionError("the process did not end", process.communicate()) from None


def change_json(path: Path, change: Callable[[Any], object]) -> None:
    """Change what a JSON file holds."""
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def change_config(run: Path, section: str, **options: object) -> None:
    """Change options of a run."""
    config = yaml.safe_load((run / "config.yaml").read_text())
    config[section].update(options)
    (run / "config.yaml").write_text(yaml.safe_dump(config))
