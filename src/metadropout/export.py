"""A fitted classifier as a file for other programs: ONNX, or PyTorch's own export format.

The model takes "images", float32 of shape (n, channels, height, width) in [0, 1] for any n from 1 on, prepared as the
weights want them, and gives "log_probabilities" of shape (n, classes). The file also says which classes these are, and
how images are to be prepared.
"""

from __future__ import annotations

import io
import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.export import Dim, ExportedProgram

from metadropout.errors import ConfigError, MetadropoutError
from metadropout.files import write_atomically

if TYPE_CHECKING:
    from metadropout.classify import FewShotClassifier

SUFFIXES = (".onnx", ".pt2")
MOST_IMAGES = 2**20
"""In one call of an exported model."""


def save_model(classifier: FewShotClassifier, path: str | Path) -> Path:
    """Write a fitted classifier to a file, and return its path.

    Args:
        classifier: a fitted one, which answers for each image by itself.
        path: NAME.onnx for ONNX (needs the extra `onnx`), or NAME.pt2 for `torch.export.load`.

    Raises:
        ConfigError: if the path has another suffix, or the answers depend on each other.
        MetadropoutError: if a package is missing.
    """
    path = Path(path)
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"{path}: a model's file ends in {' or '.join(SUFFIXES)}")
    write_atomically(path, to_onnx(classifier) if path.suffix == ".onnx" else to_pt2(classifier))
    return path


def to_pt2(classifier: FewShotClassifier) -> bytes:
    """Return a fitted classifier as a file of `torch.export.save`."""
    content = io.BytesIO()
    torch.export.save(
        exported(classifier), content, extra_files={"metadropout.json": json.dumps(description(classifier))}
    )
    return content.getvalue()


def to_onnx(classifier: FewShotClassifier) -> bytes:
    """Return a fitted classifier as an ONNX file; what `description` says of it is in its metadata."""
    try:
        import onnx  # noqa: F401, PLC0415 - an extra
        import onnxscript  # noqa: F401, PLC0415
    except ImportError as error:
        raise MetadropoutError(
            f"ONNX files need the package {error.name}, which is not installed: pip install 'metadropout[onnx]'"
        ) from None
    with _quiet():
        program = torch.onnx.export(
            exported(classifier),
            input_names=["images"],
            output_names=["log_probabilities"],
            verbose=False,
            optimize=True,
        )
    assert program is not None
    model = program.model_proto
    for key, value in description(classifier).items():
        entry = model.metadata_props.add()
        entry.key, entry.value = key, value if isinstance(value, str) else json.dumps(value)
    content: bytes = model.SerializeToString()
    return content


def exported(classifier: FewShotClassifier) -> ExportedProgram:
    """Return a fitted classifier as a program of PyTorch operations, for any number of images."""
    if not classifier.__sklearn_is_fitted__():
        raise ConfigError("there is nothing to export yet: call fit(images, labels) first")
    if not classifier.module_.inductive:
        raise ConfigError(
            "this classifier normalises the images of a call together, so that answers depend on each other: export "
            "one with inductive=True"
        )
    example = torch.zeros(2, *classifier.weights_.image_shape)
    shapes = ({0: Dim("n", min=1, max=MOST_IMAGES)},)
    with torch.no_grad(), _quiet():
        return torch.export.export(classifier.module_, (example,), dynamic_shapes=shapes)


def description(classifier: FewShotClassifier) -> dict[str, Any]:
    """Return what a user of an exported model has to know of it."""
    weights = classifier.weights_
    return {
        "classes": [str(label) for label in classifier.classes_],
        "image_shape": list(weights.image_shape),
        "values": "ink = 1 on paper = 0" if weights.card.drawings else "0 to 1",
        "weights": weights.name,
        "weights_sha256": weights.card.checksum,
    }


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep what the exporters say to their own developers from the user."""
    logger = logging.getLogger("torch.onnx")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)
