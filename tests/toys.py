"""Small networks and tasks for tests, the command line in processes of its own, and run folders that are changed."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

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


STEP = 1e-9  # of the finite differences: tiny, because a ReLU or a maximum may flip; float64 leaves 1e-7 of rounding


def assert_finite_differences(
    learner: md.Learner,
    episode: md.Episode,
    groups: Mapping[str, Sequence[str]],
    source: md.NoiseSource | None = None,
    *,
    loss: Callable[[], Tensor] | None = None,
    gradients: Mapping[str, Tensor] | None = None,
    step: float = STEP,
    tolerance: float = 1e-4,
) -> None:
    """Hold the meta-gradient against differences of the loss, in a random direction within each group of parameters."""
    loss = loss or (lambda: learner.loss(episode, generator=source))
    gradients = gradients or learner.task_gradient(episode, generator=source).gradients
    parameters = dict(learner.named_parameters())
    for group, names in groups.items():
        g = torch.Generator().manual_seed(3)
        direction = {n: torch.randn(parameters[n].shape, generator=g, dtype=torch.float64) for n in names}
        expected = sum((gradients[n] * direction[n]).sum().item() for n in names)
        losses = []
        for move in (step, -2 * step, step):  # to p + h·d, to p − h·d, and back
            with torch.no_grad():
                for n in names:
                    parameters[n].add_(direction[n], alpha=move)
            losses.append(loss().item())
        measured = (losses[0] - losses[1]) / (2 * step)
        assert abs(measured - expected) < tolerance * (abs(expected) + 1e-2), (group, measured, expected)
        assert abs(expected) > tolerance, f"{group}: a direction without effect shows nothing"


def assert_batched_equals_loop(learner: md.GradientLearner, episodes: Sequence[md.Episode] | None = None) -> None:
    """Hold tasks that are run side by side against the same tasks one after the other."""
    episodes = episodes or [make_episode(seed=seed) for seed in range(3)]
    noises = [md.SeededNoise(seed) for seed in range(len(episodes))]
    with patch.object(type(learner), "task_gradient", side_effect=AssertionError("one by one")):
        batched = learner.task_gradients(episodes, noises)
    loop = [learner.task_gradient(e, generator=n) for e, n in zip(episodes, noises, strict=True)]
    assert not torch.allclose(loop[0].loss, loop[1].loss)
    # Gradients are of size 0.01 to 1, but for biases before a normalisation, which are nothing but rounding.
    for a, b in zip(batched, loop, strict=True):
        torch.testing.assert_close(a.loss, b.loss, rtol=1e-10, atol=1e-12)
        assert a.accuracy == b.accuracy
        assert a.buffers == b.buffers
        assert a.gradients.keys() == b.gradients.keys()
        for name in a.gradients:
            torch.testing.assert_close(a.gradients[name], b.gradients[name], rtol=1e-10, atol=1e-10, msg=name)


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
    """Let the system refuse to write more than that many bytes to a file, as a full disk would.

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


def start(*arguments: str | Path, processes: int = 0, restarts: int = 0) -> subprocess.Popen[str]:
    """Start the command line in a process of its own, or in several by torchrun, which may start them again."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)] if processes else []
    torchrun += ["--max-restarts", str(restarts)] if restarts else []
    return subprocess.Popen(
        [sys.executable, *torchrun, "-m", "metadropout", *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Tests in a shell's background job inherit that Ctrl-C is ignored; a user's terminal does not.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
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


class SmoothModel(nn.Module):
    """A model without kinks or normalisations, so that finite differences are exact to many digits."""

    def __init__(self, way: int = 3) -> None:
        super().__init__()
        self.hidden = nn.Linear(256, 5)
        self.head = nn.Linear(5, way)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.hidden(x.flatten(1))))  # type: ignore[no-any-return]


def smooth_model(scale: float = 0.3) -> SmoothModel:
    torch.manual_seed(0)
    model = SmoothModel().double()
    randomise(model, scale=scale)
    return model


def grouped(names: Iterable[str], *prefixes: str) -> dict[str, list[str]]:
    """Sort parameters by how their names begin."""
    names = list(names)
    return {prefix: [name for name in names if name.startswith(prefix)] for prefix in prefixes}
