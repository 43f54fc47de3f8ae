from pathlib import Path

import pytest

from metadropout.data.locations import cache_directory, data_directory


def test_variables_name_the_directories(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("METADROPOUT_DATA", "/somewhere")
    monkeypatch.setenv("METADROPOUT_CACHE", "/elsewhere")
    assert (data_directory(), cache_directory()) == (Path("/somewhere"), Path("/elsewhere"))


def test_the_cache_is_in_the_data_directory_unless_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("METADROPOUT_DATA", "/somewhere")
    monkeypatch.delenv("METADROPOUT_CACHE")
    assert cache_directory() == Path("/somewhere/prepared")


@pytest.mark.parametrize("value", [None, ""])
def test_unset_and_empty_mean_the_user_cache(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    for name in ("METADROPOUT_DATA", "METADROPOUT_CACHE"):
        monkeypatch.delenv(name) if value is None else monkeypatch.setenv(name, value)
    assert data_directory() == Path("/home/someone/.cache/metadropout")
    assert cache_directory() == Path("/home/someone/.cache/metadropout/prepared")


def test_a_tilde_is_the_home_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("METADROPOUT_DATA", "~/sets")
    assert data_directory() == Path("/home/someone/sets")
