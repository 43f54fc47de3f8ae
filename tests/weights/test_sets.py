"""Sets of weights: read and written whole, refused when anything is wrong, and the shipped ones as their cards say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
from toy_weights import TEMPERATURE, toy_weights

import metadropout as md
from metadropout.cli import main
from metadropout.training.checkpoints import tensors_digest
from metadropout.weights.sets import MAX_BYTES, SHIPPED, SUFFIX


def contents(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    with safetensors.safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118


def rewritten(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> Path:
    """Write a file whose checksum is right, whatever else is not."""
    metadata = {**metadata, "sha256": tensors_digest(tensors, metadata)}
    path.write_bytes(safetensors.torch.save(tensors, metadata))
    return path


def changed(metadata: dict[str, str], part: str, **values: Any) -> dict[str, str]:
    return {**metadata, part: json.dumps({**json.loads(metadata[part]), **values})}


def test_a_set_is_read_as_it_was_written(tmp_path: Path) -> None:
    written = toy_weights(tmp_path, temperatures=(TEMPERATURE,))
    read = md.load_weights(tmp_path / "toy.safetensors")
    assert read.card == written.card
    assert read.name == read.card.name == "toy"
    assert read.image_shape == (1, 28, 28)
    assert read.card.temperature("inductive") == 2
    assert read.card.temperature("transductive") == 1
    for name, tensor in written.learner().state_dict().items():
        assert torch.equal(tensor, read.learner().state_dict()[name])


def test_a_learner_of_a_set_is_the_callers_own(tmp_path: Path) -> None:
    weights = toy_weights(tmp_path)
    learner = weights.learner()
    with torch.no_grad():
        for parameter in learner.parameters():
            parameter.zero_()
    assert any(parameter.any() for parameter in weights.learner().parameters())


def test_the_machine_of_a_run_is_not_in_the_file(tmp_path: Path) -> None:
    toy_weights(tmp_path)
    _, metadata = contents(tmp_path / "toy.safetensors")
    assert not {"machine"} & json.loads(metadata["config"]).keys()
    assert "directory" not in json.loads(metadata["config"])["data"]


@pytest.mark.parametrize("place", [10, 300, -5])
def test_a_changed_byte_is_noticed(tmp_path: Path, place: int) -> None:
    toy_weights(tmp_path)
    path = tmp_path / "toy.safetensors"
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
    with pytest.raises(md.CheckpointError, match=r"damaged|not a set|version"):
        md.load_weights(path)


def test_a_file_cut_short_is_refused(tmp_path: Path) -> None:
    toy_weights(tmp_path)
    path = tmp_path / "toy.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(md.CheckpointError, match="damaged"):
        md.load_weights(path)


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    path = rewritten(tmp_path / "other.safetensors", {"a": torch.zeros(1)}, {"format": "pt"})
    with pytest.raises(md.CheckpointError, match="not a set of weights"):
        md.load_weights(path)


def test_too_large_a_file_is_not_even_opened(tmp_path: Path) -> None:
    path = tmp_path / "large.safetensors"
    with path.open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    with pytest.raises(md.CheckpointError, match="more than the"):
        md.load_weights(path)


def test_a_network_that_the_weights_do_not_fit_is_refused_before_it_takes_memory(tmp_path: Path) -> None:
    toy_weights(tmp_path)
    tensors, metadata = contents(tmp_path / "toy.safetensors")
    config = json.loads(metadata["config"])
    config["network"]["channels"] = 4096  # a gigabyte of weights
    path = rewritten(tmp_path / "toy.safetensors", tensors, {**metadata, "config": json.dumps(config)})
    with pytest.raises(md.CheckpointError, match="has shape"):
        md.load_weights(path)


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    toy_weights(tmp_path)
    tensors, metadata = contents(tmp_path / "toy.safetensors")
    tensors["network.head.bias"][0] = float("nan")
    with pytest.raises(md.CheckpointError, match="not finite"):
        md.load_weights(rewritten(tmp_path / "toy.safetensors", tensors, metadata))


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    toy_weights(tmp_path)
    tensors, metadata = contents(tmp_path / "toy.safetensors")
    del tensors["network.head.bias"]
    with pytest.raises(md.CheckpointError, match=r"network\.head\.bias"):
        md.load_weights(rewritten(tmp_path / "toy.safetensors", tensors, metadata))


@pytest.mark.parametrize(
    ("part", "values", "message"),
    [
        ("card", {"seed": "x"}, "seed"),
        ("card", {"name": 3}, "name"),
        ("config", {"learner": {"name": "none such"}}, "learner.name"),
        ("config", {"network": {"name": "os.system"}}, "network.name"),
    ],
)
def test_a_card_or_configuration_of_something_else_is_refused(
    tmp_path: Path, part: str, values: dict[str, Any], message: str
) -> None:
    toy_weights(tmp_path)
    tensors, metadata = contents(tmp_path / "toy.safetensors")
    path = rewritten(tmp_path / "toy.safetensors", tensors, changed(metadata, part, **values))
    with pytest.raises(md.CheckpointError, match=message):
        md.load_weights(path)


def test_an_unknown_name_gets_the_list_of_known_ones() -> None:
    with pytest.raises(md.ConfigError, match="omniglot-5way-1shot-metadropout"):
        md.load_weights("omniglot-5way")


def test_a_runs_folder_is_told_apart(tmp_path: Path) -> None:
    with pytest.raises(md.ConfigError, match="metadropout export"):
        md.load_weights(tmp_path)


@pytest.mark.parametrize("name", md.weights.available())
def test_a_shipped_set_is_measured_small_and_has_its_card_beside_it(name: str) -> None:
    weights = md.load_weights(name)
    assert (SHIPPED / f"{name}{SUFFIX}").stat().st_size < 2 * 2**20
    assert (SHIPPED / f"{name}.md").read_text() == weights.card.to_markdown()
    assert weights.name == name
    assert {result.protocol for result in weights.card.measured} == {"inductive", "transductive"}
    assert all(result.episodes >= 50 for result in weights.card.measured)
    assert {fitted.protocol for fitted in weights.card.temperatures} == {"inductive", "transductive"}
    assert name.startswith(weights.card.data.replace("_", "-"))
    assert f"{weights.card.way}way-{weights.card.shot}shot" in name


def test_the_command_lists_the_shipped_sets_and_shows_a_card(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["weights"]) == 0
    listed = capsys.readouterr().out
    for name in md.weights.available():
        card = md.load_weights(name).card
        assert name in listed
        assert str(card.measured[0]) in listed
        assert card.checksum[:12] in listed
        assert card.licence[:20] in listed
    assert main(["weights", md.weights.available()[0]]) == 0
    assert capsys.readouterr().out == md.load_weights(md.weights.available()[0]).card.to_markdown()
