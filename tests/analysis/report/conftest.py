"""Tiny runs for reports: trained, tested, attacked and drawn once, and copied by tests that change them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from PIL import Image

from metadropout.cli import main

TINY = [
    "--learner.steps", "1", "--training.meta_batch", "1", "--training.validation_episodes", "2",
    "--training.iterations", "2", "--training.log_every", "1", "--training.validate_every", "1",
    "--network.channels", "2", "--episode.query", "2", "--episode.way", "3", "--machine.threads", "1",
    "--data.train_classes", "6", "--data.validation_classes", "6", "--data.test_classes", "6",
]  # fmt: skip


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the runs `maml`, `maml-1` (seed 1) and `metadropout`; not to be changed."""
    pytest.importorskip("matplotlib")
    folder = tmp_path_factory.mktemp("runs")
    for name, row, seed in (("maml", "maml", "0"), ("maml-1", "maml", "1"), ("metadropout", "metadropout", "0")):
        run = str(folder / name)
        assert main(["train", f"glyphs-5way-1shot-{row}", "--out", run, "--seed", seed, *TINY]) == 0
        assert main(["evaluate", run, "--episodes", "4", "--mc-samples", "2"]) == 0
    run = str(folder / "metadropout")
    attack = ["--norm", "linf", "--epsilon", "0.01", "0.1", "--steps", "2", "--mc-samples", "2"]
    assert main(["attack", run, "--episodes", "2", *attack]) == 0
    assert main(["figures", run, "--only", "noise"]) == 0
    picture = folder / "metadropout" / "figures" / "noise.png"
    with Image.open(picture) as image:  # smaller, as each test reads it again
        image.resize((200, 80)).save(picture)
    return folder


@pytest.fixture
def runs(trained: Path, tmp_path: Path) -> list[Path]:
    """Copies of the three runs that a test may change."""
    names = ("maml", "maml-1", "metadropout")
    return [Path(shutil.copytree(trained / name, tmp_path / "runs" / name)) for name in names]
