from collections.abc import Callable
from pathlib import Path

import pytest

from metadropout.cli import main
from metadropout.data.locations import cache_directory, data_directory


def test_variables_name_the_directories(data_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("METADROPOUT_CACHE", "/elsewhere")
    assert (data_directory(), cache_directory()) == (data_home, Path("/elsewhere"))


def test_the_cache_is_in_the_data_directory_unless_named(data_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("METADROPOUT_CACHE")
    assert cache_directory() == data_home / "prepared"


@pytest.mark.parametrize("arguments", [["prepare", "omniglot"], ["prepare", "folder", "--from", "birds"], ["list"]])
def test_a_data_directory_that_is_not_there_is_named_and_not_made(
    arguments: list[str],
    tmp_path: Path,
    write_classes: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write_classes(tmp_path / "birds", {f"class{i}": 3 for i in range(10)})
    missing = tmp_path / "missing" / "data"
    monkeypatch.setenv("METADROPOUT_DATA", str(missing))
    monkeypatch.delenv("METADROPOUT_CACHE")
    assert main(["data", *arguments]) == 1
    assert f"METADROPOUT_DATA is '{missing}', but there is no such folder" in capsys.readouterr().err
    assert not missing.parent.exists()


@pytest.mark.parametrize("value", [None, ""])
def test_unset_and_empty_mean_the_user_cache(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    for name in ("METADROPOUT_DATA", "METADROPOUT_CACHE"):
        monkeypatch.delenv(name) if value is None else monkeypatch.setenv(name, value)
    assert data_directory() == Path("/home/someone/.cache/metadropout")
    assert cache_directory() == Path("/home/someone/.cache/metadropout/prepared")


def test_a_tilde_is_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sets").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("METADROPOUT_DATA", "~/sets")
    assert data_directory() == tmp_path / "sets"
