"""A picture of one episode, to see with one's own eyes what a learner is given."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from metadropout.data.episodes import Episode
from metadropout.data.labels import drawable
from metadropout.errors import DataError, MetadropoutError
from metadropout.files import write_atomically

_GAP = 2  # pixels between images


def save_picture(path: Path, episode: Episode, class_names: Sequence[str], title: str) -> None:
    """Write a PNG with a row for each class: its support images, then its query images.

    Args:
        path: where to write.
        episode: images as floats in [0, 1].
        class_names: name of each label's class.
        title: what stands above.

    Raises:
        MetadropoutError: if matplotlib is not installed.
        DataError: if the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 - an extra
    except ImportError:
        raise MetadropoutError(
            "pictures need matplotlib, which is not installed; install it with `pip install 'metadropout[plots]'`"
        ) from None
    way = len(class_names)
    mosaics = [_mosaic(images, way) for images in (episode.support_x, episode.query_x)]
    widths = [mosaic.shape[1] for mosaic in mosaics]
    height = mosaics[0].shape[0]
    scale = min(0.6, 4.0 / way) * way / height  # inches per pixel
    labels = drawable([_short(name) for name in class_names])
    longest = max(len(line) for text in labels.texts for line in text.split("\n"))
    beside = max(2.2, 0.065 * longest + 0.8)  # inches
    figure = Figure(figsize=(sum(widths) * scale + beside, height * scale + 0.7), dpi=110, layout="constrained")
    for axes, mosaic, name in zip(
        figure.subplots(1, 2, width_ratios=widths), mosaics, ("support", "query"), strict=True
    ):
        axes.imshow(mosaic, vmin=0, vmax=1, cmap="gray", interpolation="nearest")
        axes.set_title(name, fontsize=9)
        axes.set_xticks([])
        axes.set_yticks([])
        axes.set_frame_on(False)
        if name == "support":
            pitch = height / way
            axes.set_yticks([pitch * (row + 0.5) for row in range(way)], labels.texts, fontsize=7)
            for label in axes.get_yticklabels():
                label.set(fontfamily=labels.families, parse_math=False)  # a $ in a name is a dollar
            axes.tick_params(length=0)
    figure.suptitle(title, fontsize=10)
    content = io.BytesIO()
    figure.savefig(content, format="png")
    try:
        write_atomically(path, content.getvalue())
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror or error}; name another file with --out") from error


def _mosaic(images: Tensor, way: int) -> NDArray[np.float32]:
    """(way * n, C, H, W) → one image with a row of n for each class, white between them."""
    pixels = images.numpy().transpose(0, 2, 3, 1)  # (way * n, H, W, C)
    if pixels.shape[3] == 1:
        pixels = pixels.repeat(3, axis=3)
    framed = np.pad(pixels, ((0, 0), (_GAP, _GAP), (_GAP, _GAP), (0, 0)), constant_values=1)
    _, height, width, channels = framed.shape
    rows = framed.reshape(way, -1, height, width, channels).swapaxes(1, 2)  # (way, H, n, W, C)
    return rows.reshape(way * height, -1, channels)


def _short(name: str) -> str:
    parts = name.removeprefix("images_background/").removeprefix("images_evaluation/").split("/")
    return "\n".join(part if len(part) <= 22 else part[:21] + "…" for part in parts)
