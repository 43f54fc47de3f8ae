"""The page holds all that there is, needs nothing else, and nothing from a run's folder becomes markup in it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml
from toys import RESULT, change_config, change_json, small_files

from metadropout.cli import main

SECTIONS = ["summary", "comparison", "curves", "attacks", "figures", "configuration", "environment", "commands"]
OTHER_WAY = "evaluation-test-2way-1shot-2samples"
VOID = {"meta", "link", "img"}


class Page(HTMLParser):
    """A page's elements and its text; elements that are not closed in order are an error."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def report(runs: list[Path], out: Path, *arguments: str) -> str:
    assert main(["report", *map(str, runs), "--out", str(out), *arguments]) == 0
    return out.read_text()


@pytest.fixture
def html(runs: list[Path], tmp_path: Path) -> str:
    return report(runs, tmp_path / "report.html")


def test_the_page_is_well_formed_and_has_all_sections(html: str) -> None:
    page = Page(html)
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(set(ids)) == len(ids)
    assert [attributes["id"] for attributes in page.all("section")] == SECTIONS
    assert [link["href"] for link in page.all("a")] == [f"#{name}" for name in SECTIONS]


def test_the_page_loads_nothing_and_allows_nothing_but_its_own_script_and_style(html: str) -> None:
    page = Page(html)
    loaded = [
        attributes[name] for _, attributes in page.elements for name in ("src", "srcset", "data") if name in attributes
    ]
    assert loaded
    assert all(str(address).startswith("data:") for address in loaded)
    assert [link["href"] for link in page.all("link")] == ["data:,"]
    assert "url(" not in html
    assert "@import" not in html
    assert "style" not in {name for _, attributes in page.elements for name in attributes}  # the policy forbids those
    (policy,) = [m["content"] for m in page.all("meta") if m.get("http-equiv") == "Content-Security-Policy"]
    for tag in ("style", "script"):
        (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", html, flags=re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in str(policy)
    assert str(policy).startswith("default-src 'none'; img-src data:;")


def test_every_picture_has_words(html: str) -> None:
    page = Page(html)
    assert page.all("img")
    assert all(image["alt"] for image in page.all("img"))
    drawings = page.all("svg")
    assert sum("aria-label" in drawing for drawing in drawings) == 4  # three learning curves and an attack
    assert all(drawing.get("aria-label") or drawing.get("aria-hidden") == "true" for drawing in drawings)


def test_the_table_shows_accuracies_beside_reported_ones(runs: list[Path], tmp_path: Path) -> None:
    change_json(runs[0] / RESULT, lambda result: result.update(accuracies=[0.9, 1.0], nlls=None))
    config = (runs[0] / "config.yaml").read_text()
    (runs[0] / "config.yaml").write_text(config.replace("reported: {}", "reported: {accuracy: 96.5, interval: 0.5}"))
    html = report(runs, tmp_path / "report.html")
    words = " ".join(Page(html).text.split())
    assert "95.00 ± 6.93" in words  # 196 · 0.05 / √2
    assert "96.50 ± 0.50" in words
    assert "\N{MINUS SIGN}1.50 ± 6.95" in words
    assert 'data-value="-1.5' in html


def test_options_versions_and_commands_are_all_there(html: str, runs: list[Path]) -> None:
    text = Page(html).text
    for run in runs:
        config = yaml.safe_load((run / "config.yaml").read_text())
        for name in (f"{s}.{o}" for s, options in config.items() if isinstance(options, dict) for o in options):
            assert name in text
        start = json.loads((run / "environment.json").read_text())["starts"][0]
        assert all(words in text for words in (start["command"], start["platform"], start["versions"]["torch"]))
    assert f"metadropout report {' '.join(map(str, runs))} --out" in text


def test_missing_parts_are_named_on_the_page_and_by_the_command(
    runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = runs[0]
    change_config(run, "training", iterations=500)
    (run / RESULT).unlink()
    shutil.rmtree(run / "checkpoints")
    html = report([run], tmp_path / "report.html")
    text, told = Page(html).text, capsys.readouterr().err
    for part in ("checkpoint", "evaluation", "attacks", "figures"):
        assert f"maml: {part}: " in told
        assert f"{part}: " in text
    for command in (f"metadropout evaluate {run}", f"metadropout attack {run}", f"metadropout figures {run}"):
        assert command in text
    assert "not tested yet" in text
    assert "iteration 2 of 500" in text
    assert "None of these runs has been attacked" in text
    assert "None have been drawn" in text


def test_a_run_that_has_only_its_configuration_is_shown(runs: list[Path], tmp_path: Path) -> None:
    for path in runs[0].iterdir():
        if path.name != "config.yaml":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    text = Page(report(runs[:1], tmp_path / "report.html")).text
    for words in ("these runs have logged nothing yet", "environment.json is missing", "no command was recorded"):
        assert words in text


def test_runs_with_different_ways_have_tables_of_their_own(runs: list[Path], tmp_path: Path) -> None:
    change_config(runs[2], "episode", way=4)
    html = report(runs, tmp_path / "report.html")
    text = Page(html).text
    assert "3 runs in 2 settings" in text
    assert "so their accuracies cannot be compared" in text
    assert "points behind" not in text
    regions = [d["aria-label"] for d in Page(html).all("div") if "aria-label" in d]
    assert "Comparison, glyphs, 3-way 1-shot" in regions
    assert "Comparison, glyphs, 4-way 1-shot" in regions


def test_only_runs_that_lack_nothing_are_called_complete(runs: list[Path], tmp_path: Path) -> None:
    complete = "Nothing that was asked for is missing"
    assert complete in report(runs[2:], tmp_path / "report.html")
    change_json(runs[2] / "attack-metadropout.json", lambda results: results["episodes"].pop())
    text = Page(report(runs[2:], tmp_path / "report.html")).text
    assert complete not in text
    assert "stopped after 1 of 2 episodes in the linf norm" in text
    assert "stopped, of 2" in text  # beside the numbers, too


def test_methods_are_not_compared_after_unequal_training(runs: list[Path], tmp_path: Path) -> None:
    change_json(runs[0] / RESULT, lambda result: result.update(accuracies=[0.9] * 4, nlls=None, calibration=None))
    change_json(runs[2] / RESULT, lambda result: result.update(accuracies=[0.5] * 4, nlls=None, calibration=None))
    two = [runs[0], runs[2]]
    assert "40.00 ± 0.00 points behind MAML on the same 4 tasks" in Page(report(two, tmp_path / "report.html")).text
    change_json(runs[2] / RESULT, lambda result: result.update(iteration=1))
    text = Page(report(two, tmp_path / "report.html")).text
    assert "points behind" not in text
    told = "because they were trained for different numbers of iterations: MAML for 2, MAML + Meta-dropout for 1."
    assert told in text


def test_a_difference_within_its_interval_is_called_that(runs: list[Path], tmp_path: Path) -> None:
    for run, accuracies in ((runs[0], [0.9, 0.5, 0.7, 0.5]), (runs[2], [0.5, 0.8, 0.5, 0.7])):
        change_json(run / RESULT, lambda r, a=accuracies: r.update(accuracies=a, nlls=None, calibration=None))
    text = Page(report([runs[0], runs[2]], tmp_path / "report.html")).text
    assert "points behind MAML on the same 4 tasks: the two cannot be told apart, as the interval contains 0" in text


def test_likelihood_calibration_and_tests_on_other_tasks_are_shown(runs: list[Path], tmp_path: Path) -> None:
    assert main(["evaluate", str(runs[0]), "--episodes", "3", "--mc-samples", "2", "--episode.way", "2"]) == 0
    own, other = (json.loads((runs[0] / name).read_text()) for name in (RESULT, f"{OTHER_WAY}.json"))
    html = report(runs[:1], tmp_path / "report.html")
    text = Page(html).text
    for result in (own, other):
        assert f"{result['nll']:.4f}" in text
        assert f'data-value="{result["nll"]}"' in html
        assert f"{100 * result['ece']:.2f}" in text
    assert "Tested on other tasks: glyphs, 2-way 1-shot, 2 query images per class, transductive" in text
    summary = html[html.index('id="summary"') : html.index('id="comparison"')]
    assert f"{100 * own['mean']:.2f}" in summary
    assert "2-way" not in summary
    assert "--mc-samples 2 --seed 0 --episode.way 2" in html[html.index('id="commands"') :]


def test_nothing_from_a_run_becomes_markup(runs: list[Path], tmp_path: Path) -> None:
    def fill(run: Path, text: str) -> None:
        """Put a text wherever a run's files can hold one."""
        pending = {text: {"runs": [text], "options": [text]}}
        change_json(run / "environment.json", lambda e: e["starts"][0].update(command=text, platform=text, gpus=[text]))
        change_json(run / "figures" / "figures.json", lambda f: f.update(left_out={text: text}, pending=pending))
        change_json(
            run / "figures" / "figures.json", lambda f: f["figures"]["noise"].update(title=text, caption=text, alt=text)
        )
        shutil.copy(run / RESULT, run / "evaluation-test-other.json")
        others = {"data": text, "protocol": text, "split": text, "state": text, "episode_list": text}
        change_json(run / "evaluation-test-other.json", lambda result: result.update(others))

    fill(runs[2], "plain")
    expected = [tag for tag, _ in Page(report(runs[2:], tmp_path / "plain.html")).elements]
    evil = "</title></script><script>alert(1)</script><img src=x onerror=alert(1)>\"'{{ 7 * 7 }}"
    run = runs[2].rename(runs[2].parent / "<b onclick=x>\"'&amp;")
    (run / "attack-metadropout.json").rename(run / f"attack-{run.name}.json")
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["description"] = evil
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    fill(run, evil)
    page = Page(report([run], tmp_path / "report.html"))
    assert [tag for tag, _ in page.elements] == expected
    assert not {name for _, attributes in page.elements for name in attributes if name.startswith("on")}
    assert [image["alt"] for image in page.all("img")] == [evil]
    assert page.text.count(evil) >= 4


def test_attacks_and_figures_can_lie_elsewhere(runs: list[Path], tmp_path: Path) -> None:
    (tmp_path / "attacks").mkdir()
    (runs[2] / "attack-metadropout.json").rename(tmp_path / "attacks" / "attack-metadropout.json")
    (runs[2] / "figures").rename(tmp_path / "figures")
    folders = ["--attacks", str(tmp_path / "attacks"), "--figures", str(tmp_path / "figures")]
    page = Page(report(runs, tmp_path / "report.html", *folders))
    assert len(page.all("img")) == 1
    assert "ℓ∞ norm, accuracy in %" in page.text
    assert " ".join(folders) in page.text


def test_an_earlier_report_is_replaced_and_nothing_else(
    runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "report.html"
    report(runs[:1], out)
    before = report(runs, out)
    capsys.readouterr()
    with small_files(1000):
        assert main(["report", str(runs[0]), "--out", str(out)]) == 1
    assert "File too large" in capsys.readouterr().err
    assert out.read_text() == before
    assert [path.name for path in out.parent.iterdir()] == ["report.html"]
    notes = tmp_path / "notes.html"
    notes.write_text("<p>mine</p>")
    assert main(["report", str(runs[0]), "--out", str(notes)]) == 1
    assert "is there already and is not a report; choose another --out" in capsys.readouterr().err
    assert notes.read_text() == "<p>mine</p>"
    assert main(["report", str(runs[0]), "--out", str(tmp_path)]) == 1
    assert "is a folder; give --out the name of a file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere: is not a run's folder: it has no config.yaml"),
        (["RUN", "RUN"], "is named twice"),
        (["RUN", "--attacks", "nowhere"], "--attacks nowhere: there is no such folder"),
        (["RUN", "--figures", "nowhere"], "nowhere: has no figures.json; draw figures with"),
        (["RUN", "--learner.steps", "3"], "--learner.steps is not an option of this command"),
    ],
)
def test_a_mistake_gives_one_line_and_no_page(
    arguments: list[str],
    message: str,
    runs: list[Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [str(runs[0]) if word == "RUN" else word for word in arguments]
    assert main(["report", *words]) == 1
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
    assert not (tmp_path / "report.html").exists()
