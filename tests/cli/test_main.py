"""The command line as a process: odd arguments, odd terminals, signals at any moment, a full disk."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from toys import finish, small_files, start, wait_for

from metadropout.cli import build_parser, main
from metadropout.errors import ConfigError
from metadropout.training.metrics import read_metrics


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from parsers(inner)


def test_every_number_on_the_command_line_has_limits() -> None:
    found = [
        (p.prog, action.dest) for p in parsers(build_parser()) for action in p._actions if action.type in (int, float)
    ]
    assert found == []


def test_absurd_numbers_are_refused_by_every_command() -> None:
    numbers = [
        (parser.prog, action.option_strings[0], action.type)
        for parser in parsers(build_parser())
        for action in parser._actions
        if isinstance(action.type, partial)
    ]
    assert {("metadropout evaluate", "--episodes"), ("metadropout attack", "--mc-samples")} <= {n[:2] for n in numbers}
    for command, name, read in numbers:
        for value in ("1" + "0" * 30, "1" + "0" * 5000, "-1", "nan", "1e400", "x", ""):
            with pytest.raises(ConfigError, match=f"^{name} is ") as error:
                read(value)
            assert len(str(error.value)) < 250, command


def test_a_refused_number_gives_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", "run", "--episodes", "10000000000"]) == 1
    expected = "metadropout: error: --episodes is 10000000000; it must be from 1 to 1000000\n"
    assert capsys.readouterr().err == expected


def test_a_name_that_is_not_utf8_is_refused(recipe: Path, tmp_path: Path) -> None:
    out = os.fsencode(tmp_path) + b"/bird\xe9"
    command = [sys.executable, "-m", "metadropout", "train", str(recipe), "--out", out]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "bird\ufffd' is not valid UTF-8: a run could not be written down with it; rename it" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not os.path.exists(out)


@pytest.fixture
def run(recipe: Path, tmp_path: Path) -> Path:
    assert main(["train", str(recipe), "--out", str(tmp_path / "run"), "--training.iterations", "1"]) == 0
    return tmp_path / "run"


def test_an_encoding_without_plus_minus_does_not_lose_the_result(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    process = start("evaluate", run, "--episodes", "2", "--mc-samples", "1")
    out, err = finish(process)
    assert process.returncode == 0, err
    assert " +- " in out
    assert "on 2 episodes of test classes" in out


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="watches how far the process is by /proc")
def test_ctrl_c_during_start_up_ends_without_a_traceback(recipe: Path, tmp_path: Path) -> None:
    process = start("train", recipe, "--out", tmp_path / "run")
    wait_for(lambda: "libtorch_python" in Path(f"/proc/{process.pid}/maps").read_text(), process)
    process.send_signal(signal.SIGINT)
    out, err = finish(process)
    assert process.returncode in (130, -signal.SIGINT)
    assert "Traceback" not in err
    assert out == ""


@pytest.mark.parametrize("pause", [0.0, 0.01, 0.2])
def test_signals_one_after_the_other_never_abort(recipe: Path, tmp_path: Path, pause: float) -> None:
    out = tmp_path / "run"
    size = ["--network.channels", "64", "--training.meta_batch", "8", "--machine.threads", "2"]
    process = start(
        "train", recipe, "--out", out, "--training.iterations", "100000", "--training.log_every", "1", *size
    )
    wait_for(lambda: len(read_metrics(out / "metrics.jsonl")) >= 2, process)
    for _ in range(4):
        process.send_signal(signal.SIGINT)
        time.sleep(pause)
    _, err = finish(process)
    assert process.returncode in (130, -signal.SIGINT), err
    assert "Traceback" not in err
    assert main(["train", "--resume", str(out), "--training.iterations", "5"]) == 0 or read_metrics(
        out / "metrics.jsonl"
    )


def test_a_full_disk_names_the_file(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = {
        ("train", "--resume", str(run), "--training.iterations", "9"): run / "config.yaml",
        ("report", str(run), "--out", str(tmp_path / "report.html")): tmp_path / "report.html",
        ("evaluate", str(run), "--episodes", "1", "--mc-samples", "1"): run / "evaluation-test-1samples.json",
        ("data", "show", "glyphs", "--out", str(tmp_path / "show.png")): tmp_path / "show.png",
    }
    for command, path in expected.items():
        capsys.readouterr()
        with small_files(10):
            assert main(command) == 1
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert error.startswith("metadropout: error: ")
        assert f"{path}: " in error
        assert "File too large" in error


@pytest.mark.parametrize("allocate", [lambda: torch.empty(10**15), lambda: np.empty(10**15), lambda: bytearray(10**17)])
def test_too_little_memory_gives_one_line(
    allocate: Callable[[], object], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("metadropout.cli.options.run_command", lambda namespace: allocate())
    assert main(["options"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("metadropout: error: there is not enough memory")
    assert error.count("\n") == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_an_output_that_is_full_is_named(unbuffered: str) -> None:
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "metadropout", "recipes"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=environment, check=False)
    assert done.returncode == 1
    assert done.stderr == "metadropout: error: standard output: No space left on device\n"
