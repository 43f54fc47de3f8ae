"""Tests mirror the package, so that whoever changes a room knows where its tests are."""

from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).parent
PACKAGE = TESTS.parent / "src" / "metadropout"
OTHERS = {"golden", "toy_learners", "reliability"}
"""Recorded values, learners that tests use, and what attacks the package as a whole."""


def folders_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith(("__", "."))}


def test_every_folder_of_tests_is_a_room_of_the_package() -> None:
    assert folders_in(TESTS) - OTHERS <= folders_in(PACKAGE)
