"""`metadropout export`: a trained run becomes a set of weights, one small file to use and to share."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import metadropout
from metadropout.classify.estimator import prepared
from metadropout.cli.evaluate import evaluate_run
from metadropout.cli.numbers import add_number
from metadropout.cli.progress import CountDisplay
from metadropout.errors import ConfigError
from metadropout.evaluation import Evaluation
from metadropout.learners.base import TEST_SAMPLES
from metadropout.options import Episodes, Samples
from metadropout.runs.folder import Run, open_run
from metadropout.training.loop import load_state, open_parts
from metadropout.weights import WeightSet, save_weights, write_card
from metadropout.weights.calibration import best_start, fit_temperatures
from metadropout.weights.card import PROTOCOLS, Measured, Protocol, describe

EPILOG = """\
  metadropout export runs/first --out first.safetensors
  metadropout weights first.safetensors
  metadropout predict first.safetensors --support examples --query photos --out predictions.csv
What 'metadropout evaluate' has measured of these weights is not measured again.
"""


def register(parser: argparse.ArgumentParser) -> None:
    """Give the command's parser its arguments."""
    parser.description = (
        "Makes a set of weights of a run: one safetensors file with the weights, the configuration and a card, and "
        "the card as a page of text (NAME.md). Accuracy is measured on test classes in both protocols, unless that "
        "has been done, and a temperature is fitted on other classes, so that probabilities can be trusted."
    )
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("folder", type=Path, metavar="RUN", help="the run's folder")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FILE", help="NAME.safetensors; NAME is what the set is called"
    )
    parser.add_argument("--state", choices=["last", "best"], default="last", help="which weights (default: last)")
    add_number(parser, "--episodes", Episodes, default=1000, help="tasks to measure accuracy on (default: 1000)")
    add_number(
        parser,
        "--calibration-episodes",
        Episodes,
        default=200,
        help="tasks to fit the temperature on, and as many to measure its effect on (default: 200)",
    )
    add_number(parser, "--mc-samples", Samples, default=TEST_SAMPLES, help="noise samples per inner step (default: 30)")
    parser.set_defaults(run=run_command)


def run_command(namespace: argparse.Namespace) -> int:
    """Export, and return the exit status."""
    out: Path = namespace.out
    if out.suffix != ".safetensors":
        raise ConfigError(f"--out is {out}; the name of a set of weights ends in .safetensors")
    weights = export_run(
        open_run(namespace.folder),
        out,
        state=namespace.state,
        episodes=namespace.episodes,
        calibration_episodes=namespace.calibration_episodes,
        mc_samples=namespace.mc_samples,
    )
    print(f"{out}: {out.stat().st_size / 1e6:.2f} MB, {weights.summary}")
    return 0


def export_run(
    run: Run, out: Path, *, state: str, episodes: int, calibration_episodes: int, mc_samples: int
) -> WeightSet:
    """Measure what has not been measured of a run, and write its weights and their card."""
    splits, learner = open_parts(run.config)
    run.check_data(splits.identity)
    progress = load_state(run, state, learner)
    samples = learner.samples_used(mc_samples)
    results = []
    for protocol in PROTOCOLS:
        overrides = {"episode.protocol": protocol}
        options = {"episodes": episodes, "mc_samples": mc_samples, "state": state}
        results.append(_measured(evaluate_run(run, overrides=overrides, **options), protocol, samples))  # type: ignore[arg-type]
    card = describe(
        out.stem,
        run.config,
        iterations=progress.iteration,
        parameters=sum(p.numel() for p in learner.parameters()),
        version=metadropout.__version__,
        measured=tuple(results),
    )
    shape = splits.train.image_shape
    weights = save_weights(out, learner, run.config, shape, card)  # before the rest, in case that is stopped
    own = run.config.episode
    tries = max(1, calibration_episodes // 4)
    with CountDisplay(f"trying other numbers of classes, {out.stem}", 4 * tries) as display:
        start = best_start(
            weights,
            splits,
            shot=own.shot,
            query=own.query,
            episodes=tries,
            mc_samples=min(mc_samples, 5),
            on_episode=display.advance,
        )
    learner = prepared(weights.learner(), own.way, start="rows" if own.way == card.way else start)
    with CountDisplay(f"calibrating {out.stem}", 2 * calibration_episodes) as display:
        temperatures = fit_temperatures(
            learner,
            splits,
            way=own.way,
            shot=own.shot,
            query=own.query,
            episodes=calibration_episodes,
            mc_samples=mc_samples,
            on_episode=display.advance,
        )
    card = replace(card, temperatures=temperatures, other_ways=start)
    weights = save_weights(out, weights.learner(), run.config, shape, card)
    write_card(out.with_suffix(".md"), weights)
    return weights


def _measured(result: Evaluation, protocol: Protocol, samples: int) -> Measured:
    assert result.nll is not None
    assert result.calibration is not None
    return Measured(
        protocol=protocol,
        accuracy=result.mean,
        interval=result.interval,
        nll=result.nll,
        ece=result.calibration.error,
        episodes=len(result.accuracies),
        mc_samples=samples,
    )
