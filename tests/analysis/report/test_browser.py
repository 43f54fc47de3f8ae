"""The page in a real browser, the system's own Chromium: loading, sorting, enlarging, phones, darkness and paper."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from toys import RESULT, change_json

from metadropout.cli import main

sync_api = pytest.importorskip("playwright.sync_api", reason="no browser test: playwright is not installed")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no browser test: there is no chromium on this machine")

SCRIPT = "<script>window.hacked = true</script><img src=x onerror='window.hacked = true'>"
CONTRAST = """(pairs) => {
  const probe = document.body.appendChild(document.createElement("i"));
  const light = (name) => {
    probe.style.setProperty("color", `var(${name})`);
    const parts = getComputedStyle(probe).color.match(/[\\d.]+/g).slice(0, 3).map((part) => part / 255);
    const [r, g, b] = parts.map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  return pairs.map(([one, other]) => {
    const [low, high] = [light(one), light(other)].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
  });
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium has no sandbox for root
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def report(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of runs with numbers that letters would put in another order, and with a script in a description."""
    folder = tmp_path_factory.mktemp("report")
    runs = [Path(shutil.copytree(trained / name, folder / name)) for name in ("maml", "maml-1", "metadropout")]
    for run, iteration, accuracies in zip(runs, (9, 12, 100), ([0.5], [0.06], [1.0]), strict=True):
        change_json(
            run / RESULT,
            lambda r, i=iteration, a=accuracies: r.update(iteration=i, accuracies=a, nlls=None),
        )
    untested = Path(shutil.copytree(runs[0], folder / "untested"))
    (untested / RESULT).unlink()
    config = yaml.safe_load((untested / "config.yaml").read_text())
    (untested / "config.yaml").write_text(yaml.safe_dump(config | {"description": SCRIPT}))
    out = folder / "report.html"
    assert main(["report", *map(str, (runs[0], untested, *runs[1:])), "--out", str(out)]) == 0
    return out


@pytest.fixture
def troubles() -> list[str]:
    """What the browser has complained of, or has asked the network for."""
    return []


@pytest.fixture
def page(browser: Any, report: Path, troubles: list[str], request: pytest.FixtureRequest) -> Iterator[Any]:
    """The page, opened in a window as `@pytest.mark.parametrize("page", [...], indirect=True)` says."""
    options = {"viewport": {"width": 1280, "height": 800}, **getattr(request, "param", {})}
    context = browser.new_context(**options)
    page = context.new_page()
    page.on("console", lambda message: troubles.append(message.text))
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.on("request", lambda asked: troubles.append(asked.url) if not asked.url.startswith("data:") else None)
    page.goto(report.as_uri())
    assert troubles == [report.as_uri()]  # the page itself, and nothing else
    troubles.clear()
    yield page
    context.close()


def column(page: Any, number: int) -> list[str]:
    cells = f"#comparison tbody tr > :nth-child({number})"
    return list(page.eval_on_selector_all(cells, "cells => cells.map((cell) => cell.dataset.value)"))


def test_it_loads_from_disk_without_network_complaint_or_foreign_script(page: Any, troubles: list[str]) -> None:
    page.wait_for_load_state("networkidle")
    assert page.title().startswith("glyphs, 3-way 1-shot")
    assert SCRIPT in page.inner_text("#configuration")
    assert page.eval_on_selector_all("img", "all => all.every((image) => image.complete && image.naturalWidth > 0)")
    assert troubles == []
    page.evaluate("document.body.append(Object.assign(document.createElement('script'), {text: 'window.hacked = 1'}))")
    assert page.evaluate("window.hacked") is None
    assert any("Content Security Policy" in trouble for trouble in troubles)


def test_tables_sort_by_number_both_ways_by_mouse_and_keyboard(page: Any, troubles: list[str]) -> None:
    heading = page.locator("#comparison th", has_text="Iterations")
    number = 1 + page.evaluate("th => [...th.parentNode.children].indexOf(th)", heading.element_handle())
    heading.locator("button").click()
    assert heading.get_attribute("aria-sort") == "ascending"
    assert column(page, number) == ["2", "9", "12", "100"]
    page.keyboard.press("Enter")  # the button has the focus
    assert heading.get_attribute("aria-sort") == "descending"
    assert column(page, number) == ["100", "12", "9", "2"]
    accuracy = page.locator("#comparison th", has_text="Accuracy")
    for order in (["0.06", "0.5", "1.0", ""], ["1.0", "0.5", "0.06", ""]):  # what has no value stays at the end
        accuracy.locator("button").click()
        assert column(page, 2) == order
    assert heading.get_attribute("aria-sort") is None
    assert troubles == []


@pytest.mark.parametrize("selector", [".chart .enlarge", ".picture .enlarge"])
def test_pictures_enlarge_and_escape_closes_them(page: Any, troubles: list[str], selector: str) -> None:
    button = page.locator(selector).first
    before = button.locator("svg, img").bounding_box()
    button.click()
    assert page.locator("dialog").is_visible()
    shown = page.locator("#stage > svg, #stage > img")
    assert shown.bounding_box()["width"] > before["width"]
    assert page.locator("#stage figcaption").is_visible()
    page.keyboard.press("Escape")
    assert not page.locator("dialog").is_visible()
    page.keyboard.press("Enter")  # the focus is back on the picture
    assert page.locator("dialog").is_visible()
    page.locator("dialog form button").click()
    assert not page.locator("dialog").is_visible()
    button.click()
    page.mouse.click(2, 2)
    assert not page.locator("dialog").is_visible()
    assert troubles == []


@pytest.mark.parametrize(
    "page", [{"viewport": {"width": width, "height": 780}} for width in (1280, 375)], indirect=True
)
def test_no_window_scrolls_sideways_and_wide_tables_scroll_in_themselves(page: Any) -> None:
    width = page.viewport_size["width"]
    assert page.evaluate("document.documentElement.scrollWidth") == width
    wide = page.eval_on_selector_all(".scroll", "all => all.filter((box) => box.scrollWidth > box.clientWidth).length")
    assert wide >= (3 if width == 375 else 1)
    assert page.eval_on_selector(".chart text", "text => text.getBoundingClientRect().height") >= 9


@pytest.mark.parametrize(
    ("page", "dark"), [({"color_scheme": "light"}, False), ({"color_scheme": "dark"}, True)], indirect=["page"]
)
def test_words_and_lines_can_be_seen_in_light_and_in_darkness(page: Any, dark: bool) -> None:
    words = [(text, ground) for text in ("--text", "--quiet", "--accent") for ground in ("--page", "--card", "--warm")]
    assert min(page.evaluate(CONTRAST, words)) >= 4.5
    assert min(page.evaluate(CONTRAST, [(f"--c{n}", "--card") for n in range(7)])) >= 3
    red = int(page.evaluate("getComputedStyle(document.body).backgroundColor").split("(")[1].split(",")[0])
    assert (red < 60) == dark


@pytest.mark.parametrize("page", [{"color_scheme": "dark"}], indirect=True)
def test_paper_is_white_and_shows_what_is_folded(page: Any) -> None:
    options = page.locator("#configuration dl")
    assert not options.is_visible()
    page.emulate_media(media="print")
    assert options.is_visible()
    assert not page.locator("nav").is_visible()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    page.emulate_media(media="screen")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")  # for browsers that cannot do it by style alone
    assert options.is_visible()
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert not options.is_visible()
