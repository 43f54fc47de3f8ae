"""Temperatures: the likeliest one is found, and it makes confidence tell how often answers are right."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from toy_weights import toy_weights

from metadropout.data import split_classes
from metadropout.data.arrays import ArrayImages
from metadropout.weights.calibration import Answers, best_temperature, fit_temperatures


def overconfident(factor: float) -> Answers:
    """Return answers whose labels are drawn from the probabilities that logits have, which are then multiplied."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(20_000, 5, generator=generator)
    labels = torch.multinomial(logits.softmax(dim=1), 1, generator=generator)[:, 0]
    return Answers((factor * logits).log_softmax(dim=1), labels)


@pytest.mark.parametrize("factor", [0.5, 1.0, 4.0])
def test_the_temperature_undoes_what_logits_were_multiplied_by(factor: float) -> None:
    assert best_temperature(overconfident(factor)) == pytest.approx(factor, rel=0.05)


def test_the_temperature_lowers_the_calibration_error_and_changes_no_answer() -> None:
    before = overconfident(4)
    after = before.tempered(best_temperature(before))
    assert after.ece < 0.02
    assert before.ece > 0.2
    assert after.nll < before.nll
    assert torch.equal(after.log_probabilities.argmax(dim=1), before.log_probabilities.argmax(dim=1))


def test_temperatures_are_fitted_on_validation_classes_where_there_are_some(tmp_path: Path) -> None:
    images = torch.rand(60, 1, 28, 28, generator=torch.Generator().manual_seed(0)).numpy()
    splits = split_classes(ArrayImages(images, [n % 20 for n in range(60)]), validation_share=0.3, test_share=0.3)
    options = {"way": 5, "shot": 1, "query": 1, "episodes": 2, "mc_samples": 2}
    learner = toy_weights(tmp_path).learner()
    fitted = fit_temperatures(learner, splits, **options)  # type: ignore[arg-type]
    assert [t.protocol for t in fitted] == ["inductive", "transductive"]
    assert {t.fitted_on for t in fitted} == {"validation"}
    few = split_classes(ArrayImages(images, [n % 20 for n in range(60)]), validation_share=0.1, test_share=0.3)
    assert {t.fitted_on for t in fit_temperatures(learner, few, **options)} == {"train"}  # type: ignore[arg-type]
