"""A run that an earlier version began goes on as it would have gone on there."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from toys import weights

from metadropout.cli import main
from metadropout.training.checkpoints import read_checkpoint

BEGUN = Path(__file__).parents[1] / "golden" / "earlier_run"
"""Two iterations by the flat version of this package (fbc4f9f), and the state that it reached after four."""


def test_a_run_of_the_version_before_the_redesign_ends_where_that_version_ended(tmp_path: Path) -> None:
    shutil.copytree(BEGUN, tmp_path / "run", ignore=shutil.ignore_patterns("expected*"))
    before = weights(tmp_path / "run")
    assert main(["train", "--resume", str(tmp_path / "run"), "--training.iterations", "4"]) == 0
    found, expected = weights(tmp_path / "run"), read_checkpoint(BEGUN / "expected.safetensors")[0]
    assert found.keys() == expected.keys()
    for name in expected:
        # The gradient of a bias before a normalisation is rounding alone, which Adam makes into steps of full size. On
        # the processor that wrote these files all are the same, bit for bit; another one may round in another way.
        if not ("network.blocks" in name and name.endswith("conv.bias")):
            torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-4, msg=name)
    head = "learner.network.head.weight"
    assert (found[head] - before[head]).abs().max() > 1e-3
