"""Configurations: every mistake gets a message with the field and the fix."""

from __future__ import annotations

import inspect
import math
import typing
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import metadropout as md
from metadropout.config import AXES, FROM_DATA, PLAIN_SECTIONS, batches_tasks, build_learner, load_config, parse_config
from metadropout.data import ImageShape
from metadropout.options import options_of

MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown section": ({"learnr": {}}, "'learnr' is not a section; the sections are: description, seed, data"),
    "an unknown option": (
        {"learner": {"inner_rate": 1}},
        r"learner.inner_rate is not an option here; .* inner_lr, steps",
    ),
    "an unknown part": ({"learner": {"name": "sgd"}}, "learner.name is 'sgd'; known are: maml, metasgd"),
    "a wrong type": ({"learner": {"steps": "many"}}, "learner.steps is 'many': input should be a valid integer"),
    "a wrong choice": (
        {"perturbation": {"link": "relu"}},
        "perturbation.link is 'relu': input should be 'softplus' or",
    ),
    "a value out of range": ({"training": {"meta_batch": 0}}, "training.meta_batch is 0; it must be from 1 to 1000"),
    "one class": ({"episode": {"way": 1}}, "episode.way is 1; it must be from 2 to 10000"),
    "no rate": ({"training": {"meta_lr": 0}}, "training.meta_lr is 0; it must be above 0, up to 10"),
    "a seed that is no number": ({"seed": "x"}, "seed is 'x': input should be a valid integer"),
    "a seed that is no whole number": ({"seed": 1.7}, "seed is 1.7: input should be a valid integer"),
    "a seed that is a truth value": ({"seed": True}, "seed is True; it must be from 0 to"),
    "a part that is no name": ({"network": {"name": ["a"]}}, r"network.name is '\['a'\]'; known are"),
    "an option that is no name": ({"data": {1: 2}}, r"data must be a section of options, not \{1: 2\}"),
    "a section that is a value": ({"learner": 3}, "learner must be a section of options, not 3"),
    "an option that follows from the data": ({"network": {"in_channels": 3}}, "network.in_channels is not an option"),
    "a combination of nothing": (
        {"perturbation": {"name": "combined"}},
        "perturbation.parts is missing: it is needed here",
    ),
    "a section without a name": ({1: 2, "x": 3}, "'1' is not a section"),
    "a description that is none": ({"description": [1]}, r"description must be a text, not \[1\]"),
    "a truth value for a number": ({"learner": {"steps": True}}, "learner.steps is True; it must be from 0 to 1000"),
    "a huge step": ({"training": {"meta_lr": 1e38}}, r"training.meta_lr is 1e\+38; it must be above 0, up to 10"),
    "a huge meta-batch": ({"training": {"meta_batch": 10**12}}, "training.meta_batch is 1000000000000; it must be"),
    "no number": ({"learner": {"inner_lr": math.nan}}, r"learner.inner_lr is nan; it must be from 0 to 1000"),
    "a block too wide": (
        {"network": {"name": "resnet12", "channels": [1, 2, 10**9, 4]}},
        "network.channels is 1000000000; it must be from 1 to 4096",
    ),
    "a device that overflows": ({"machine": {"device": "cuda:" + "9" * 50}}, "machine.device is 'cuda:9+.*'; use auto"),
    "threads without end": ({"machine": {"threads": 10**6}}, "machine.threads is 1000000; it must be from 0 to 1024"),
    "an unknown device": ({"machine": {"device": "abacus"}}, "machine.device is 'abacus'; use auto, cpu, cuda"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named_with_its_field_and_fix(mistake: str, tmp_path: Path) -> None:
    raw, message = MISTAKES[mistake]
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(raw))
    with pytest.raises(md.ConfigError, match=rf"mine\.yaml: {message}"):
        load_config(path)


def test_a_file_that_is_missing_or_not_yaml_is_named(tmp_path: Path) -> None:
    with pytest.raises(md.ConfigError, match=r"none\.yaml: cannot be read: No such file"):
        load_config(tmp_path / "none.yaml")
    bad = tmp_path / "bad.yaml"
    for content in (b"a: [1", b"\xff\xfe\x00"):
        bad.write_bytes(content)
        with pytest.raises(md.ConfigError, match=r"bad\.yaml.*: is not valid YAML"):
            load_config(bad)
    bad.write_text("just words")
    with pytest.raises(md.ConfigError, match="a recipe is a YAML file of sections"):
        load_config(bad)


def test_defaults_are_filled_in_and_a_written_config_reads_back_the_same() -> None:
    config = parse_config({"learner": {"inner_lr": 0.4}}, {"training.meta_lr": "1e-4", "seed": "3", "episode.way": 7})
    assert config.learner["inner_lr"] == 0.4
    assert config.training.meta_lr == 1e-4
    assert config.training.clip == 3.0
    assert (config.seed, config.episode.way) == (3, 7)
    assert parse_config(yaml.safe_load(yaml.safe_dump(config.to_dict()))) == config


def test_first_order_with_meta_dropout_is_refused_with_the_reason() -> None:
    config = parse_config({"learner": {"first_order": True}})
    with pytest.raises(md.ConfigError, match="first_order cannot be used with MetaDropout: the noise acts only"):
        build_learner(config, ImageShape(1, 28, 28))


def test_a_mistake_in_a_part_of_a_combination_is_named_with_its_part() -> None:
    config = parse_config({"perturbation": {"name": "combined", "parts": [{"name": "mixup", "gama": 1}]}})
    with pytest.raises(md.ConfigError, match=r"perturbation\.parts\.mixup\.gama is not an option here; .* gamma"):
        build_learner(config, ImageShape(1, 28, 28))


def test_initial_values_depend_on_the_seed_alone() -> None:
    def weights(seed: int) -> torch.Tensor:
        torch.rand(seed + 1)  # moves the global generator, which must not matter
        return torch.cat(
            [p.flatten() for p in build_learner(parse_config({"seed": seed}), ImageShape(1, 28, 28)).parameters()]
        )

    state = torch.get_rng_state()
    assert torch.equal(weights(0), weights(0))
    assert not torch.equal(weights(0), weights(1))
    torch.set_rng_state(state)
    weights(0)
    torch.set_rng_state(state)
    torch.rand(1)
    after = torch.rand(1)
    torch.set_rng_state(state)
    weights(0)
    assert torch.equal(torch.rand(1), after)  # building leaves the global generator as it was


def parts_of(section: str) -> list[Any]:
    return [*AXES[section].values()] if section in AXES else [PLAIN_SECTIONS[section]]


@pytest.mark.parametrize("section", [*AXES, *PLAIN_SECTIONS])
def test_every_option_has_a_help_text(section: str) -> None:
    missing = [f"{part.__name__}.{o.name}" for part in parts_of(section) for o in options_of(part) if not o.help]
    assert missing == []


def numbers_in(kind: Any) -> bool:
    return kind in (int, float) or any(numbers_in(inner) for inner in typing.get_args(kind))


@pytest.mark.parametrize("section", [*AXES, *PLAIN_SECTIONS])
def test_every_number_has_limits_and_a_default_within_them(section: str) -> None:
    for part in parts_of(section):
        for option in options_of(part):
            if typing.get_origin(option.type) is typing.Literal or option.name in FROM_DATA.get(section, ()):
                continue
            assert (option.limits is not None) == numbers_in(option.type), f"{part.__name__}.{option.name}"
            if option.limits is not None and option.default not in (inspect.Parameter.empty, None):
                defaults = option.default if isinstance(option.default, tuple) else [option.default]
                assert all(value in option.limits for value in defaults), f"{part.__name__}.{option.name}"


EXCHANGES: dict[str, tuple[dict[str, Any], dict[str, str], dict[str, Any]]] = {
    "a network's width": (
        {"network": {"channels": 32}},
        {"network.name": "resnet12"},
        {"network.name": "resnet12", "network.channels": [64, 128, 256, 512]},
    ),
    "a perturbation's options": (
        {"perturbation": {"name": "adversarial", "norm": "l1", "radius": 20}},
        {"perturbation.gamma": "2", "perturbation.name": "mixup"},
        {"perturbation.name": "mixup", "perturbation.gamma": 2.0},
    ),
    "options of the default": (
        {"data": {"train_classes": 9}},
        {"data.name": "folder", "data.directory": "birds"},
        {"data.train_classes": None, "data.directory": "birds"},
    ),
    "but not what both inherit": (
        {"learner": {"name": "maml", "inner_lr": 0.4}},
        {"learner.name": "metasgd"},
        {"learner.name": "metasgd", "learner.inner_lr": 0.4},
    ),
    "nor what another hands on to the same constructor": (
        {"learner": {"name": "maml", "inner_lr": 0.4, "steps": 3}},
        {"learner.name": "abml"},
        {"learner.name": "abml", "learner.inner_lr": 0.4, "learner.steps": 3, "learner.kl_weight": 0.1},
    ),
    "but what it declares itself": (
        {"learner": {"name": "maml", "inner_lr": 0.4, "precision": "bf16"}},
        {"learner.name": "reptile"},
        {"learner.name": "reptile", "learner.inner_lr": 0.001, "learner.precision": "bf16"},
    ),
    "nor those of the same part": (
        {"perturbation": {"name": "mixup", "gamma": 2}},
        {"perturbation.name": "mixup"},
        {"perturbation.gamma": 2.0},
    ),
}


@pytest.mark.parametrize("what", EXCHANGES)
def test_another_part_drops_the_options_of_the_one_before(what: str) -> None:
    raw, overrides, expected = EXCHANGES[what]
    options = parse_config(raw, overrides).options()
    assert {name: options[name] for name in expected} == expected


def test_a_choice_among_numbers_can_be_given_as_text() -> None:
    folder = {"name": "folder", "directory": "birds"}
    assert parse_config({"data": folder}, {"data.channels": "1"}).data["channels"] == 1
    with pytest.raises(md.ConfigError, match=r"data.channels is '2': input should be 1 or 3"):
        parse_config({"data": folder}, {"data.channels": "2"})


def test_tasks_are_batched_on_a_gpu_unless_told_otherwise() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    expected = {"auto": (False, True), "loop": (False, False), "batched": (True, True)}
    for choice, (on_cpu, on_gpu) in expected.items():
        machine = parse_config({"machine": {"tasks": choice}}).machine
        assert (batches_tasks(machine, cpu), batches_tasks(machine, gpu)) == (on_cpu, on_gpu)


@pytest.mark.parametrize("reported", ["accuracy: .nan", "accuracy: high", "accuracy: [1]"])
def test_what_others_report_is_a_number(reported: str, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(f"reported: {{{reported}}}")
    with pytest.raises(md.ConfigError, match=r"mine\.yaml: reported\.accuracy is .*; give it in %"):
        load_config(tmp_path / "mine.yaml")


def test_an_option_whose_name_is_no_text_is_refused() -> None:
    with pytest.raises(md.ConfigError, match=r"learner: the name of an option is no text: '\\ud800'"):
        parse_config({"learner": {"\ud800": 1}})  # as JSON can have it
