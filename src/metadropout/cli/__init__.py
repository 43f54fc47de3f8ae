"""The command line: `metadropout train`, `evaluate`, `recipes` and the rest, one file each."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import metadropout
from metadropout.cli import (
    attack,
    bench,
    data,
    demo,
    evaluate,
    export,
    figures,
    options,
    recipes,
    report,
    reproduce,
    train,
)
from metadropout.cli.overrides import import_named_modules, split_overrides
from metadropout.errors import ConfigError, MetadropoutError

DESCRIPTION = """\
Few-shot learning that learns how to perturb: MAML and Meta-SGD with Meta-dropout.

A run is a learner x a perturbation x a network x a data set, described by a recipe:

  metadropout recipes                                      what there is to run
  metadropout train glyphs-5way-1shot-metadropout --out runs/first
  metadropout evaluate runs/first                          accuracy on unseen classes
  metadropout attack runs/first --episodes 20              accuracy under adversarial attacks
  metadropout train --resume runs/first                    go on after a stop or a crash
  metadropout figures runs/first                           decision boundaries, activations and more
  metadropout report runs/first --out report.html          all of that on one page
  metadropout reproduce table1 --scale 0.1                 all rows of a table of the paper
  metadropout options learner                              everything that --learner.X can set
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status: 0 done, 1 a mistake to mend, 130 or 143 stopped by a signal."""
    parser = argparse.ArgumentParser(
        prog="metadropout", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"metadropout {metadropout.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in (train, evaluate, attack, export, figures, report, reproduce, recipes, options, data, demo, bench):
        command.register(commands)
    try:
        given = import_named_modules(sys.argv[1:] if arguments is None else arguments)
        plain, overrides = split_overrides(given)
        namespace = parser.parse_args(plain)
        if overrides and not getattr(namespace, "takes_overrides", False):
            raise ConfigError(f"--{next(iter(overrides))} has no meaning for this command")
        namespace.overrides = overrides
        return int(namespace.run(namespace))
    except MetadropoutError as error:
        print(f"metadropout: error: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader of a pipe, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        print(f"metadropout: error: {error.filename or 'a file'}: {error.strerror or error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("metadropout: stopped at once; the last checkpoint is kept", file=sys.stderr)
        return 130
