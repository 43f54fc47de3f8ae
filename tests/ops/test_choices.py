"""Which algorithm computes convolutions: measured once, kept, noted by a run, and the same again."""

from __future__ import annotations

import contextvars
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from metadropout.errors import ConfigError
from metadropout.ops import kernels
from metadropout.ops.kernels import choices

pytestmark = pytest.mark.skipif(not kernels.available(), reason="no C++ compiler, or METADROPOUT_FUSED is 0")
SHAPE = (16, 32, 6, 5)  # in channels, out channels, height, width
NAME = "16x32x6x5"


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """An empty cache, and nothing decided."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    choices._kept_or_measured.cache_clear()
    yield tmp_path
    choices._kept_or_measured.cache_clear()


def measuring(monkeypatch: pytest.MonkeyPatch, result: str) -> list[str]:
    """Let measurements come to a result; lists the shapes that are measured."""
    measured: list[str] = []
    monkeypatch.setattr(choices, "_measured", lambda shape, dtype: (measured.append(shape), result)[1])
    return measured


def convolved() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 16, 6, 5, generator=generator).contiguous(memory_format=torch.channels_last)
    return kernels.convolution(x, torch.randn(32, 16, 3, 3, generator=generator), None)


def test_the_fastest_is_measured_and_is_one_of_those_that_are_known(cache: Path) -> None:
    assert choices._measured(NAME, torch.float32) in choices.TILES


def test_a_choice_is_measured_once_on_a_machine(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = measuring(monkeypatch, "winograd-4")
    assert [choices.tile(*SHAPE) for _ in range(3)] == [4, 4, 4]
    measuring(monkeypatch, "winograd-2")  # would now come to another result
    choices._kept_or_measured.cache_clear()  # as in another process
    assert choices.tile(*SHAPE) == 4
    assert measured == [NAME]


def test_of_two_processes_that_measure_at_once_the_first_decides(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(shape: str, dtype: torch.dtype) -> str:
        measuring(monkeypatch, "winograd-4")
        choices._kept_or_measured.__wrapped__(NAME, torch.float32)  # another process is done before
        return "winograd-2"

    monkeypatch.setattr(choices, "_measured", measured)
    assert choices.tile(*SHAPE) == 4


@pytest.mark.parametrize("damaged", [b"", b"winograd-9 for 16x32x6x5\n", b"\xff\xfe"])
def test_a_damaged_choice_is_measured_again(cache: Path, monkeypatch: pytest.MonkeyPatch, damaged: bytes) -> None:
    measured = measuring(monkeypatch, "winograd-4")
    choices.tile(*SHAPE)
    (kept,) = cache.rglob("choice-*")
    kept.write_bytes(damaged)
    choices._kept_or_measured.cache_clear()
    assert choices.tile(*SHAPE) == 4
    assert measured == [NAME] * 2
    assert kept.read_text() == "winograd-4 for 16x32x6x5\n"


def test_where_no_choice_can_be_kept_nothing_is_measured(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    measured = measuring(monkeypatch, "winograd-2")
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert choices.tile(*SHAPE) == 4
    assert not measured


def test_a_run_that_notes_its_choices_can_be_repeated_bit_for_bit(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measuring(monkeypatch, "winograd-4")
    with kernels.choosing() as noted:
        first = convolved()
    assert noted == {NAME: "winograd-4"}
    choices._kept_or_measured.cache_clear()
    with kernels.using({"*": "winograd-2"}):
        assert not torch.equal(convolved(), first)
    with kernels.using(json.loads(json.dumps(noted))):
        assert torch.equal(convolved(), first)


def test_a_run_without_choices_goes_by_tiles_of_2() -> None:
    with kernels.using({}), kernels.choosing() as noted:
        convolved()
    assert noted == {NAME: "winograd-2"}


def test_choices_hold_in_threads_that_get_the_context() -> None:
    results: list[int | None] = []
    with kernels.using({NAME: "direct"}):
        context = contextvars.copy_context()
    thread = threading.Thread(target=context.run, args=(lambda: results.append(choices.tile(*SHAPE)),))
    thread.start()
    thread.join()
    assert results == [None]


def test_an_unknown_algorithm_is_refused_by_name() -> None:
    message = r"16x32x6x5 are to be computed by 'fft', but only direct, winograd-2"
    with pytest.raises(ConfigError, match=message), kernels.using({NAME: "fft"}):
        pass
