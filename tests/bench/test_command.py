"""`metadropout bench` measures, prints, writes and can be stopped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from metadropout.bench import growth
from metadropout.bench.comparison import Comparison
from metadropout.bench.growth import points
from metadropout.bench.measuring import Timing
from metadropout.bench.problem import SETTINGS, Method, Setting
from metadropout.cli import bench, main

TINY = [
    "--way", "2", "--query", "1", "--channels", "4", "--meta-batch", "1", "--steps", "1", "--image-size", "16",
    "--rounds", "1", "--threads", "1",
]  # fmt: skip


def invented(setting: Setting, method: Method, implementations: Any, **_: object) -> Comparison:
    """A comparison with known figures, in which plain PyTorch takes three times as long."""
    limit = Timing("convolutions alone", [0.5, 1.0, 1.5], 0)
    results = [
        Timing(i.name, [1 + 2.0 * n, 2 + 4.0 * n, 3 + 6.0 * n], 7_000_000) for n, i in enumerate(implementations)
    ]
    return Comparison(setting, method, 4_000_000_000, 1e-14, 1e-6, limit, results)


def test_a_comparison_is_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--method", "metadropout", "--precision", "bf16", "--markdown", "--out", str(tmp_path)]
    assert main(["bench", *options, *TINY]) == 0
    printed = capsys.readouterr().out
    assert "**MAML + Meta-dropout: 2-way 1-shot, 1 queries per class, 16x16x1, 4 channels" in printed
    record = json.loads((tmp_path / "training.json").read_text())
    assert record["environment"]["cores"] >= 1
    assert record["environment"]["cpu"]
    (comparison,) = record["comparisons"]
    names = ["metadropout", "metadropout, bfloat16", "plain PyTorch"]
    assert [result["name"] for result in comparison["results"]] == names
    assert 0 < comparison["rounded_difference"] < 1
    times = [comparison["summary"][name]["median_seconds"] for name in names[:2]]
    assert f"In bfloat16 training is {times[0] / times[1]:.2f} (" in printed
    assert comparison["float64_difference"] < 1e-10
    assert comparison["float32_difference"] < 0.1
    for result in comparison["results"]:
        assert len(result["seconds"]) == 1
        assert f"| {result['name']} | {result['seconds'][0]:.3f} |" in printed
        assert result["peak_memory"] > 0
    theirs, ours = (comparison["summary"][name] for name in ("plain PyTorch", "metadropout"))
    ratio = theirs["median_seconds"] / ours["median_seconds"]
    assert theirs["times_as_long_as_metadropout"]["median"] == pytest.approx(ratio)
    assert (tmp_path / "training.png").stat().st_size > 1000


@pytest.mark.parametrize("what", ["evaluation", "growth", "learners"])
def test_other_precisions_are_measured_in_training_only(what: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", what, "--precision", "bf16"]) == 1
    assert f"bench {what} takes no --precision" in capsys.readouterr().err


def test_without_a_precision_only_float32_is_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "compare", invented)
    assert main(["bench", "--method", "metadropout"]) == 0
    assert "bfloat16" not in capsys.readouterr().out


def test_evaluation_compares_a_batch_of_samples_with_two_loops(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "SAMPLES", (3,))
    assert main(["bench", "evaluation", "--shot", "2", "--out", str(tmp_path), *TINY]) == 0
    assert "2-shot, S = 3" in capsys.readouterr().out
    (cost,) = json.loads((tmp_path / "evaluation.json").read_text())["costs"]
    assert cost["samples"] == 3
    assert cost["setting"]["shot"] == 2
    assert cost["float64_difference"] < 1e-10
    for way in ("loop", "plain"):
        ratio = cost[way]["seconds"][0] / cost["batch"]["seconds"][0]
        assert cost[f"{way}_takes_times_as_long"]["median"] == pytest.approx(ratio)
    assert (tmp_path / "evaluation.png").stat().st_size > 1000


def test_growth_changes_one_number_at_a_time_and_measures_a_setting_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    monkeypatch.setattr(growth, "GRID", {"way": (5, 10), "steps": (1, 5)})
    monkeypatch.setattr(bench, "compare", lambda *a, **k: calls.append(a[:2]) or invented(*a, **k))
    assert main(["bench", "growth", "--markdown", "--out", str(tmp_path)]) == 0
    assert len(calls) == len(set(calls)) == 6  # 5-way with 5 steps is a point of both, for either method
    written = json.loads((tmp_path / "growth.json").read_text())["points"]
    assert [(p["method"], p["parameter"], p["value"]) for p in written[:5]] == [
        ("maml", "way", 5), ("maml", "way", 10), ("maml", "steps", 1), ("maml", "steps", 5), ("metadropout", "way", 5),
    ]  # fmt: skip
    assert "| MAML, way 10 | 2.000 | 6.000 | 3.00 (3.00–3.00) | 7 | 7 |" in capsys.readouterr().out
    assert (tmp_path / "growth.png").stat().st_size > 1000


def test_every_point_differs_from_its_base_in_one_number_at_most() -> None:
    base = SETTINGS["omniglot-5way"]
    for parameter, value, setting in points(base):
        changed = {name for name in vars(base) if getattr(base, name) != getattr(setting, name)}
        assert changed <= {parameter}
        assert getattr(setting, parameter) == value


def test_missing_peers_are_named_with_the_command_that_installs_them(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("metadropout.bench.implementations.find_spec", lambda _: None)
    monkeypatch.setattr(bench, "compare", invented)
    assert main(["bench"]) == 0
    out, err = capsys.readouterr()
    assert "not installed and left out: higher, TorchOpt (pip install 'metadropout[bench]')" in err
    assert "plain PyTorch" in out
    assert "higher" not in out
    assert main(["bench", "--method", "metadropout"]) == 0
    assert "not installed" not in capsys.readouterr().err  # they would not take part anyway


def test_a_stop_keeps_what_is_finished(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def compare(setting: Setting, method: Method, *arguments: Any, **options: Any) -> Comparison:
        if method == "metadropout":
            raise KeyboardInterrupt
        return invented(setting, method, *arguments, **options)

    monkeypatch.setattr(bench, "compare", compare)
    assert main(["bench", "--out", str(tmp_path)]) == 130
    assert "metadropout: stopped" in capsys.readouterr().err
    written = json.loads((tmp_path / "training.json").read_text())["comparisons"]
    assert [comparison["method"] for comparison in written] == ["maml"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--way", "1"], "--way is 1; it must be from 2 to 10000"),
        (["--image-size", "8"], "--image-size is 8; it must be from 16 to 1024"),
        (["--rounds", "0"], "--rounds is 0; it must be from 1 to 10000"),
    ],
)
def test_impossible_sizes_are_refused(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *options]) == 1
    assert message in capsys.readouterr().err


def test_rows_of_table_1_are_measured_beside_maml(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--way", "2", "--query", "1", "--channels", "4", "--image-size", "16", "--rounds", "1"]
    assert main(["bench", "learners", "maml", "protonet", "--markdown", "--out", str(tmp_path), *sizes]) == 0
    printed = capsys.readouterr().out
    assert "**The rows of table 1: Omniglot, 20-way 1-shot**" in printed
    maml, protonet = json.loads((tmp_path / "learners.json").read_text())["rows"]
    assert (maml["title"], protonet["title"]) == ("MAML", "Prototypical Networks")
    for row in (maml, protonet):
        assert f"| {row['title']} | {row['training']['seconds'][0]:.3f} |" in printed
        for what in ("training", "testing"):
            ratio = row[what]["seconds"][0] / row[f"base_{what}"]["seconds"][0]
            assert row[f"{what}_times_maml"]["median"] == pytest.approx(ratio)
    assert protonet["training"]["name"] == "protonet"
    assert protonet["base_training"]["name"] == "maml"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [(["nonsense"], "no row 'nonsense'"), (["maml", "--steps", "2"], "bench learners takes no --steps")],
)
def test_rows_that_cannot_be_measured_are_refused(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "learners", *arguments]) != 0
    assert told in capsys.readouterr().err
