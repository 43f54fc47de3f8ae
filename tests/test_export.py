"""Exported classifiers answer as the module does, for any number of images, in programs without this library."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from toy_weights import TEMPERATURE, drawings, toy_weights

import metadropout as md
from metadropout.export import save_model, to_onnx

IMAGES, LABELS = drawings(6)
NEW = drawings(9, seed=1)[0][:, None]


@pytest.fixture(scope="module", params=["maml", "protonet"])
def classifier(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> md.FewShotClassifier:
    perturbation = "metadropout" if request.param == "maml" else "none"
    folder = tmp_path_factory.mktemp("weights")
    weights = toy_weights(folder, learner=request.param, perturbation=perturbation, temperatures=(TEMPERATURE,))
    return md.FewShotClassifier(weights, mc_samples=2).fit(IMAGES, LABELS)


def answers(classifier: md.FewShotClassifier, count: int) -> Any:
    with torch.no_grad():
        return classifier.module_(torch.from_numpy(NEW[:count])).numpy()


def test_a_program_of_torch_export_answers_as_the_module(classifier: md.FewShotClassifier, tmp_path: Path) -> None:
    path = save_model(classifier, tmp_path / "model.pt2")
    extra = {"metadropout.json": ""}
    with path.open("rb") as file:
        program = torch.export.load(io.BytesIO(file.read()), extra_files=extra).module()
    for count in (1, 2, 9):
        found = program(torch.from_numpy(NEW[:count])).detach().numpy()
        assert np.abs(found - answers(classifier, count)).max() < 1e-5
    assert json.loads(extra["metadropout.json"])["classes"] == ["kind 0", "kind 1", "kind 2"]


def test_an_onnx_model_answers_as_the_module(classifier: md.FewShotClassifier, tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime")
    session = runtime.InferenceSession(save_model(classifier, tmp_path / "model.onnx"))
    for count in (1, 2, 9):
        (found,) = session.run(["log_probabilities"], {"images": NEW[:count]})
        assert np.abs(found - answers(classifier, count)).max() < 1e-5
    metadata = session.get_modelmeta().custom_metadata_map
    assert json.loads(metadata["classes"]) == ["kind 0", "kind 1", "kind 2"]
    assert metadata["values"] == "ink = 1 on paper = 0"


def test_what_cannot_be_exported_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = toy_weights(tmp_path)
    with pytest.raises(md.ConfigError, match="call fit"):
        to_onnx(md.FewShotClassifier(weights))
    together = md.FewShotClassifier(weights, inductive=False, mc_samples=1).fit(IMAGES, LABELS)
    with pytest.raises(md.ConfigError, match="inductive=True"):
        save_model(together, tmp_path / "model.pt2")
    with pytest.raises(md.ConfigError, match="ends in"):
        save_model(together, tmp_path / "model.pth")
    monkeypatch.setitem(__import__("sys").modules, "onnxscript", None)
    with pytest.raises(md.MetadropoutError, match=r"metadropout\[onnx\]"):
        to_onnx(together)
