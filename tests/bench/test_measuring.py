"""Work runs in processes of its own, is refused where it differs, and its problems are told."""

from __future__ import annotations

import platform
import sys
from pathlib import Path
from typing import Self

import numpy as np
import pytest

from metadropout.bench import measuring
from metadropout.bench.child import Arrays, Child, Program
from metadropout.bench.measuring import Check, Timing, check_agreement, difference, measure, ratio
from metadropout.errors import MetadropoutError

WORK = """
import resource, torch
import metadropout.learners  # as all programs do: what else is in memory decides which blocks can be reused

def prepare(value):
    def work():
        if value < 0:
            import os
            os._exit(3)
        for _ in range(20):  # until there is a free block whose alignment fits
            torch.ones(16_000_000)  # 64 MB, 16,000 pages
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(5):
            torch.ones(16_000_000)
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
        values = {"threads": torch.get_num_threads(), "faults": faults, "value": value}
        return {name: torch.tensor([float(number)]) for name, number in values.items()}

    return work
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "some_work.py").write_text(WORK)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])  # which child processes get, too
    return "some_work"


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc gives memory back that way")
def test_one_childs_allocator_threads_and_memory_do_not_touch_anothers(module: str) -> None:
    programs = [Program("kept", module, keep_freed_memory=True, threads=1), Program("default", module, threads=2)]
    with Child(programs[0]) as kept, Child(programs[1]) as default:
        ours, theirs = kept.result(1), default.result(1)
        assert (ours["threads"], theirs["threads"]) == (1, 2)
        assert ours["faults"] < 20_000  # pages are reused
        assert theirs["faults"] > 75_000  # and are not where the allocator is left as it is
        for child in (kept, default):
            assert 64e6 < child.peak_memory() < 1e9
            child.prepare(1)
            assert child.seconds() > 0
    for child in (kept, default):
        assert not child._process.is_alive()


def test_a_problem_in_a_child_is_told_with_its_name(module: str) -> None:
    with Child(Program("first", "no_such_module")) as child:
        child._process.join()  # it has ended before it is asked
        with pytest.raises(MetadropoutError, match="first: ModuleNotFoundError: No module named 'no_such_module'"):
            child.seconds()
    second = Program("second", module)
    with Child(second) as child, pytest.raises(MetadropoutError, match="second: its process ended with status 3"):
        child.result(-1)


class InThisProcess:
    """A child whose program's name is its result, for what does not depend on processes."""

    def __init__(self, program: Program) -> None:
        self.program = program

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def result(self, problem: float) -> Arrays:
        return {"value": np.array([float(self.program.name) * problem])}

    def prepare(self, problem: object) -> None:
        pass

    def seconds(self) -> float:
        return float(self.program.name)

    def peak_memory(self) -> int:
        return 7


def test_rounds_are_interleaved_and_the_warming_up_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "Child", InThisProcess)
    steps: list[str] = []
    results = measure([Program("1", ""), Program("2", "")], None, 2, steps.append)
    expected = ["warming up", "warming up", *["round 1 of 2"] * 2, *["round 2 of 2"] * 2]
    assert steps == [f"{name}, {what}" for name, what in zip("121212", expected, strict=True)]
    assert results == [Timing("1", [1.0, 1.0], 7), Timing("2", [2.0, 2.0], 7)]


def test_different_results_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "Child", InThisProcess)
    checks = [Check("the value", 5.0, 0.1), Check("another", 1.0, 0.06)]
    close, far = [[Program(name, "") for name in names] for names in (("1", "0.98", "1.05"), ("1", "1.08"))]
    assert check_agreement(close, checks, lambda _: None) == pytest.approx([0.05, 0.05])
    with pytest.raises(
        MetadropoutError, match=r"^1.08 does not compute the same as 1: another differs by 8.0e-02, more"
    ):
        check_agreement(far, checks, lambda _: None)


def test_difference_is_relative_to_all_values_and_infinite_where_some_are_missing() -> None:
    reference = {"a": np.array([[3.0]]), "b": np.array([4.0])}
    assert difference({"a": np.array([[3.0]]), "b": np.array([4.5])}, reference) == pytest.approx(0.1)
    assert difference({"a": reference["a"]}, reference) == float("inf")
    assert np.isnan(difference({**reference, "b": np.array([np.nan])}, reference))


def test_ratios_are_taken_within_a_round() -> None:
    assert ratio([2.0, 9.0, 4.0], [1.0, 3.0, 1.0]) == (3.0, 2.0, 4.0)
