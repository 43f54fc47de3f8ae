"""The command line: `metadropout train`, `evaluate`, `recipes` and the rest, one file each."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

import metadropout
from metadropout.cli.output import lenient_output
from metadropout.cli.overrides import import_named_modules, split_overrides
from metadropout.errors import ConfigError, MetadropoutError

COMMANDS = {
    "train": "meta-train a recipe, or resume a run",
    "evaluate": "accuracy of a run on unseen classes",
    "attack": "accuracy of runs under adversarial attacks",
    "predict": "classify your own images after a few examples of each class",
    "weights": "list trained weights, or show the card of a set",
    "export": "make a set of weights of a run, one small file to use and to share",
    "figures": "draw the paper's figures from trained runs",
    "report": "put runs on one page: results, curves, attacks, figures, options",
    "reproduce": "train and evaluate all rows of one of the paper's tables, or draw one of its figures",
    "sweep": "train a recipe with several values of its options, and compare them on validation classes",
    "app": "open a web page to draw or drop examples and classify new ones",
    "recipes": "list the recipes, or show one",
    "options": "list every option of a recipe",
    "data": "list, prepare, check and show data sets",
    "demo": "compare MAML with and without Meta-dropout in a few minutes",
    "completion": "let the shell complete commands and options",
    "bench": "compare speed and memory with other implementations",
}
"""Each is a module of this folder, imported when it is called: PyTorch takes seconds to load."""

TAKE_SEVERAL_VALUES = ("sweep",)
"""Commands that take several values of a recipe's option."""

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
  metadropout sweep glyphs-5way-1shot-maml --learner.inner_lr 0.05 0.1 0.2
                                                           which value is best, by validation classes
  metadropout options learner                              everything that --learner.X can set
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status: 0 done, 1 a mistake to fix, 130 or 143 stopped by a signal."""
    lenient_output()
    with _on_ctrl_c(_interrupt_once):
        status = _run(sys.argv[1:] if arguments is None else arguments)
        if arguments is None and (status >= 128 or "TORCHELASTIC_RUN_ID" in os.environ):
            # A stop is at once: what is to be kept has been saved, and threads in the middle of a task must neither be
            # waited for nor meet an interpreter that takes itself apart. Nor must those by which PyTorch talks to other
            # processes: now and then that aborts a process whose work is done.
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError):
                    stream.flush()
            os._exit(status)
        return status


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read a command; its `run` does it, and its `overrides` are the recipe's options that the command line changes.

    Raises:
        ConfigError: if an argument is wrong.
        SystemExit: if argparse has answered, such as with the help.
    """
    if odd := [text for text in arguments if _is_undecodable(text)]:
        shown = odd[0].encode(errors="surrogateescape").decode(errors="replace")
        raise ConfigError(f"'{shown}' is not valid UTF-8: a run could not be written down with it; rename it")
    arguments = import_named_modules(arguments)
    # Options of the command line itself, such as --help, come first and need no command.
    command = next((text for text in arguments if not text.startswith("-")), "")
    plain, overrides = split_overrides(arguments, several=command in TAKE_SEVERAL_VALUES)
    namespace = build_parser(command).parse_args(plain)
    if overrides and not getattr(namespace, "takes_overrides", False):
        raise ConfigError(f"--{next(iter(overrides))} is not an option of this command")
    namespace.overrides = overrides
    return namespace


def build_parser(command: str | None = None) -> argparse.ArgumentParser:
    """Build the parser of the command line.

    Args:
        command: the one whose arguments are wanted; of the others only the names are known then. All by default.
    """
    parser = argparse.ArgumentParser(
        prog="metadropout", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"metadropout {metadropout.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, text in COMMANDS.items():
        if command in (None, name):
            importlib.import_module(f"metadropout.cli.{name}").register(commands.add_parser(name, help=text))
        else:
            commands.add_parser(name, help=text)
    return parser


def _run(arguments: Sequence[str]) -> int:
    """Run a command and turn what goes wrong into a line on standard error and a status."""
    try:
        with _on_ctrl_c(signal.SIG_DFL):  # nothing has been done yet, and imports cannot be interrupted safely
            namespace = parse(arguments)
        status = int(namespace.run(namespace))
        sys.stdout.flush()
        return status
    except MetadropoutError as error:
        return _failed(str(error))
    except BrokenPipeError:  # the reader of a pipe, such as head, has seen enough
        _drop_output()
        return 0
    except OSError as error:
        return _failed(f"{error.filename or _nameless()}: {error.strerror or error}")
    except (MemoryError, RuntimeError) as error:  # the latter is what PyTorch raises
        if isinstance(error, RuntimeError) and not re.search("allocate memory|out of memory", str(error)):
            raise
        what = re.search(r"tried? to allocate \S+ \w+", str(error), re.IGNORECASE)
        detail = f" ({what[0]})" if what else ""
        return _failed(f"there is not enough memory{detail}; make the tasks, the meta-batch or the network smaller")
    except KeyboardInterrupt:
        print("metadropout: stopped at once; what was saved is kept", file=sys.stderr)
        return 130


def _failed(message: str) -> int:
    print(f"metadropout: error: {message}", file=sys.stderr)
    return 1


def _nameless() -> str:
    """Say what could not be written where the system names no file: the output, as files are written under a name."""
    try:
        sys.stdout.flush()
    except OSError:
        _drop_output()
    return "standard output"


def _drop_output() -> None:
    """Let what is still to be printed go nowhere, as Python would fail on it at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _is_undecodable(text: str) -> bool:
    """Say whether an argument has bytes that are not text; Python keeps them as lone surrogates."""
    return any("\ud800" <= character <= "\udfff" for character in text)


def _interrupt_once(number: int, frame: FrameType | None) -> None:
    """End the command properly; one more Ctrl-C ends the process at once."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    raise KeyboardInterrupt


@contextmanager
def _on_ctrl_c(handler: Callable[[int, FrameType | None], None] | signal.Handlers) -> Iterator[None]:
    """Set what Ctrl-C does, unless it is ignored, as it is in jobs that a shell runs in the background."""
    before = signal.getsignal(signal.SIGINT)
    # Only the main thread may set handlers, and a handler that is not Python's is not ours to change.
    if threading.current_thread() is not threading.main_thread() or before in (signal.SIG_IGN, None):
        yield
        return
    signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
