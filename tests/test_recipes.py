"""Every shipped recipe loads, builds and says what METHOD and the paper say."""

from __future__ import annotations

import pytest

import metadropout as md
from metadropout.config import build_learner
from metadropout.data import ImageShape
from metadropout.recipes import load_recipe, recipe_names

SHAPES = {"glyphs": ImageShape(1, 28, 28), "omniglot": ImageShape(1, 28, 28), "miniimagenet": ImageShape(3, 84, 84)}

# Settings as published: way, shot, meta-batch, inner rate, iterations, meta rate, channels.
PAPER = {
    "omniglot-20way-1shot": (20, 1, 8, 0.1, 40_000, 1e-3, 64),
    "omniglot-20way-5shot": (20, 5, 6, 0.4, 40_000, 1e-3, 64),
    "miniimagenet-5way-1shot": (5, 1, 4, 0.01, 60_000, 1e-4, 32),
    "miniimagenet-5way-5shot": (5, 5, 4, 0.01, 60_000, 1e-4, 32),
}
PUBLIC = {
    "public-omniglot-20way-1shot-maml": (20, 1, 4, 0.1, 60_000, 1e-3, 64),
    "public-omniglot-20way-1shot-metadropout": (20, 1, 4, 0.1, 60_000, 3e-4, 64),
    "public-omniglot-20way-5shot-metadropout": (20, 5, 4, 0.4, 60_000, 1e-3, 64),
    "public-miniimagenet-5way-1shot-metadropout": (5, 1, 4, 0.01, 60_000, 1e-4, 32),
    "public-miniimagenet-5way-5shot-maml": (5, 5, 4, 0.01, 60_000, 1e-4, 32),
}
ROWS = {
    "maml": (md.MAML, md.NoPerturbation),
    "metadropout": (md.MAML, md.MetaDropout),
    "metasgd": (md.MetaSGD, md.NoPerturbation),
    "metasgd-metadropout": (md.MetaSGD, md.MetaDropout),
}
SETTINGS = {f"{setting}-{row}": numbers for setting, numbers in PAPER.items() for row in ROWS} | PUBLIC


@pytest.mark.parametrize("name", recipe_names())
def test_recipe_loads_and_builds_what_its_name_says(name: str) -> None:
    config = load_recipe(name)
    assert config.description
    learner = build_learner(config, SHAPES[config.data["name"]])
    row = next(row for row in sorted(ROWS, key=len, reverse=True) if name.endswith(f"-{row}"))
    kind, perturbation = ROWS[row]
    assert type(learner) is kind
    assert type(learner.perturbation) is perturbation
    assert learner.steps == 5
    assert config.episode.query == 15
    assert config.training.clip == 3.0


@pytest.mark.parametrize("name", SETTINGS)
def test_recipe_has_the_published_setting(name: str) -> None:
    c = load_recipe(name)
    numbers = (
        c.episode.way,
        c.episode.shot,
        c.training.meta_batch,
        c.learner["inner_lr"],
        c.training.iterations,
        c.training.meta_lr,
        c.network["channels"],
    )
    assert numbers == SETTINGS[name]
    assert "accuracy" in c.reported


def test_an_unknown_recipe_suggests_the_closest() -> None:
    with pytest.raises(md.ConfigError, match=r"did you mean .*omniglot-20way-1shot-maml"):
        load_recipe("omniglot-20way-1-shot-maml")
