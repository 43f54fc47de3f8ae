"""YAML that is damaged, hostile or ambiguous is refused with its file and line, at once and without using memory."""

from __future__ import annotations

import math
import os
import re
import time
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

import metadropout as md
from metadropout.cli import main
from metadropout.config import load_config
from metadropout.safe_yaml import MAX_DEPTH, parse_text, read_yaml


def bomb(innermost: str, level: str) -> str:
    """Nine levels of nine references each: 9⁹ values."""
    names = "abcdefghij"
    lines = [f"a: &a {innermost}"]
    for inner, outer in pairwise(names):
        lines.append(f"{outer}: &{outer} {level.format(', '.join([f'*{inner}'] * 9))}")
    return "\n".join(lines)


REFUSED = {
    "billion laughs": (bomb("[x]", "[{}]"), r", line 6: there are more than 20000 values, aliases included"),
    "a merge that explodes": (bomb("{x: 1}", "{{<<: [{}]}}"), r", line \d: there are more than 20000 values"),
    "an alias of itself": ("learner: &a [*a]", ", line 1: an alias stands for itself"),
    "a repeated section": ("seed: 1\nlearner: {}\nseed: 2", ", line 3: the key 'seed' is there twice: also in line 1"),
    "a repeated option": ("learner: {steps: 1, steps: 2}", ", line 1: the key 'steps' is there twice"),
    "deep nesting": ("[" * 10_000, f", line 1: values are nested more than {MAX_DEPTH} deep"),
    "deep nesting in blocks": ("- " * 10_000, f", line 1: values are nested more than {MAX_DEPTH} deep"),
    "a Python object": ("a: !!python/object/apply:os.system [ls]", ", line 1: the tag '.*os.system' is not allowed"),
    "a tag": ("seed: !!int x", ", line 1: the tag 'tag:yaml.org,2002:int' is not allowed"),
    "a list for a key": ("seed: 1\n? [a]\n: b", ", line 2: a key must be a plain word"),
    "too many values": ("[" + "1," * 30_000 + "]", ", line 1: there are more than 20000 values"),
    "a large file": ("#" * 2_000_000, ": cannot be read: it has more than the 1048576 bytes allowed"),
    "a syntax error": ("seed: 1\nlearner: [1", ", line 2: is not valid YAML: expected ',' or ']'"),
    "an unknown alias": ("seed: *x", ", line 1: is not valid YAML: found undefined alias 'x'"),
    "a control character": ("seed: \x00", ": is not valid YAML: unacceptable character"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_harmful_yaml_is_refused_at_once_with_file_and_line(what: str, tmp_path: Path) -> None:
    text, message = REFUSED[what]
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    started = time.process_time()
    with pytest.raises(md.ConfigError, match=rf"mine\.yaml{message}"):
        load_config(path)
    assert time.process_time() - started < 5


TAKEN_AS_TEXT = {
    "a date that is none": ("2020-13-45", "'2020-13-45'"),
    "a number of 5000 digits": ("9" * 5000, "'" + "9" * 60 + "...'"),
    "a number to base 60": ("1:" * 50_000 + "1", r"'1:1:.*\.\.\.'"),
}


@pytest.mark.parametrize("what", TAKEN_AS_TEXT)
def test_what_only_looks_like_a_number_or_date_is_text_and_named_shortly(what: str, tmp_path: Path) -> None:
    text, shown = TAKEN_AS_TEXT[what]
    path = tmp_path / "mine.yaml"
    path.write_text(f"learner: {{steps: {text}}}")
    with pytest.raises(md.ConfigError, match=rf"mine.yaml: learner.steps is {shown}: ") as error:
        load_config(path)
    assert len(str(error.value)) < 1000


def test_half_a_character_is_refused(tmp_path: Path) -> None:
    (tmp_path / "half.yaml").write_text('data: {"\\ud800": 1}')
    with pytest.raises(md.ConfigError, match=r"half\.yaml, line 1: half of a character \(a surrogate\) is no text"):
        load_config(tmp_path / "half.yaml")


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    with pytest.raises(md.ConfigError, match=r"pipe\.yaml: cannot be read: it is a named pipe, not a regular file"):
        read_yaml(tmp_path / "pipe.yaml")


def test_what_a_run_writes_is_read_as_pyyaml_reads_it(tmp_path: Path) -> None:
    values = [
        1,
        -2,
        0.1,
        1e-5,
        1e300,
        -0.0,
        True,
        None,
        "",
        "1",
        "010",
        "0x1",
        "1e5",
        "2020-01-01",
        "yes",
        "=",
        "<<",
        "ä",
    ]
    path = tmp_path / "values.yaml"
    path.write_text(yaml.safe_dump({"values": values}, allow_unicode=True), encoding="utf-8")
    assert read_yaml(path) == {"values": values}
    path.write_text("base: &b {x: 1, y: .inf}\nmerged: {<<: *b, x: 2}\n")
    assert read_yaml(path)["merged"] == {"x": 2, "y": math.inf}


@given(st.text(alphabet=st.sampled_from("{}[]&*!|>-?:,#'\"%@ \n\tab01.<~")))
def test_any_text_gives_a_value_or_the_projects_error(text: str) -> None:
    with suppress(md.ConfigError, yaml.YAMLError):
        parse_text(text)


@pytest.mark.parametrize(
    ("value", "message"),
    [("[" * 5000, "values are nested more than"), ("[{name: mixup, name: vib}]", "the key 'name' is there twice")],
)
def test_values_on_the_command_line_are_held_to_the_same_rules(
    value: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "glyphs-5way-1shot-maml", "--out", "nowhere", "--perturbation.parts", value]) == 1
    assert re.search(rf"--perturbation.parts: {message}", capsys.readouterr().err)
