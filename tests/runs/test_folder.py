"""A run's folder: who may have it, and what makes it one."""

from __future__ import annotations

from pathlib import Path

import pytest

from metadropout.config import parse_config
from metadropout.errors import ConfigError, MetadropoutError
from metadropout.runs.folder import check_free, check_same_run, claimed, open_run, write_config


def test_a_folder_belongs_to_one_process_at_a_time(tmp_path: Path) -> None:
    with claimed(tmp_path / "run"), pytest.raises(MetadropoutError, match="another process is training this run"):
        claimed(tmp_path / "run").__enter__()
    with claimed(tmp_path / "run"):  # let go of, it can be had again
        pass
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="the run's folder cannot be made: Not a directory"):
        claimed(tmp_path / "file" / "run").__enter__()


def test_a_folder_with_other_things_is_not_taken_for_a_new_run(tmp_path: Path) -> None:
    check_free(tmp_path / "new")
    check_free(tmp_path)
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ConfigError, match="is there already and is not an empty folder; choose another --out"):
        check_free(tmp_path)
    write_config(tmp_path, parse_config({}))
    with pytest.raises(ConfigError, match="holds a run already; go on with 'metadropout train --resume"):
        check_free(tmp_path)


def test_a_run_of_a_version_without_a_choice_of_noise_keeps_to_what_that_version_did(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is not a run's folder: it has no config\.yaml"):
        open_run(tmp_path)
    (tmp_path / "config.yaml").write_text(
        "training: {iterations: 7}\nlearner: {checkpoint_steps: true, inductive: true}\n"
    )
    config = open_run(tmp_path).config
    assert (config.training.noise, config.training.convolutions) == ("generator", {})
    assert config.learner["gradient_checkpointing"] is True
    assert config.episode.protocol == "inductive"
    write_config(tmp_path, parse_config({}))
    assert open_run(tmp_path).config.training.noise == "counter"


def test_going_on_with_other_options_is_refused_by_their_name(tmp_path: Path) -> None:
    write_config(tmp_path, parse_config({}))
    run = open_run(tmp_path)
    check_same_run(run, parse_config({"training": {"iterations": 3}, "machine": {"threads": 5}}))
    with pytest.raises(ConfigError, match=r"learner\.inner_lr"):
        check_same_run(run, parse_config({"learner": {"inner_lr": 0.5}}))
