"""Sets of weights as files: safetensors with the configuration and the card in the header, checked when read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from metadropout.config import Config, build_learner, parse_config
from metadropout.data import ImageShape
from metadropout.errors import CheckpointError, ConfigError, shortened
from metadropout.files import check_regular, write_atomically
from metadropout.learners import Learner
from metadropout.runs.reading import described
from metadropout.training.checkpoints import check_tensor, tensors_digest
from metadropout.training.workers import on_one_thread
from metadropout.weights.card import Card

SHIPPED = Path(__file__).parent / "shipped"
SUFFIX = ".safetensors"
FORMAT = "metadropout-weights"
VERSION = 1
MAX_BYTES = 64 * 2**20
"""More than fifty times as much as the sets that ship with the package, and little enough for any memory."""

CARD, SHAPE = TypeAdapter(Card), TypeAdapter(ImageShape)

AGAIN = "make it again with 'metadropout export RUN', or fetch it again"


@dataclass(frozen=True)
class WeightSet:
    """Trained weights with what is known of them."""

    name: str
    card: Card
    config: Config
    """Of the run that trained them."""
    image_shape: ImageShape
    """Channels, height and width of the images that the network takes."""
    tensors: Mapping[str, Tensor] = field(repr=False, compare=False)
    """The learner's parameters and buffers by name."""

    def learner(self) -> Learner:
        """Build a learner with these weights, the caller's own."""
        with on_one_thread():  # several are slower for so little, by far where they have to share CPUs
            learner = build_learner(self.config, self.image_shape)
            learner.load_state_dict(self.tensors)
        return learner.requires_grad_().eval()

    @cached_property
    def summary(self) -> str:
        """One line: method, data, tasks, accuracy."""
        card = self.card
        results = ", ".join(f"{result} {result.protocol}" for result in card.measured)
        return f"{card.method}, {card.data}, {card.way}-way {card.shot}-shot: {results or 'not measured'}"


def available() -> list[str]:
    """Return the names of the sets that come with the package."""
    return sorted(path.stem for path in SHIPPED.glob(f"*{SUFFIX}"))


def load_weights(name_or_path: str | Path) -> WeightSet:
    """Read a set of weights; checksum, configuration and shapes are checked, and nothing in the file is executed.

    Args:
        name_or_path: a name that `metadropout weights` lists, or a file that `metadropout export` has written.

    Raises:
        ConfigError: if there is no set of that name.
        CheckpointError: if the file is missing, damaged or something else.
    """
    if isinstance(name_or_path, str) and name_or_path in available():
        return read_weights(SHIPPED / f"{name_or_path}{SUFFIX}")
    path = Path(name_or_path)
    if path.is_dir():
        raise ConfigError(f"{path}: is a folder; make a set of weights of a run with: metadropout export {path}")
    if isinstance(name_or_path, str) and path.suffix != SUFFIX and not path.exists():
        names = ", ".join(available()) or "none"
        raise ConfigError(
            f"there are no weights '{shortened(name_or_path)}'; the package has {names}, and a file's name ends in "
            f"{SUFFIX}"
        )
    return read_weights(path)


def read_weights(path: Path) -> WeightSet:
    """Read a file of weights; see `load_weights`."""
    tensors, metadata = _read(path)
    try:
        config = parse_config(json.loads(metadata["config"]))
        card = CARD.validate_json(metadata["card"])
        shape = SHAPE.validate_json(metadata["image_shape"])
    except ValidationError as error:
        raise CheckpointError(f"{path}: its card is not as it should be: {described(error)}; {AGAIN}") from None
    except (KeyError, ValueError, RecursionError, ConfigError) as error:
        reason = f"no '{error.args[0]}'" if isinstance(error, KeyError) else shortened(str(error))
        raise CheckpointError(f"{path}: does not describe its weights: {reason}; {AGAIN}") from None
    with on_one_thread():
        _check_shapes(path, tensors, config, shape)
    return WeightSet(card.name, replace(card, checksum=metadata["sha256"]), config, shape, tensors)


def save_weights(path: Path, learner: Learner, config: Config, image_shape: ImageShape, card: Card) -> WeightSet:
    """Write a learner's weights as a set, and read it again.

    Args:
        path: the file; its name without the suffix is the set's.
        learner: whose weights.
        config: of its run; where its data lies is left out.
        image_shape: of its images.
        card: what is known of it.
    """
    if path.suffix != SUFFIX:
        raise ConfigError(f"{path}: the name of a set of weights ends in {SUFFIX}")
    tensors = {name: t.detach().cpu().contiguous() for name, t in learner.state_dict().items()}
    metadata = {
        "format": FORMAT,
        "version": str(VERSION),
        "config": json.dumps(_shared(config)),
        "image_shape": json.dumps(list(image_shape)),
        "card": json.dumps(asdict(replace(card, name=path.stem, checksum=""))),
    }
    metadata["sha256"] = tensors_digest(tensors, metadata)
    content = safetensors.torch.save(tensors, metadata)
    if len(content) > MAX_BYTES:
        raise ConfigError(f"{path}: would have {len(content)} bytes, more than the {MAX_BYTES} that are read")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, content)
    return read_weights(path)


def write_card(path: Path, weights: WeightSet) -> None:
    """Write the card of a set of weights as a page of text."""
    write_atomically(path, weights.card.to_markdown())


def _shared(config: Config) -> dict[str, Any]:
    """Return a configuration without what is of the machine's own."""
    plain = config.to_dict()
    plain["data"] = {name: value for name, value in plain["data"].items() if name not in ("directory", "download")}
    plain["training"] = {name: value for name, value in plain["training"].items() if name != "convolutions"}
    return {name: value for name, value in plain.items() if name != "machine"}


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    try:
        check_regular(path, MAX_BYTES)
        with safetensors.safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: there is no such file") from None
    except (OSError, safetensors.SafetensorError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(f"{path}: is damaged or not a file of weights ({reason}); {AGAIN}") from None
    if metadata.get("format") != FORMAT:
        raise CheckpointError(f"{path}: is not a set of weights; 'metadropout export RUN' makes one of a run")
    if metadata.get("version") != str(VERSION):
        version = shortened(str(metadata.get("version")))
        raise CheckpointError(f"{path}: has version {version}, but this program reads version {VERSION}")
    if metadata.get("sha256") != tensors_digest(tensors, metadata):
        raise CheckpointError(f"{path}: is damaged: its contents do not match their checksum; {AGAIN}")
    return tensors, metadata


def _check_shapes(path: Path, tensors: Mapping[str, Tensor], config: Config, shape: ImageShape) -> None:
    """Compare the tensors with those of the learner that the configuration describes, before one is made."""
    try:
        with torch.device("meta"):  # which takes no memory, whatever sizes a file asks for
            wanted = build_learner(config, shape).state_dict()
    except (ConfigError, ValueError, RuntimeError, TypeError) as error:
        raise CheckpointError(f"{path}: describes no learner that can be built: {shortened(str(error))}") from None
    if odd := sorted(wanted.keys() ^ tensors.keys()):
        raise CheckpointError(f"{path}: '{shortened(odd[0])}' is in its weights or in its learner, but not in both")
    for name, own in wanted.items():
        check_tensor(path, name, tensors[name], own)
