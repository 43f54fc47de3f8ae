"""Every command that the documentation shows is one: its options exist, its values are valid, the cheap ones run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image
from toy_weights import drawings

from metadropout.cli import COMMANDS, main, parse
from metadropout.config import parse_config
from metadropout.data import DATASETS
from metadropout.options import check_options
from metadropout.recipes import load_recipe

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
SOURCES = [*sorted((ROOT / "src").rglob("*.yaml")), *sorted((ROOT / "src" / "metadropout" / "cli").glob("*.py"))]

PLACEHOLDERS = {
    "RECIPE": "glyphs-5way-1shot-metadropout",
    "SETTING-ROW": "glyphs-5way-1shot-maml",
    "NAME": "glyphs-5way-1shot-maml",
    "RUN...": "RUN",
}


def commands_in(text: str) -> Iterator[str]:
    """Find the commands that stand on lines of their own, without what is said of them."""
    for line in text.replace("\\\n", " ").splitlines():
        if match := re.match(r"[#$\s]*(?:torchrun .* -m )?(metadropout [a-z].*)", line):
            command = re.split(r"\s#|\s{3,}|\s> ", re.sub(r"\[.*\]$", "", match[1]).strip())[0]
            words = [PLACEHOLDERS.get(word, word) for word in shlex.split(command)]
            if words[1] in COMMANDS:
                yield shlex.join(words)


def documented() -> list[str]:
    found = [command for path in (*PAGES, *SOURCES) for command in commands_in(path.read_text())]
    # What stands in running text may be cut short, and then is no command on its own.
    mentioned = [name for page in PAGES for name in re.findall(r"`(metadropout [^`]+)`", page.read_text())]
    return sorted({*found, *(command for name in mentioned for command in commands_in(f"{name}\n"))})


def test_the_documentation_shows_all_commands() -> None:
    assert {command.split()[1] for command in documented()} == set(COMMANDS)


def write_birds(folder: Path) -> None:
    for name in "abcdefgh":
        (folder / name).mkdir(parents=True)
        for number in range(3):
            Image.new("RGB", (12, 10), (10 * number, 20, 30)).save(folder / name / f"{number}.png")


def write_drawings(folder: Path, seed: int) -> None:
    for number, (image, kind) in enumerate(zip(*drawings(3, seed=seed), strict=True)):
        (folder / kind).mkdir(parents=True)
        Image.fromarray((255 * image).astype("uint8")).save(folder / kind / f"{number}.png")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the things that the documentation's commands speak of."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results").symlink_to(ROOT / "results")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("METADROPOUT_CACHE", str(tmp_path / "cache"))
    write_birds(tmp_path / "birds")
    for part, seed in (("examples", 0), ("new", 1)):
        write_drawings(tmp_path / part, seed)
    (own_recipe,) = re.findall(
        r"```yaml\n(# metadropout train mine\.yaml.*?)```", (ROOT / "docs/runs.md").read_text(), re.S
    )
    (tmp_path / "mine.yaml").write_text(own_recipe)
    (own_parts,) = re.findall(r"```python\n(# my_parts.py.*?)```", (ROOT / "docs/extending.md").read_text(), re.S)
    (tmp_path / "my_parts.py").write_text(own_parts)
    return tmp_path


def is_cheap(words: list[str]) -> bool:
    return (
        words[0] in ("recipes", "options")
        or words[:2] == ["data", "list"]
        or ("folder" in words and words[0] == "data")
    )


@pytest.mark.parametrize("command", documented())
def test_a_documented_command_is_valid(
    command: str, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, *words = shlex.split(command)
    try:
        namespace = parse(words)
    except SystemExit:
        assert "the following arguments are required" in capsys.readouterr().err  # named in passing
        return
    if is_cheap(words):
        assert main(words) == 0, capsys.readouterr().err
    elif words[0] == "train" and namespace.recipe:
        load_recipe(namespace.recipe, namespace.overrides)
    elif words[0] == "reproduce" and not namespace.runs:
        monkeypatch.setattr("metadropout.cli.reproduce.run_jobs", lambda jobs, place: [])
        monkeypatch.setattr("metadropout.cli.reproduce.draw_figures", lambda *_, **__: None)
        monkeypatch.setattr("metadropout.cli.reproduce.open_run", lambda folder: None)
        assert main([*words, "--out", "runs/table"]) == 0, capsys.readouterr().err
    elif words[0] == "sweep":
        assert main([*words, "--out", "runs/sweep", "--show"]) == 0, capsys.readouterr().err
    elif words[0] == "data":
        options = {name.removeprefix("data."): value for name, value in namespace.overrides.items()}
        check_options(DATASETS[namespace.name], options, "data")
    else:
        parse_config({}, namespace.overrides)


def test_the_readmes_commands_run_one_after_the_other(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    smaller = {
        "train": ["--training.iterations", "2", "--training.validation_episodes", "2"],
        "evaluate": ["--episodes", "2", "--mc-samples", "2"],
        "predict": ["--mc-samples", "2"],
        "attack": ["--episodes", "1", "--steps", "2", "--norm", "linf", "--epsilon", "0.1"],
    }
    commands = [shlex.split(command)[1:] for command in commands_in((ROOT / "README.md").read_text())]
    commands = [words for words in commands if words[0] != "app"]  # which serves until it is stopped
    assert [words[0] for words in commands] == [
        *("predict", "recipes", "train", "evaluate", "train", "evaluate", "attack", "report")
    ]
    for words in commands:
        extra = [] if "--resume" in words else smaller.get(words[0], [])
        assert main([*words, *extra]) == 0, (words, capsys.readouterr().err)
    assert (here / "report.html").exists()
