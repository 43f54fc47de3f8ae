import pytest

from metadropout.data.labels import drawable

font_manager = pytest.importorskip("matplotlib.font_manager")


def test_names_in_the_default_font_stay_as_they_are(caplog: pytest.LogCaptureFixture) -> None:
    assert drawable(["café", "a b", "Ω\n$x"]) == (["café", "a b", "Ω\n$x"], ["sans-serif"])
    assert not caplog.messages


def test_characters_are_taken_from_an_installed_font_that_has_them(caplog: pytest.LogCaptureFixture) -> None:
    labels = drawable(["ᶁ"])  # comes with matplotlib, in STIX, and is not in DejaVu Sans
    assert labels.texts == ["ᶁ"]
    assert labels.families[0] == "sans-serif"
    assert len(labels.families) == 2
    assert not caplog.messages


def test_characters_that_no_font_has_are_spelt_out_and_mentioned_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    manager = font_manager.fontManager
    # The font of last resort has a box for every character: that is not what is wanted.
    few = [entry for entry in manager.ttflist if entry.name.startswith(("DejaVu", "Last Resort"))]
    monkeypatch.setattr(manager, "ttflist", few)
    assert drawable(["猫", "a 犬猫"]) == (["\\u732b", "a \\u72ac\\u732b"], ["sans-serif"])
    assert caplog.messages == [
        "no installed font has the characters 犬猫: they are drawn as codes; install Noto Sans CJK, say"
    ]


def test_unprintable_characters_are_spelt_out() -> None:
    assert drawable(["a\x07\tb\udce9"]).texts == ["a\\x07 b\\udce9"]
