"""The documentation is true: its code runs, its links lead somewhere, its recipes exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from toy_weights import drawings

import metadropout as md
from metadropout.analysis.studies import read_study
from metadropout.cli import main, members
from metadropout.config import AXES
from metadropout.perturbations import Pass
from metadropout.recipes import load_recipe, recipe_names

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def variables_of_example(page: str, given: dict[str, Any] | None = None, **numbers: str) -> dict[str, Any]:
    """What a page's Python examples, run one after the other, leave behind."""
    code = "\n".join(re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL))
    for name, number in numbers.items():  # smaller ones, to save time
        code = re.sub(rf"\b{name}=\d+", f"{name}={number}", code)
    variables = dict(given or {})
    exec(compile(code, page, "exec"), variables)
    return variables


def own_images() -> dict[str, Any]:
    """What a user has: a few drawings with labels, and new ones."""
    images, labels = drawings(3)
    return {"images": images, "labels": labels, "new_images": drawings(3, seed=1)[0]}


def test_the_examples_of_classifying_your_own_images_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    left = variables_of_example("docs/use.md", own_images())
    assert left["classifier"].predict(left["new_images"]).tolist() == left["labels"]
    assert {path.name for path in tmp_path.iterdir()} >= {"model.onnx", "model.pt2"}


def test_the_two_gradients_are_those_that_the_page_prints() -> None:
    left = variables_of_example("docs/gradient.md")
    printed = re.findall(r"# \[([0-9.]+)\.\.\., ([0-9.]+)\.\.\.\]", (ROOT / "docs/gradient.md").read_text())
    for gradient, expected in zip((left["exact"], left["public"]), printed, strict=True):
        assert [f"{value:.6f}"[: len(text)] for value, text in zip(gradient.tolist(), expected, strict=True)] == [
            *expected
        ]


def test_the_readmes_python_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def make_model(way: int) -> md.Conv4:
        return md.Conv4(way, in_channels=3, image_size=32, channels=4)

    given = {"MyModel": make_model, **own_images()}
    left = variables_of_example("README.md", given, iterations="2", episodes="2", mc_samples="2")
    assert left["logits"].shape == (25, 5)
    assert (tmp_path / "runs" / "mine" / "config.yaml").exists()


def test_the_parts_in_the_documentation_are_trained_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "docs" / "extending.md").read_text()
    (code,) = re.findall(r"```python\n(# my_parts.py\n.*?)```", text, flags=re.DOTALL)
    (tmp_path / "my_parts.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    (train,) = re.findall(r"^    metadropout (train .*)$", text, flags=re.MULTILINE)
    assert main([*shlex.split(train), "--training.iterations", "1"]) == 0


def test_the_perturbation_in_the_documentation_does_what_it_says() -> None:
    example = variables_of_example("docs/perturbations.md")
    model, x = example["model"], torch.rand(5, 1, 28, 28)
    halve = example["Halve"](model)
    assert torch.equal(halve.after("head", x, model(x), Pass({}, support=True)), model(x) / 2)
    episode = md.Episode(x, torch.arange(5), x, torch.arange(5))
    assert example["learner"].loss(episode).isfinite()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_that_exist(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def test_the_page_of_all_members_is_up_to_date() -> None:
    text = (ROOT / "docs" / "members.md").read_text()
    assert text == members.page(), "python -m metadropout.cli.members docs/members.md"
    assert all(hasattr(md, name) for name in re.findall(r"`md\.(\w+)", text))
    assert all(part.title for parts in AXES.values() for part in parts.values())


@pytest.mark.parametrize("page", ["table1.md", "tables23.md"])
def test_tables_of_the_paper_are_those_of_the_recipes(page: str) -> None:
    cells: dict[str, str] = {}
    for table in re.findall(r"(?:^\|.*\n)+", (ROOT / "docs" / page).read_text(), flags=re.MULTILINE):
        head, _, *rows = ([cell.strip(" `") for cell in line.strip("|").split("|")] for line in table.splitlines())
        cells |= {f"{name}-{row[0]}": figure for row in rows for name, figure in zip(head[1:], row[1:], strict=True)}
    figures = {name: figure for name, figure in cells.items() if name in recipe_names()}
    assert len(figures) >= 16
    for name, figure in figures.items():
        assert figure == " ± ".join(f"{value:.2f}" for value in load_recipe(name).reported.values()), name


def test_tables_of_results_are_those_of_the_recorded_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    text = (ROOT / "docs" / "results.md").read_text()
    commands = re.findall(r"^    metadropout (reproduce results/.* --show)$", text, flags=re.MULTILINE)
    assert {command.split()[1] for command in commands} == {str(path) for path in Path().glob("results/*/study.yaml")}
    for command in commands:
        assert main(shlex.split(command)) == 0
        shown = re.findall(r"(?:^\|.*\n)+", capsys.readouterr().out, flags=re.MULTILINE)
        assert len(shown) == len(read_study(Path(command.split()[1])).tables)
        assert all(table in text and "not yet" not in table for table in shown), command


def test_every_recorded_run_belongs_to_a_study() -> None:
    for path in ROOT.glob("results/*/study.yaml"):
        study = read_study(path)
        runs = {f"{s}-{row}-seed{seed}" for s in study.settings for row in study.rows for seed in study.rows[row]}
        assert {folder.name for folder in path.parent.iterdir() if folder.is_dir()} == runs


@pytest.mark.parametrize(
    "command",
    [
        "train",
        "evaluate",
        "attack",
        "export",
        "figures",
        "report",
        "reproduce",
        "sweep",
        "recipes",
        "options",
        "data",
        "demo",
        "app",
        "bench",
    ],
)
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    assert "usage: metadropout" in capsys.readouterr().out


def test_lists_of_recipes_and_options_name_everything(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "*"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in recipe_names())
    assert main(["options"]) == 0
    listed = " ".join(capsys.readouterr().out.split())
    assert "--learner.inner_lr float from 0 to 1000 (default: 0.1): step size of the inner steps" in listed
    assert "--training.meta_lr float above 0, up to 10 (default: 0.001): learning rate" in listed
    assert "--network.channels Sequence[int] from 1 to 4096 (default: (64, 128, 256, 512))" in listed
