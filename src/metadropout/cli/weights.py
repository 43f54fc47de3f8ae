"""`metadropout weights`: trained weights that come with the package, and what is known of them."""

from __future__ import annotations

import argparse

from rich.console import Console
from rich.table import Table

from metadropout.weights import available, load_weights
from metadropout.weights.card import Card, Protocol
from metadropout.weights.sets import SHIPPED, SUFFIX

EPILOG = """\
  metadropout weights                                      what there is
  metadropout weights omniglot-5way-1shot-metadropout      the card of one
  metadropout weights mine.safetensors                     the card of a file that 'metadropout export' has written
"""


def register(parser: argparse.ArgumentParser) -> None:
    """Give the command's parser its arguments."""
    parser.description = "Lists the trained weights that come with the package, or shows the card of one set."
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("name", nargs="?", metavar="NAME", help="a set of the list, or a file")
    parser.set_defaults(run=run_command)


def run_command(namespace: argparse.Namespace) -> int:
    """Print the list or a card, and return the exit status."""
    if namespace.name is not None:
        print(load_weights(namespace.name).card.to_markdown(), end="")
        return 0
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=200)
    table = Table(
        "name", "method", "data", "inductive", "transductive", "tasks", "steps", "gradient", "size", "SHA-256", box=None
    )
    licences = {}
    for name in available():
        card = load_weights(name).card
        size = (SHIPPED / f"{name}{SUFFIX}").stat().st_size
        results = (_accuracy(card, "inductive"), _accuracy(card, "transductive"))
        tasks = "/".join(dict.fromkeys(str(result.episodes) for result in card.measured))
        gradient = card.gradient.partition(":")[0]
        about = (tasks, str(card.iterations), gradient, f"{size / 1e6:.2f} MB", card.checksum[:12])
        table.add_row(name, card.method, card.data, *results, *about)
        licences[card.data] = card.licence
    console.print(table)
    console.print(
        "\nAccuracy on that many tasks of test classes with its 95 % interval; steps: outer steps of training.\n"
        "Sets with the public code's gradient were trained with --learner.norm_second_order false."
    )
    for data, licence in licences.items():
        console.print(f"{data}: {licence}")
    return 0


def _accuracy(card: Card, protocol: Protocol) -> str:
    result = card.result(protocol)
    return "not measured" if result is None else str(result)
