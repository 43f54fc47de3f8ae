"""Signal and noise of meta-gradients, with and without the second derivative of normalisation."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from metadropout.analysis.gradients import (
    PartGradients,
    _compare,
    as_rows,
    measure_gradients,
    open_state,
    plot_gradients,
)
from metadropout.cli import main
from metadropout.errors import ConfigError


def drawn(tasks: int, mean: float, scatter: float, seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [(mean + scatter * rng.standard_normal(500)).astype(np.float32) for _ in range(tasks)]


def test_signal_to_noise_and_direction_are_those_of_the_distribution() -> None:
    exact, other = drawn(400, 0.3, 1.0, seed=0), drawn(400, 0.6, 1.0, seed=1)
    found = _compare("MAML", 0, "network", {"exact": exact, "public": other})
    for which, expected in (("exact", 0.09), ("public", 0.36)):  # squared mean over variance, per value
        assert abs(found.snr[which].value - expected) < 3 * found.snr[which].error + 1e-3
        assert found.snr[which].error < 0.01
    assert found.cosine.value == pytest.approx(1, abs=0.01)
    assert found.size.value == pytest.approx(2, abs=0.03)


def test_without_a_signal_there_is_no_direction() -> None:
    noise = drawn(4, 0.0, 1.0, seed=3)
    found = _compare("MAML", 0, "network", {"exact": noise, "public": [-g for g in noise]})
    assert found.task_cosine == pytest.approx(-1)
    assert "no signal" in next(as_rows([found]))


def test_both_gradients_of_initial_and_of_trained_weights_are_measured(recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert main(["train", str(recipe), "--out", str(run), "--training.iterations", "1"]) == 0
    found: list[PartGradients] = []
    for name in (str(recipe), str(run)):
        found += measure_gradients(open_state(name), tasks=4)
    assert [(m.iteration, m.part) for m in found] == [
        (iteration, part) for iteration in (0, 1) for part in ("network", "head", "perturbation")
    ]
    assert all(m.tasks == 4 and -1 <= m.task_cosine < 1 for m in found)
    path = plot_gradients(found, tmp_path / "gradient.png")
    assert path is not None
    assert path.stat().st_size > 10_000


def test_learners_that_do_not_differentiate_their_steps_are_refused() -> None:
    with pytest.raises(ConfigError, match="there is nothing to leave out"):
        open_state("glyphs-5way-1shot-protonet")
    with pytest.raises(ConfigError, match="at least 3"):
        measure_gradients(open_state("glyphs-5way-1shot-maml"), tasks=2)


def test_the_command_prints_and_keeps_what_it_measures(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["bench", "gradient", str(recipe), "--tasks", "3", "--out", str(out), "--markdown"]) == 0
    printed = capsys.readouterr().out
    assert "| MAML + Meta-dropout, 0 iterations: perturbation |" in printed
    assert {path.name for path in out.iterdir()} == {"gradient.json", "gradient.png"}
    assert main(["bench", "gradient"]) == 1
    assert "bench gradient needs a run or a recipe" in capsys.readouterr().err
    assert main(["bench", "growth", str(recipe)]) == 1
