"""The page in a real browser: drawing by mouse, finger and keys, photos, looking inside, errors, both themes."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from PIL import Image

PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}
SHAPES = {
    "circle": [(0.5, 0.2), (0.75, 0.35), (0.8, 0.6), (0.6, 0.8), (0.35, 0.78), (0.2, 0.55), (0.28, 0.3), (0.5, 0.2)],
    "cross": [(0.2, 0.2), (0.8, 0.8), (0.5, 0.5), (0.8, 0.2), (0.2, 0.8)],
    "stairs": [(0.2, 0.2), (0.2, 0.5), (0.5, 0.5), (0.5, 0.8), (0.8, 0.8)],
}


@pytest.fixture
def troubles() -> list[str]:
    """What the browser has complained of, or has asked another host for."""
    return []


@pytest.fixture
def page(browser: Any, address: str, troubles: list[str], request: pytest.FixtureRequest) -> Iterator[Any]:
    """The page, opened in a window as `@pytest.mark.parametrize("page", [...], indirect=True)` says."""
    context = browser.new_context(**{"viewport": {"width": 1280, "height": 860}, **getattr(request, "param", {})})
    page = context.new_page()
    page.set_default_timeout(60_000)
    page.on("console", lambda message: troubles.append(message.text))
    page.on("pageerror", lambda error: troubles.append(str(error)))
    foreign = re.compile(rf"(?!{re.escape(address)}/|data:)")
    page.on("request", lambda asked: troubles.append(asked.url) if foreign.match(asked.url) else None)
    page.goto(address)
    page.wait_for_selector("body[data-ready=true]")
    yield page
    context.close()


def pads(page: Any) -> Any:
    return page.locator("#draw-cards canvas")


def new_pad(page: Any) -> Any:
    return page.get_by_role("application", name=re.compile("^New drawing"))


def draw(page: Any, pad: Any, shape: str, shift: float = 0.0) -> None:
    """Draw with the mouse."""
    pad.scroll_into_view_if_needed()
    box = pad.bounding_box()
    points = [(box["x"] + (x + shift) * box["width"], box["y"] + y * box["height"]) for x, y in SHAPES[shape]]
    page.mouse.move(*points[0])
    page.mouse.down()
    for point in points[1:]:
        page.mouse.move(*point, steps=4)
    page.mouse.up()


def draw_by_touch(page: Any, pad: Any, shape: str) -> None:
    """Draw with a finger; the page must not scroll meanwhile."""
    pad.scroll_into_view_if_needed()
    box = pad.bounding_box()
    points = [{"x": box["x"] + x * box["width"], "y": box["y"] + y * box["height"]} for x, y in SHAPES[shape]]
    session = page.context.new_cdp_session(page)
    session.send("Input.dispatchTouchEvent", {"type": "touchStart", "touchPoints": [points[0]]})
    for a, b in pairwise(points):
        for part in (0.33, 0.66, 1.0):
            between = {axis: a[axis] + part * (b[axis] - a[axis]) for axis in ("x", "y")}
            session.send("Input.dispatchTouchEvent", {"type": "touchMove", "touchPoints": [between]})
    session.send("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})
    assert pad.bounding_box() == box


def verdict(page: Any, pattern: str, where: str = "#draw-answer") -> None:
    page.wait_for_function(
        "([where, pattern]) => new RegExp(pattern).test(document.querySelector(where + ' .verdict')?.textContent)",
        arg=[where, pattern],
    )


def test_a_copy_of_an_example_drawn_by_mouse_gets_its_class(page: Any, troubles: list[str]) -> None:
    page.get_by_role("button", name="Start empty").click()
    assert pads(page).count() == 3
    assert "at least two classes" in page.inner_text("#draw-answer")
    for number, shape in enumerate(("circle", "cross", "stairs")):
        draw(page, pads(page).nth(number), shape)
    page.get_by_label("Name of class 2").fill("kite")
    for shape, name in (("cross", "kite"), ("stairs", "C"), ("circle", "A")):
        page.get_by_role("button", name="Clear New drawing").click()
        draw(page, new_pad(page), shape, shift=0.05)  # place and size do not matter
        verdict(page, f"^(It is|Probably) {name}$")
    assert page.locator(".card.best").get_attribute("aria-label") == "Class A"
    assert "adapted in" in page.inner_text("#status")
    assert troubles == []


@pytest.mark.parametrize("page", [PHONE], indirect=True)
def test_a_finger_draws_and_the_phone_neither_scrolls_nor_is_too_narrow(page: Any, troubles: list[str]) -> None:
    page.get_by_role("button", name="Start empty").tap()
    for number, shape in enumerate(("circle", "cross")):
        draw_by_touch(page, pads(page).nth(number), shape)
    draw_by_touch(page, new_pad(page), "cross")
    verdict(page, "(It is|Probably) B")
    for tab in ("Draw", "Photos", "See"):
        page.get_by_role("tab", name=tab).tap()
        assert page.evaluate("document.documentElement.scrollWidth") == 390
    assert troubles == []


def test_the_keyboard_draws_moves_and_undoes(page: Any, troubles: list[str]) -> None:
    new_pad(page).focus()
    page.keyboard.press("Space")
    for key in ["Shift+ArrowRight"] * 2 + ["Shift+ArrowDown"] * 2:
        page.keyboard.press(key)
    page.keyboard.press("Space")
    assert "1 stroke." in new_pad(page).get_attribute("aria-label")
    verdict(page, "(It is|Probably|perhaps) [A-E]")
    page.keyboard.press("Backspace")
    assert "empty." in new_pad(page).get_attribute("aria-label")
    page.get_by_role("tab", name="Draw").focus()
    page.keyboard.press("ArrowRight")
    assert page.locator("#photos").is_visible()
    assert troubles == []


def test_classes_and_examples_are_added_and_removed(page: Any, troubles: list[str]) -> None:
    cards = page.locator("#draw-cards .card")
    assert cards.count() == 5
    page.get_by_role("button", name="+ class").click()
    assert cards.count() == 6
    draw(page, pads(page).last, "circle")
    page.wait_for_function("() => document.querySelectorAll('#draw-answer .bars li').length === 6")
    cards.first.get_by_role("button", name="+ example").click()
    assert cards.first.locator("canvas").count() == 2
    page.get_by_role("button", name="Remove class B").click()
    assert cards.count() == 5
    page.wait_for_function("() => document.querySelectorAll('#draw-answer .bars li').length === 5")
    while cards.count() < 20:
        page.get_by_role("button", name="+ class").click()
    assert not page.get_by_role("button", name="+ class").is_visible()
    while cards.count() > 2:
        cards.last.get_by_role("button", name=re.compile("^Remove class")).click()
    assert cards.last.get_by_role("button", name=re.compile("^Remove class")).is_disabled()
    assert troubles == []


def test_unseen_characters_by_another_hand_and_sliders(page: Any, troubles: list[str]) -> None:
    with page.expect_response("**/api/glyphs*"):
        page.get_by_role("button", name="New characters").click()
    page.get_by_role("button", name="By another hand").click()
    verdict(page, "[A-E]$")
    assert page.locator(".sees canvas").is_visible()
    page.locator("#draw summary").click()
    controls = page.locator("#draw-controls")
    controls.get_by_label("Steps of adapting").fill("0")
    verdict(page, "Not sure")  # all classes are alike before the first step
    controls.get_by_label("Noise samples").fill("2")
    controls.get_by_label("Steps of adapting").fill("5")
    page.wait_for_function("() => document.getElementById('status').textContent.includes('(2 noise samples)')")
    controls.locator("select").select_option("omniglot-5way-1shot-maml")
    page.wait_for_function("() => !document.getElementById('status').textContent.includes('noise')")
    assert troubles == []


def test_both_learners_are_seen_side_by_side(page: Any, troubles: list[str]) -> None:
    page.get_by_role("button", name="By another hand").click()
    page.get_by_role("tab", name="See").click()
    page.wait_for_selector("#see-features canvas")
    assert page.locator("#see-probabilities h4").all_inner_texts() == ["MAML", "MAML + Meta-dropout"]
    assert page.locator("#see-boundary svg").count() == 2
    assert page.locator("#see-boundary .perturbed").count() == 20  # ten copies of two examples, by one of the learners
    assert page.locator("#see-boundary .mine").count() == 2
    assert page.locator("#see-multipliers tbody tr").count() == 5
    assert page.locator("#see-features tbody td canvas").count() >= 8
    before = page.locator("#see-boundary").inner_html()
    page.locator("#see-pair select").first.select_option("4")
    page.wait_for_function("before => document.getElementById('see-boundary').innerHTML !== before", arg=before)
    page.get_by_label("Inner steps").fill("0")
    verdict(page, "Not sure", "#see-probabilities")
    page.get_by_label("Noise samples S").fill("3")
    page.wait_for_load_state("networkidle")
    assert troubles == []


def photo(colour: tuple[int, int, int], name: str) -> dict[str, Any]:
    file = io.BytesIO()
    image = Image.radial_gradient("L").resize((90, 60))
    Image.composite(Image.new("RGB", image.size, colour), Image.new("RGB", image.size, "white"), image).save(
        file, "PNG"
    )
    return {"name": name, "mimeType": "image/png", "buffer": file.getvalue()}


def test_photos_are_chosen_classified_and_bad_files_named(page: Any, troubles: list[str]) -> None:
    page.get_by_role("tab", name="Photos").click()
    red, blue = photo((220, 20, 20), "red.png"), photo((20, 20, 220), "blue.png")
    page.get_by_label("Choose photos for Class A").set_input_files([red])
    page.get_by_label("Choose photos for Class B").set_input_files([blue])
    page.get_by_role("img", name="Photo 1 of Class B").wait_for()
    page.get_by_label("Choose test photos").set_input_files([blue])
    verdict(page, "Class B", "#photos-answers")
    assert troubles == []
    page.get_by_label("Choose test photos").set_input_files([
        {"name": "page.html", "mimeType": "text/html", "buffer": b"<script>window.hacked = 1</script>"}
    ])  # fmt: skip
    alert = page.get_by_role("alert")
    alert.wait_for()
    assert "page.html: this file cannot be used: not an image" in alert.inner_text()
    assert page.evaluate("window.hacked") is None
    assert all("422" in trouble for trouble in troubles)  # the browser notes every answer that is an error


def test_an_answer_that_fails_is_said_and_a_forgotten_task_is_sent_again(page: Any, troubles: list[str]) -> None:
    answers = iter([(410, "forgotten"), None, (503, "busy")])

    def meddle(route: Any) -> None:
        answer = next(answers, None)
        if answer is None:
            route.continue_()
        else:
            error = {"error": {"code": answer[1], "message": "too many wait"}}
            route.fulfill(status=answer[0], json=error)

    page.wait_for_function("() => document.getElementById('status').textContent.includes('adapted')")
    page.route("**/api/classify", meddle)
    page.get_by_role("button", name="By another hand").click()
    verdict(page, "[A-E]$")
    page.get_by_role("button", name="By another hand").click()
    page.get_by_role("alert").wait_for()
    assert page.get_by_role("alert").inner_text() == "too many wait"
    page.unroute("**/api/classify")
    page.get_by_role("button", name="By another hand").click()
    page.wait_for_function("() => document.getElementById('error').hidden")


def test_a_foreign_script_does_not_run(page: Any, troubles: list[str]) -> None:
    page.evaluate("document.body.append(Object.assign(document.createElement('script'), {text: 'window.hacked = 1'}))")
    assert page.evaluate("window.hacked") is None
    assert any("Content Security Policy" in trouble for trouble in troubles)


CONTRAST = """(pairs) => {
  const canvas = new OffscreenCanvas(1, 1).getContext("2d");
  const probe = document.body.appendChild(document.createElement("i"));
  const light = (name) => {
    probe.style.setProperty("color", `var(${name})`);
    canvas.fillStyle = getComputedStyle(probe).color;
    canvas.fillRect(0, 0, 1, 1);
    const parts = [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3).map((part) => part / 255);
    const [r, g, b] = parts.map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  return pairs.map(([one, other]) => {
    const [low, high] = [light(one), light(other)].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
  });
}"""


@pytest.mark.parametrize(
    ("page", "dark"), [({"color_scheme": "light"}, False), ({"color_scheme": "dark"}, True)], indirect=["page"]
)
def test_words_and_ink_can_be_read_in_both_themes(page: Any, dark: bool) -> None:
    words = [(text, ground) for text in ("--text", "--quiet", "--accent") for ground in ("--page", "--card")]
    words += [("--ink", "--paper"), ("--bad", "--bad-soft"), ("--on-accent", "--accent")]
    assert min(page.evaluate(CONTRAST, words)) >= 4.5
    red = int(page.evaluate("getComputedStyle(document.body).backgroundColor").split("(")[1].split(",")[0])
    assert (red < 60) == dark


def test_everything_that_can_be_used_has_a_name(page: Any) -> None:
    for tab in ("Draw", "Photos", "See"):
        page.get_by_role("tab", name=tab).click()
        page.wait_for_load_state("networkidle")
        nameless = page.eval_on_selector_all(
            "button, input, select, canvas[tabindex], [role=img]",
            """all => all.filter((e) => e.checkVisibility())
                         .filter((e) => !(e.ariaLabel || e.labels?.length || e.innerText?.trim()))
                         .map((e) => e.outerHTML)""",
        )
        assert nameless == []
