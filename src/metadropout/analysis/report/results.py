"""Learning curves and attacks of the runs of a setting, as charts and tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from metadropout.analysis.plots import NORM_NAMES, smooth
from metadropout.analysis.report.charts import Chart, Curve, Style
from metadropout.analysis.report.comparison import Method, Setting
from metadropout.analysis.report.folders import RunSummary
from metadropout.evaluation import Evaluation
from metadropout.robustness.attacks import NORMS, Norm
from metadropout.robustness.curves import AttackRequest, AttackResults


@dataclass(frozen=True)
class AttackedRun:
    """A run under attack in one norm."""

    label: str
    style: Style
    episodes: int
    unfinished: AttackRequest | None
    """What was asked for, where not all of it has been measured."""
    accuracies: dict[float, Evaluation]
    """By radius; 0 is the clean accuracy."""


@dataclass(frozen=True)
class NormTable:
    """All runs of a setting that were attacked alike, in one norm."""

    norm: str
    radii: list[float]
    rows: list[AttackedRun]
    chart: Chart


@dataclass(frozen=True)
class AttackGroup:
    """Runs that were attacked in the same way: what differs in this cannot be compared."""

    conditions: str
    legend: list[tuple[str, Style]]
    norms: list[NormTable]


def styled_runs(setting: Setting) -> list[tuple[Method, RunSummary, Style]]:
    """Return the runs of a setting with their looks in its charts."""
    return [
        (method, summary, Style(method.number, number))
        for method in setting.methods
        for number, summary in enumerate(method.runs)
    ]


def learning_charts(setting: Setting) -> list[Chart]:
    """Draw loss and accuracy over training, and validations and tests during training where there are any."""
    losses, accuracies, validations, tests = [], [], [], []
    for method, summary, style in styled_runs(setting):
        label = method.label(summary)
        iterations = [line.iteration for line in summary.training]
        loss = smooth([line.loss for line in summary.training])
        accuracy = smooth([100 * line.accuracy for line in summary.training])
        losses.append(Curve(label, style, list(zip(iterations, loss, strict=True))))
        accuracies.append(Curve(label, style, list(zip(iterations, accuracy, strict=True))))
        points = [(line.iteration, 100 * line.accuracy) for line in summary.validation]
        intervals = [100 * line.interval for line in summary.validation]
        validations.append(Curve(label, style, points, intervals))
        tested = summary.test_curve()
        points = [(test.iteration, 100 * test.result.mean) for test in tested]
        tests.append(Curve(label, style, points, [100 * test.result.interval for test in tested]))
    charts = [
        Chart("Query loss on training tasks", "iteration", "query loss", losses),
        Chart("Accuracy on training tasks", "iteration", "accuracy, %", accuracies),
        Chart("Accuracy on validation classes", "iteration", "accuracy, %", validations),
        Chart("Accuracy on test classes", "iteration", "accuracy, %", tests),
    ]
    drawn = [Chart(c.title, c.x_label, c.y_label, [v for v in c.curves if v.points]) for c in charts]
    return [chart for chart in drawn if chart.curves]


def attack_groups(setting: Setting) -> list[AttackGroup]:
    """Put together runs that were attacked alike, with a table and a chart for each norm."""
    groups: dict[str, list[tuple[str, Style, AttackResults]]] = {}
    for method, summary, style in styled_runs(setting):
        if summary.attack is not None and any(episode.attacked for episode in summary.attack.episodes):
            member = (method.label(summary), style, summary.attack)
            groups.setdefault(_conditions(summary.attack), []).append(member)
    return [
        AttackGroup(
            conditions,
            [(label, style) for label, style, _ in members],
            [_norm_table(norm, members) for norm in NORMS if _has(norm, members)],
        )
        for conditions, members in groups.items()
    ]


def _conditions(attack: AttackResults) -> str:
    m = attack.measured
    starts = "1 random start" if m["restarts"] == 1 else f"{m['restarts']} random starts"
    state = "" if attack.state == "last" else f", {attack.state} state"
    return f"{m['protocol']}, {m['steps']} steps, {starts} at each radius, test tasks of seed {m['seed']}{state}"


def _has(norm: Norm, members: Sequence[tuple[str, Style, AttackResults]]) -> bool:
    return any(norm in episode.attacked for _, _, attack in members for episode in attack.episodes)


def _norm_table(norm: Norm, members: Sequence[tuple[str, Style, AttackResults]]) -> NormTable:
    rows = [
        AttackedRun(label, style, len(accuracies[0.0].accuracies), attack.unfinished().get(norm), accuracies)
        for label, style, attack in members
        if (accuracies := _accuracies(attack, norm))
    ]
    name = NORM_NAMES[norm]
    curves = [
        Curve(
            row.label,
            row.style,
            [(radius, 100 * result.mean) for radius, result in row.accuracies.items()],
            [100 * result.interval for result in row.accuracies.values()],
        )
        for row in rows
    ]
    radii = sorted({radius for row in rows for radius in row.accuracies})
    return NormTable(name, radii, rows, Chart(f"Attacks in the {name} norm", "radius ε", "accuracy, %", curves))


def _accuracies(attack: AttackResults, norm: Norm) -> dict[float, Evaluation]:
    """Return the accuracies at the radii that were measured on every episode which was attacked in this norm."""
    episodes = [episode for episode in attack.episodes if norm in episode.attacked]
    if not episodes:
        return {}
    radii = set.intersection(*(set(episode.attacked[norm]) for episode in episodes))
    attacked = {radius: Evaluation([e.attacked[norm][radius] for e in episodes]) for radius in sorted(radii)}
    return {0.0: Evaluation([episode.clean for episode in episodes]), **attacked}
