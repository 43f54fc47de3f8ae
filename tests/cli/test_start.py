"""The command line answers at once: PyTorch is loaded only where it is needed."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from metadropout.cli import COMMANDS, build_parser, main
from metadropout.cli.options import SHIPPED, describe


@pytest.mark.parametrize("arguments", [["--help"], ["recipes"], ["recipes", "glyphs"], ["options"], ["--version"]])
def test_help_recipes_and_options_do_not_load_pytorch(arguments: list[str]) -> None:
    code = f"""
import sys
from metadropout.cli import main
try:
    status = main({arguments!r})
except SystemExit as stop:
    status = stop.code
heavy = [name for name in ("torch", "numpy", "PIL", "matplotlib") if name in sys.modules]
print(heavy, file=sys.stderr)
sys.exit(status)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert done.stderr.strip() == "[]"


def test_the_shipped_list_of_options_is_that_of_the_parts() -> None:
    hint = "rewrite it: python -m metadropout.cli.options"
    shipped, found = json.loads(SHIPPED.read_text(encoding="utf-8")), describe()
    own = {section: [line for line in lines if "toy-" not in line] for section, lines in found.items()}
    assert list(shipped) == list(found), hint
    for section, lines in shipped.items():
        assert set(lines) <= set(own[section]), f"{section}: {hint}"
        assert len(lines) >= len(own[section]) - 10, f"{section}: {hint}"


def test_every_command_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert set(COMMANDS) <= set(build_parser().format_help().split())
    for name in COMMANDS:
        with pytest.raises(SystemExit) as stop:
            main([name, "--help"])
        assert stop.value.code == 0
        assert f"usage: metadropout {name}" in capsys.readouterr().out


def test_completions_are_written_for_shells(capsys: pytest.CaptureFixture[str]) -> None:
    for shell in ("bash", "zsh"):
        assert main(["completion", shell]) == 0
        assert "evaluate" in capsys.readouterr().out
