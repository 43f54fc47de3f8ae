"""`metadropout data`: which data sets there are, prepare and check them, look at an episode."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from metadropout.cli.numbers import add_number
from metadropout.data import DATASETS, EpisodeSampler, Splits, open_dataset
from metadropout.data.cache import preparing_again
from metadropout.data.inspection import check, prepared_of, state_of
from metadropout.data.locations import cache_directory, data_directory
from metadropout.data.picture import save_picture
from metadropout.errors import ConfigError, DataError
from metadropout.options import Seed, Shot, Way, check_options

DESCRIPTION = """\
Data sets: list, prepare, check, show.

Options of a data set are given as in a recipe, --data.OPTION VALUE; `metadropout options data` lists them.
"""


def register(command: argparse.ArgumentParser) -> None:
    """Give the command's parser its arguments."""
    command.description = DESCRIPTION
    command.formatter_class = argparse.RawDescriptionHelpFormatter
    actions = command.add_subparsers(title="actions", metavar="ACTION", required=True)
    actions.add_parser("list", help="the data sets, and which are here").set_defaults(run=_list)
    prepare = _action(actions, "prepare", "decode a data set once, so that it opens quickly from then on", _prepare)
    prepare.add_argument("--force", action="store_true", help="prepare again, even if nothing has changed")
    _action(actions, "check", "compare a prepared data set with its checksums", _check)
    show = _action(actions, "show", "draw a picture of one episode", _show)
    show.add_argument("--out", type=Path, metavar="FILE", help="the PNG to write (default: NAME-episode.png)")
    show.add_argument("--split", choices=("train", "validation", "test"), default="train", help="default: train")
    for name, kind, default in (("way", Way, 5), ("shot", Shot, 1), ("query", Shot, 5), ("seed", Seed, 0)):
        add_number(show, f"--{name}", kind, default=default, metavar="N", help=f"default: {default}")


def _action(
    actions: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    text: str,
    run: Callable[[argparse.Namespace], int],
) -> argparse.ArgumentParser:
    parser = actions.add_parser(name, help=text, description=text)
    parser.add_argument("name", metavar="NAME", help=f"one of {', '.join(sorted(DATASETS))}")
    parser.add_argument("--from", dest="source", metavar="PATH", help="where its files are (--data.directory)")
    parser.set_defaults(run=run, takes_overrides=True)
    return parser


def _list(namespace: argparse.Namespace) -> int:
    console = Console(highlight=False)
    table = Table(box=None, pad_edge=False)
    for heading in ("data set", "state", "what and where"):
        table.add_column(heading)
    for name in sorted(DATASETS):
        state = state_of(name)
        table.add_row(name, state.summary, f"{(DATASETS[name].__doc__ or '').splitlines()[0]}\n{state.detail}")
    console.print(table)
    console.print(f"\ndata directory: {data_directory()} (METADROPOUT_DATA)", soft_wrap=True)
    console.print(f"prepared caches: {cache_directory()} (METADROPOUT_CACHE)", soft_wrap=True)
    return 0


def _prepare(namespace: argparse.Namespace) -> int:
    start = time.time()
    with preparing_again() if namespace.force else nullcontext():
        splits = _open(namespace)
    prepared = prepared_of(splits.train)
    print(f"{namespace.name}: {_sizes(splits)} ({time.time() - start:.1f} s)")
    if prepared is not None:
        print(f"from {prepared.manifest['source']['directory']}\nin {prepared.manifest_path}")
    return 0


def _check(namespace: argparse.Namespace) -> int:
    for finding in check(_open(namespace)):
        print(finding)
    return 0


def _show(namespace: argparse.Namespace) -> int:
    splits = _open(namespace)
    images = getattr(splits, namespace.split)
    if images is None:
        raise DataError(f"{namespace.name} has no {namespace.split} classes with these options; choose another --split")
    sampler = EpisodeSampler(images, way=namespace.way, shot=namespace.shot, query=namespace.query, seed=namespace.seed)
    names = [images.class_names[c] for c in sampler.indices(0, 0).classes]
    path = namespace.out or Path(f"{namespace.name}-episode.png")
    title = f"{namespace.name}, {namespace.split} classes: {namespace.way}-way {namespace.shot}-shot"
    save_picture(path, sampler(0, 0), names, title)
    print(path)
    return 0


def _open(namespace: argparse.Namespace) -> Splits:
    if namespace.name not in DATASETS:
        open_dataset(namespace.name)  # raises the error that lists the known ones
    options: dict[str, Any] = {}
    for name, value in namespace.overrides.items():
        section, _, option = name.partition(".")
        if section != "data" or not option:
            raise ConfigError(f"--{name} is not understood; options of a data set look like --data.image_size 84")
        options[option] = value
    if namespace.source is not None:
        options["directory"] = namespace.source
    part = DATASETS[namespace.name]
    return open_dataset(namespace.name, **check_options(part, options, "data"))


def _sizes(splits: Splits) -> str:
    parts = {"training": splits.train, "validation": splits.validation, "test": splits.test}
    counts = [f"{len(images)} {part}" for part, images in parts.items() if images is not None]
    total = sum(int(images.class_sizes.sum()) for images in parts.values() if images is not None)
    channels, height, width = splits.train.image_shape
    return f"{', '.join(counts)} classes, {total} images of {height}x{width}x{channels}"
