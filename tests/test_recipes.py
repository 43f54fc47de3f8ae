"""Every shipped recipe loads, builds and says what METHOD and the paper say."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import metadropout as md
from metadropout.cli import main
from metadropout.cli.recipes import groups
from metadropout.config import build_learner
from metadropout.data import ImageShape
from metadropout.perturbations import PERTURBATIONS
from metadropout.recipes import load_recipe, recipe_names, tables
from metadropout.robustness.attacks import NORMS
from metadropout.robustness.curves import COLOUR_RADII, GREY_RADII

SHAPES = {
    "glyphs": ImageShape(1, 28, 28),
    "omniglot": ImageShape(1, 28, 28),
    "miniimagenet": ImageShape(3, 84, 84),
    "cifar_fs": ImageShape(3, 32, 32),
}

# Settings as published: way, shot, meta-batch, inner rate, iterations, meta rate, channels.
PAPER = {
    "omniglot-20way-1shot": (20, 1, 8, 0.1, 40_000, 1e-3, 64),
    "omniglot-20way-5shot": (20, 5, 6, 0.4, 40_000, 1e-3, 64),
    "miniimagenet-5way-1shot": (5, 1, 4, 0.01, 60_000, 1e-4, 32),
    "miniimagenet-5way-5shot": (5, 5, 4, 0.01, 60_000, 1e-4, 32),
}
PUBLIC = {
    "public-omniglot-5way-1shot-metadropout": (5, 1, 4, 0.1, 2000, 1e-3, 64),
    "public-omniglot-20way-1shot-maml": (20, 1, 4, 0.1, 60_000, 1e-3, 64),
    "public-omniglot-20way-1shot-metadropout": (20, 1, 4, 0.1, 60_000, 3e-4, 64),
    "public-omniglot-20way-5shot-metadropout": (20, 5, 4, 0.4, 60_000, 1e-3, 64),
    "public-miniimagenet-5way-1shot-metadropout": (5, 1, 4, 0.01, 60_000, 1e-4, 32),
    "public-miniimagenet-5way-5shot-maml": (5, 5, 4, 0.01, 60_000, 1e-4, 32),
}
ROWS: dict[str, tuple[type, str, dict[str, float | str]]] = {
    "maml": (md.MAML, "none", {}),
    "metadropout": (md.MAML, "metadropout", {}),
    "metasgd": (md.MetaSGD, "none", {}),
    "metasgd-metadropout": (md.MetaSGD, "metadropout", {}),
    **{f"mixup-{g}": (md.MAML, "mixup", {"gamma": float(g)}) for g in ("0.2", "1", "2")},
    **{f"vib-{w}": (md.MAML, "vib", {"kl_weight": float(w)}) for w in ("1e-5", "1e-4", "1e-3")},
    **{
        f"information-dropout-{w}": (md.MAML, "information-dropout", {"kl_weight": float(w)})
        for w in ("1e-5", "1e-4", "1e-3")
    },
    "additive": (md.MAML, "additive", {"noise_scale": 0.1}),
    **{
        name: (md.MAML, name, {})
        for name in (
            "fixed-gaussian",
            "weight-gaussian",
            "independent-gaussian",
            "more-parameters",
            "deterministic",
            "learned-variance",
        )
    },
}
ROBUSTNESS: dict[str, tuple[type, str, dict[str, float | str]]] = {
    **{
        f"adversarial-{norm}-{size}": (md.MAML, "adversarial", {"norm": norm, "attack_steps": 10})
        for norm in ("l1", "l2", "linf")
        for size in ("small", "large")
    },
    **{name: (md.MAML, name, {}) for name in ("mixup", "vib", "information-dropout")},
}
SETTINGS = {f"{setting}-{row}": numbers for setting, numbers in PAPER.items() for row in (*ROWS, *ROBUSTNESS)} | PUBLIC


def row_of(name: str) -> str:
    return next(row for row in sorted(ROWS | ROBUSTNESS, key=len, reverse=True) if name.endswith(f"-{row}"))


MAML_AND_METASGD = [name for name in recipe_names() if load_recipe(name).learner["name"] in ("maml", "metasgd")]
"""The recipes that are tested here; those of other learners are tested in files of their own."""


@pytest.mark.parametrize("name", MAML_AND_METASGD)
def test_recipe_loads_and_builds_what_its_name_says(name: str) -> None:
    config = load_recipe(name)
    assert config.description
    learner = build_learner(config, SHAPES[config.data["name"]])
    kind, perturbation, options = (ROWS | ROBUSTNESS)[row_of(name)]
    assert type(learner) is kind
    assert type(learner.perturbation) is PERTURBATIONS[perturbation]
    assert {key: config.perturbation[key] for key in options} == options
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
    assert ("accuracy" in c.reported) == ("adversarial" not in name)  # of those the paper shows a figure only


def test_tables_have_the_papers_rows_in_the_papers_order() -> None:
    assert list(tables()["small"].rows) == ["maml", "metadropout", "metasgd", "metasgd-metadropout"]
    weights = ("1e-5", "1e-4", "1e-3")
    assert list(tables()["table2"].rows) == [
        *("maml", "mixup-0.2", "mixup-1", "mixup-2"),
        *(f"vib-{weight}" for weight in weights),
        *(f"information-dropout-{weight}" for weight in weights),
        *("additive", "metadropout"),
    ]
    assert list(tables()["table3"].rows) == [
        *("maml", "fixed-gaussian", "weight-gaussian", "independent-gaussian"),
        *("more-parameters", "deterministic", "learned-variance", "metadropout"),
    ]
    assert list(tables()["robustness"].rows)[-2:] == ["information-dropout", "metadropout"]
    for name in ("table1", "table2", "table3", "robustness"):
        table = tables()[name]
        assert set(PAPER) <= set(table.settings)
        assert {f"{setting}-{row}" for setting in table.settings for row in table.rows} <= set(recipe_names())


@pytest.mark.parametrize("setting", tables()["robustness"].settings)
def test_adversarial_rows_train_with_the_smallest_and_the_largest_radius_of_the_test(setting: str) -> None:
    radii = GREY_RADII if setting.startswith(("omniglot", "glyphs")) else COLOUR_RADII
    for norm in NORMS:
        small, large = (load_recipe(f"{setting}-adversarial-{norm}-{size}").perturbation for size in ("small", "large"))
        assert (small["radius"], large["radius"]) == (radii[norm][1], radii[norm][-1])


@pytest.mark.parametrize("setting", PAPER)
@pytest.mark.parametrize("row", ["mixup", "vib", "information-dropout"])
def test_regularisers_are_attacked_with_their_best_weight_in_table_2(setting: str, row: str) -> None:
    candidates = [load_recipe(f"{setting}-{name}") for name in tables()["table2"].rows if name.startswith(row)]
    best = max(candidates, key=lambda config: config.reported["accuracy"])
    assert len(candidates) == 3
    chosen = load_recipe(f"{setting}-{row}")
    assert (chosen.perturbation, chosen.reported) == (best.perturbation, best.reported)


@pytest.mark.parametrize("name", [name for name in MAML_AND_METASGD if name.startswith("glyphs-5way-1shot-")])
def test_every_row_trains_a_step_at_a_tiny_size(name: str, tmp_path: Path) -> None:
    tiny = ["--training.iterations", "1", "--training.meta_batch", "1", "--training.validation_episodes", "1"]
    tiny += ["--network.channels", "2", "--episode.query", "1", "--learner.steps", "2", "--machine.threads", "1"]
    tiny += ["--data.train_classes", "6", "--data.validation_classes", "6", "--data.test_classes", "6"]
    assert main(["train", name, "--out", str(tmp_path / "run"), *tiny]) == 0
    assert main(["evaluate", str(tmp_path / "run"), "--episodes", "1", "--mc-samples", "2"]) == 0


@pytest.mark.parametrize("name", [f"{setting}-{row}" for setting in PAPER for row in ROWS])
def test_every_row_of_the_papers_settings_takes_a_step_with_few_channels(name: str) -> None:
    config = load_recipe(name, {"network.channels": 2, "learner.steps": 1, "episode.query": 1, "episode.way": 2})
    shape = SHAPES[config.data["name"]]
    learner = build_learner(config, shape)
    g = torch.Generator().manual_seed(0)
    images = torch.rand(2 * (config.episode.shot + 1), shape.channels, shape.height, shape.width, generator=g)
    labels = torch.tensor([0, 1]).repeat(config.episode.shot + 1)
    episode = md.Episode(images[2:], labels[2:], images[:2], labels[:2])
    result = learner.task_gradient(episode, generator=md.SeededNoise(0))
    assert all(gradient.isfinite().all() for gradient in result.gradients.values())
    own = {key: g for key, g in result.gradients.items() if key.startswith("perturbation.")}
    assert all(gradient.abs().max() > 0 for key, gradient in own.items() if key.endswith("weight"))


def test_an_unknown_recipe_suggests_the_closest() -> None:
    with pytest.raises(md.ConfigError, match=r"did you mean .*omniglot-20way-1shot-maml"):
        load_recipe("omniglot-20way-1-shot-maml")


def test_the_overview_starts_with_the_small_settings_and_names_all_settings_and_rows(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    first = [line.split()[0] for line in lines if line.startswith("  ")]
    assert first[1:3] == ["glyphs-5way-1shot", "glyphs-20way-1shot"]
    assert first.index("metadropout") < first.index("adversarial-l1-small")
    assert len(lines) < 120
    assert {name for table in tables().values() for name in (*table.settings, *table.rows)} <= set(first)


def test_every_setting_of_a_group_goes_with_each_of_its_rows() -> None:
    made = {
        f"{setting}-{row}"
        for group in groups()
        for setting in (name for table in group for name in table.settings)
        for row in (name for table in group for name in table.rows)
    }
    assert made == set(recipe_names())


def test_recipes_are_found_by_words_in_their_names_and_descriptions(capsys: pytest.CaptureFixture[str]) -> None:
    def found(*words: str) -> list[str]:
        assert main(["recipes", *words]) == 0
        return [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]]

    glyphs = [name for name in recipe_names() if name.startswith("glyphs")]
    assert found("glyphs") == found("Glyphs") == found("glyphs-*") == glyphs
    assert found("20way", "glyphs", "metasgd") == [
        "glyphs-20way-1shot-metasgd",
        "glyphs-20way-1shot-metasgd-metadropout",
        "glyphs-20way-1shot-unicorn-metasgd",
    ]
    assert found("smallest radius", "glyphs-5way")[0] == "glyphs-5way-1shot-adversarial-l1-small"
    assert main(["recipes", "omniglot-20way-5shot-metasgd"]) == 0  # a whole name shows the recipe
    assert "inner_lr: 0.4" in capsys.readouterr().out
    assert main(["recipes", "glyphs-5way-1shot-metadrop0ut"]) == 1
    assert "did you mean glyphs-5way-1shot-metadropout" in capsys.readouterr().err
    assert main(["recipes", "glyphs", "violins"]) == 1
    assert "no recipe fits 'glyphs violins'" in capsys.readouterr().err
