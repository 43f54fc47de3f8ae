"""The documentation site is built without a warning, and has a page for every public name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import metadropout as md

pytest.importorskip("mkdocs_jupyter")
pytest.importorskip("mkdocstrings")

ROOT = Path(__file__).parents[1]


def test_the_site_is_built_without_a_warning_and_holds_every_public_name(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    pages = "".join(path.read_text() for path in (tmp_path / "site" / "reference").glob("*.html"))
    missing = [name for name in md.__all__ if callable(getattr(md, name)) and f'.{name}"' not in pages]
    assert not missing
    assert "http" not in "".join(  # nothing is fetched from another host
        line for line in (tmp_path / "site" / "index.html").read_text().splitlines() if "<script src" in line
    )
