"""Runs under attack from the command line: what is measured, going on after a stop, and mistakes."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import yaml
from torch import Tensor, nn
from toys import small_files

from metadropout.analysis.plots import robustness_figure
from metadropout.cli import main
from metadropout.data.locks import exclusive
from metadropout.evaluation import Evaluation
from metadropout.learners import Classifier
from metadropout.noise import SeededNoise
from metadropout.robustness.attacks import NORMS, Norm
from metadropout.robustness.curves import GREY_RADII, Attack, AttackRequest, AttackResults, EpisodeResult, Target
from metadropout.runs.folder import open_run
from metadropout.training.checkpoints import latest_checkpoint
from metadropout.training.loop import TESTING, episode_sampler, open_splits

TINY = {
    "data": {"name": "glyphs", "train_classes": 12, "validation_classes": 6, "test_classes": 6},
    "episode": {"way": 3, "query": 3},
    "network": {"channels": 8},
    "learner": {"steps": 2},
    "training": {"iterations": 30, "meta_batch": 2, "validate_every": 100, "validation_episodes": 1},
    "machine": {"device": "cpu", "threads": 1},
}
FAST = ["--steps", "4", "--mc-samples", "2"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two short runs, `maml` and `metadropout`; not to be changed."""
    folder = tmp_path_factory.mktemp("runs")
    recipe = folder / "tiny.yaml"
    recipe.write_text(yaml.safe_dump(TINY))
    for name, perturbation in (("maml", "none"), ("metadropout", "metadropout")):
        assert main(["train", str(recipe), "--out", str(folder / name), "--perturbation.name", perturbation]) == 0
    return folder


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy of a run that a test may change."""
    return Path(shutil.copytree(trained / "maml", tmp_path / "run"))


def attack(runs: list[Path], out: Path, *arguments: str) -> int:
    return main(["attack", *map(str, runs), "--out", str(out), *FAST, *arguments])


def episodes_of(out: Path, name: str) -> list[dict[str, object]]:
    episodes: list[dict[str, object]] = json.loads((out / f"attack-{name}.json").read_text())["episodes"]
    return episodes


def adapted(run: Path, number: int = 0, steps: int = 20) -> tuple[Target, Classifier, Tensor, Tensor]:
    opened = open_run(run)
    splits = open_splits(opened.config)
    sampler = episode_sampler(opened.config, splits, "test", TESTING, 0)
    target = Target(opened, "last", splits, sampler, Attack({}, steps=steps), run.parent)
    episode = sampler(0, number)
    classify = target.learner.adapt(
        episode.support_x, episode.support_y, mc_samples=2, generator=SeededNoise(0, number)
    )
    return target, classify, episode.query_x, episode.query_y


def test_all_runs_norms_and_radii_are_measured_on_the_episodes_of_evaluate(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [trained / "maml", trained / "metadropout"]
    assert attack(runs, tmp_path, "--episodes", "2") == 0
    out, err = capsys.readouterr()
    assert "attacked jointly" in out
    assert "is attacked as it is" not in err  # both have been trained to their end
    data = json.loads((tmp_path / "attacks.json").read_text())
    found = {(row["run"], row["norm"], row["radius"]) for row in data["results"]}
    assert found == {(run.name, norm, r) for run in runs for norm in NORMS for r in GREY_RADII[norm]}
    for run in runs:
        assert main(["evaluate", str(run), "--episodes", "2", "--mc-samples", "2"]) == 0
        (path,) = run.glob("evaluation-test*.json")
        clean = json.loads(path.read_text())
        assert [episode["clean"] for episode in episodes_of(tmp_path, run.name)] == clean["accuracies"]
        mean, interval = 100 * clean["mean"], 100 * clean["interval_95"]
        assert out.count(f"| {run.name} | {mean:.2f} ± {interval:.2f} |") == 3  # once in the table of each norm
        for episode in episodes_of(tmp_path, run.name):
            for curve in episode["attacked"].values():  # type: ignore[attr-defined]
                falling = [episode["clean"], *curve.values()]
                assert falling == sorted(falling, reverse=True)
    assert (tmp_path / "attacks.png").stat().st_size > 10_000
    assert "| ℓ∞ | clean | ε = 0.02 |" in (tmp_path / "attacks.md").read_text()


def test_a_second_call_skips_what_is_done_and_adds_episodes_and_radii(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    attacked: list[tuple[int, Norm, list[float]]] = []
    original = Attack.on

    def spy(
        self: Attack, classify: Classifier, episode: object, number: int, norm: Norm, radii: list[float], **k: object
    ) -> object:
        attacked.append((number, norm, radii))
        return original(self, classify, episode, number, norm, radii, **k)  # type: ignore[arg-type]

    with patch.object(Attack, "on", spy):
        assert attack([run], out, "--norm", "l2", "--epsilon", "1", "0.5", "--episodes", "2") == 0
        assert attacked == [(0, "l2", [0.5, 1.0]), (1, "l2", [0.5, 1.0])]
        first = episodes_of(out, "run")
        attacked.clear()
        assert attack([run], out, "--norm", "l2", "--epsilon", "0", "1", "--episodes", "1") == 0
        assert attacked == []
        assert attack([run], out, "--norm", "l2", "--epsilon", "0.5", "1", "--episodes", "3") == 0
        assert attacked == [(2, "l2", [0.5, 1.0])]
        attacked.clear()
        # A larger radius starts from the one below, so those are attacked again; with the same result.
        assert attack([run], out, "--norm", "l2", "--epsilon", "2", "--episodes", "1") == 0
        assert attacked == [(0, "l2", [0.5, 1.0, 2.0])]
        attacked.clear()
        # All episodes have the same radii: those that are added, or were left behind, are attacked with all of them.
        assert attack([run], out, "--norm", "l2", "--epsilon", "1", "--episodes", "2") == 0
        assert attacked == [(1, "l2", [0.5, 1.0, 2.0])]
    now = episodes_of(out, "run")
    larger, smaller = now[0]["attacked"]["l2"], first[0]["attacked"]["l2"]  # type: ignore[index]
    assert {radius: larger[radius] for radius in smaller} == smaller
    whole = tmp_path / "whole"
    assert attack([run], whole, "--norm", "l2", "--epsilon", "0.5", "1", "2", "--episodes", "2") == 0
    assert episodes_of(whole, "run") == now[:2]


def test_runs_of_one_call_are_attacked_with_the_same_radii(trained: Path, tmp_path: Path) -> None:
    runs = [trained / "maml", trained / "metadropout"]
    assert attack(runs[:1], tmp_path, "--norm", "linf", "--epsilon", "0.02", "--epsilon", "0.1", "--episodes", "1") == 0
    assert attack(runs, tmp_path, "--norm", "linf", "--epsilon", "0.1", "--episodes", "2") == 0
    for run in runs:
        assert [list(e["attacked"]["linf"]) for e in episodes_of(tmp_path, run.name)] == [["0.02", "0.1"]] * 2  # type: ignore[index]
    rows = json.loads((tmp_path / "attacks.json").read_text())["results"]
    assert {row["radius"] for row in rows} == {0, 0.1}


def test_norms_have_radii_of_their_own_in_one_call(run: Path, tmp_path: Path) -> None:
    chosen = ["--norm", "linf", "--epsilon", "0.1", "0.02", "--norm", "l1", "--epsilon", "2.5"]
    assert attack([run], tmp_path, *chosen, "--episodes", "1") == 0
    rows = json.loads((tmp_path / "attacks.json").read_text())["results"]
    assert {(row["norm"], row["radius"]) for row in rows} == {
        ("l1", 0),
        ("l1", 2.5),
        ("linf", 0),
        ("linf", 0.02),
        ("linf", 0.1),
    }


def test_a_stop_keeps_what_was_measured(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--norm", "linf", "--epsilon", "0.1", "--episodes", "3"]
    original = Attack.on

    def stopped(self: Attack, classify: Classifier, episode: object, number: int, *rest: object, **k: object) -> object:
        if number == 1:
            raise KeyboardInterrupt
        return original(self, classify, episode, number, *rest, **k)  # type: ignore[arg-type]

    with patch.object(Attack, "on", stopped):
        assert attack([run], tmp_path, *arguments) == 130
    assert "what was measured is kept" in capsys.readouterr().err
    asked = json.loads((tmp_path / "attack-run.json").read_text())["asked"]
    assert asked == {"linf": {"episodes": 3, "radii": [0.1]}}
    assert len(episodes_of(tmp_path, "run")) == 1
    assert attack([run], tmp_path, *arguments) == 0
    assert len(episodes_of(tmp_path, "run")) == 3


def test_what_is_asked_for_is_known_by_norm_and_before_the_first_attack() -> None:
    results = AttackResults("run", {}, asked={"l1": AttackRequest(2, (1.0,)), "l2": AttackRequest(1, (0.5, 1.0))})
    assert results.unfinished() == results.asked
    results.episodes = [EpisodeResult(1.0, {"l1": {1.0: 0.5}, "l2": {0.5: 0.5}})]
    assert (results.done("l1"), results.done("l2")) == (1, 0)  # one of two episodes; not all radii
    results.episodes[0].attacked["l2"] = {0.5: 0.5, 1.0: 0.25, 2.0: 0.0}
    assert list(results.unfinished()) == ["l1"]


def test_a_larger_radius_is_never_a_weaker_attack_and_a_huge_one_fools_all(run: Path) -> None:
    target, classify, x, y = adapted(run)
    episode = target.sampler(0, 0)
    for norm, radii in {"l1": [1, 5, 784], "l2": [0.2, 1, 28], "linf": [0.01, 0.05, 1]}.items():
        left = list(target.attack.on(classify, episode, 0, norm, radii, jointly=True).values())  # type: ignore[arg-type]
        assert left == sorted(left, reverse=True)
        assert left[-1] <= 0.12  # one of nine images at most
    assert len(y) == len(x) == 9


def test_each_radius_starts_also_from_the_result_of_the_one_below(run: Path) -> None:
    """A classifier that only small movements fool: no random start in a larger ball would be one."""
    target, _, x, y = adapted(run, steps=1)

    def classify(images: Tensor) -> Tensor:
        distance = (images.detach() - x).abs().max()
        fooled = 0.001 < distance < 0.1
        right = nn.functional.one_hot(y, 3).to(images)
        return (-right if fooled else right) + 0 * images.sum()

    left = target.attack.on(classify, target.sampler(0, 0), 0, "linf", [0.05, 0.9], jointly=True)
    assert left == {0.05: 0.0, 0.9: 0.0}
    assert target.attack.on(classify, target.sampler(0, 0), 0, "linf", [0.9], jointly=True) == {0.9: 1.0}


def test_with_statistics_of_the_support_images_each_image_is_attacked_by_itself(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--norm", "linf", "--epsilon", "0.02", "--episodes", "1"]
    assert attack([run], tmp_path / "out", "--inductive", *arguments) == 0
    out, err = capsys.readouterr()
    assert "chosen for each image" in out
    assert "run: was trained transductively, and is tested inductively" in err
    assert attack([run], tmp_path / "out", *arguments) == 1
    message = capsys.readouterr().err
    assert "was measured with protocol inductive, but now it is transductive; choose another --out" in message


def test_an_unfinished_run_is_attacked_and_its_iteration_told(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["training"]["iterations"] = 500
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    assert attack([run], tmp_path, "--norm", "l1", "--epsilon", "0", "--episodes", "1") == 0
    assert "run: is attacked as it is after iteration 30 of 500" in capsys.readouterr().err


def change(section: str, option: str, value: object) -> Callable[[Path], None]:
    def apply(run: Path) -> None:
        config = yaml.safe_load((run / "config.yaml").read_text())
        config[section][option] = value
        (run / "config.yaml").write_text(yaml.safe_dump(config))

    return apply


def damage(run: Path) -> None:
    newest = latest_checkpoint(run / "checkpoints")
    assert newest is not None
    newest.write_bytes(newest.read_bytes()[:-5])


def no_results(run: Path) -> None:
    (run.parent / "out").mkdir()
    (run.parent / "out" / "attack-run.json").write_text('{"run": "run", "episodes": 3}')


MISTAKES: dict[str, tuple[Callable[[Path], object], list[str], str]] = {
    "a negative radius": (Path.exists, ["--norm", "l2", "--epsilon=-1"], "--epsilon is -1; it must be"),
    "a radius that is no number": (Path.exists, ["--norm", "l2", "--epsilon", "nan"], "--epsilon is nan; it must be"),
    "a radius without norm": (Path.exists, ["--epsilon", "1"], "--epsilon needs --norm l1, l2 or linf"),
    "a radius before its norm": (Path.exists, ["--epsilon", "1", "--norm", "l2"], "--epsilon needs --norm l1, l2 or"),
    "no steps": (Path.exists, ["--steps", "0"], "--steps is 0; it must be from 1 to 100000"),
    "an option of training": (Path.exists, ["--learner.steps", "3"], "--learner.steps cannot change here"),
    "no checkpoint": (lambda run: shutil.rmtree(run / "checkpoints"), [], "there is no checkpoint: they"),
    "a damaged checkpoint": (damage, [], "is damaged or not a checkpoint"),
    "an unknown option": (
        change("learner", "warmth", 3),
        [],
        "learner.warmth is not an option here; the options of learner are: .*if another version of metadropout wrote",
    ),
    "no run": (lambda run: (run / "config.yaml").unlink(), [], "is not a run's folder"),
    "damaged results": (no_results, [], "attack-run.json: is damaged: measured: .*; delete it and attack again"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_gives_one_line(mistake: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prepare, arguments, message = MISTAKES[mistake]
    prepare(run)
    capsys.readouterr()
    assert attack([run], tmp_path / "out", *arguments) == 1
    error = capsys.readouterr().err.strip()
    assert len(error.splitlines()) == 1
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(error)


def test_runs_on_other_tasks_are_refused_with_the_difference(
    trained: Path, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = trained / "metadropout"
    for section, option, value in (
        ("episode", "shot", 2),
        ("data", "test_classes", 5),
        ("episode", "protocol", "inductive"),
    ):
        other = Path(shutil.copytree(run, tmp_path / option))
        change(section, option, value)(other)
        assert attack([first, other], tmp_path / "out") == 1
        assert f"{other}: has {section}.{option} {value}, but {first} has " in capsys.readouterr().err
    assert attack([first, first], tmp_path / "out") == 1
    assert "two runs are called metadropout" in capsys.readouterr().err
    assert main(["attack", str(first), str(run)]) == 1
    assert "say with --out FOLDER where the results go" in capsys.readouterr().err


def test_a_run_that_is_being_attacked_and_a_full_disk_are_named(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--norm", "l2", "--epsilon", "1", "--episodes", "1"]
    with exclusive(tmp_path / "attack-run.lock"):
        assert attack([run], tmp_path, *arguments) == 1
    assert "another process is attacking this run" in capsys.readouterr().err
    with small_files(10):
        assert attack([run], tmp_path, *arguments) == 1
    assert "attack-run.json: cannot be written: File too large" in capsys.readouterr().err


def test_the_figure_has_a_panel_for_each_norm_and_magnifies_the_clean_accuracies() -> None:
    curve = {0.0: Evaluation([0.9, 0.96]), 1.0: Evaluation([0.2, 0.4])}
    results = {f"run {i}": dict.fromkeys(NORMS, curve) for i in range(9)}
    rows, figure = robustness_figure(results)
    assert rows[1] == {
        "run": "run 0",
        "norm": "l1",
        "radius": 1.0,
        "mean": pytest.approx(0.3),
        "interval_95": pytest.approx(1.96 * 0.1 / 2**0.5),
        "episodes": 2,
    }
    assert len(rows) == 9 * 3 * 2
    panels = figure.axes[3:]
    assert [axis.get_xlabel() for axis in panels] == [f"radius ε, {name} norm" for name in ("ℓ1", "ℓ2", "ℓ∞")]
    for axis, magnified in zip(panels, figure.axes[:3], strict=True):
        low, high = magnified.get_ylim()
        assert low < 100 * (0.93 - 1.96 * 0.03 / 2**0.5)
        assert 100 * (0.93 + 1.96 * 0.03 / 2**0.5) < high < 100
        looks = [(line.lines[0].get_color(), line.lines[0].get_linestyle()) for line in axis.containers]
        assert len(set(looks)) == len({line.lines[0].get_marker() for line in axis.containers}) == 9


class Wrapped(nn.Module):
    """An adapted classifier as a module, as other libraries want it."""

    def __init__(self, classify: Classifier) -> None:
        super().__init__()
        self.classify = classify

    def forward(self, x: Tensor) -> Tensor:
        return self.classify(x)


@pytest.mark.parametrize("name", ["maml", "metadropout"])
@pytest.mark.parametrize(("norm", "radius"), [("l1", 6.0), ("l2", 0.8), ("linf", 0.03)])
def test_the_attack_is_as_strong_as_foolboxs(trained: Path, name: str, norm: Norm, radius: float) -> None:
    """The same adapted models, radius and steps; the whole query batch at once, because it is normalised as one."""
    os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")  # git itself is not needed
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # foolbox imports a name that SciPy will drop
        foolbox = pytest.importorskip("foolbox", reason="needs foolbox: pip install 'metadropout[attacks]'")
    kinds = {
        "l1": foolbox.attacks.L1ProjectedGradientDescentAttack,
        "l2": foolbox.attacks.L2ProjectedGradientDescentAttack,
        "linf": foolbox.attacks.LinfProjectedGradientDescentAttack,
    }
    steps, ours, theirs, clean = 20, 0.0, 0.0, 0.0
    for number in range(3):
        target, classify, x, y = adapted(trained / name, number, steps)
        (left,) = target.attack.on(classify, target.sampler(0, number), number, norm, [radius], jointly=True).values()
        torch.manual_seed(number)
        model = foolbox.PyTorchModel(Wrapped(classify).eval(), bounds=(0, 1), device="cpu")
        _, moved, _ = kinds[norm](steps=steps, rel_stepsize=2.5 / steps)(model, x, y, epsilons=radius)
        with torch.no_grad():
            clean += float((classify(x).argmax(dim=1) == y).float().mean()) / 3
            theirs += float((classify(moved).argmax(dim=1) == y).float().mean()) / 3
        ours += left / 3
    assert theirs < clean  # foolbox does something, so that there is something to compare with
    assert ours <= theirs + 0.01
