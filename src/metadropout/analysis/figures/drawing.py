"""Drawing with matplotlib, an extra: one light style, colours that colour-blind readers tell apart."""

from __future__ import annotations

import io
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from metadropout.analysis.figures.base import FloatArray
from metadropout.analysis.plots import COLOURS
from metadropout.errors import MetadropoutError
from metadropout.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "COLOURS",
    "image_grid",
    "label_row",
    "new_figure",
    "require",
    "save_gif",
    "save_png",
    "show",
    "side_by_side",
]

DPI = 110


def require(*packages: str) -> None:
    """Refuse to begin where a package that only figures need is missing.

    Raises:
        MetadropoutError: with the extra to install.
    """
    for package in packages:
        if find_spec(package) is None:
            raise MetadropoutError(
                f"figures need {'scikit-learn' if package == 'sklearn' else package}, which is not installed; "
                "install it with `pip install 'metadropout[figures]'`"
            )


def new_figure(width: float, height: float) -> Figure:
    """Make an empty figure of a size in inches; it needs no display."""
    require("matplotlib")
    from matplotlib.figure import Figure  # noqa: PLC0415 (an extra)

    return Figure(figsize=(width, height), dpi=DPI, layout="constrained", facecolor="white")


def side_by_side(figure: Figure, left: float, right: float) -> tuple[Any, Any]:
    """Divide a figure into a left and a right part of given widths."""
    parts: Any = figure.subfigures(1, 2, width_ratios=[left, right])
    return parts[0], parts[1]


def image_grid(figure: Any, rows: int, columns: int, widths: Sequence[float] | None = None) -> Any:
    """Divide a figure into cells for images, without axes; always an array of shape (rows, columns)."""
    axes = figure.subplots(rows, columns, squeeze=False, width_ratios=widths)
    for cell in axes.flat:
        cell.set_xticks([])
        cell.set_yticks([])
        for side in cell.spines.values():
            side.set_linewidth(0.5)
            side.set_color("#999999")
    return axes


def label_row(axes: Axes, text: str) -> None:
    """Write at the left of a row's first cell."""
    axes.set_ylabel(text, rotation=0, ha="right", va="center", fontsize=8)


def show(axes: Axes, values: FloatArray, low: float, high: float, colours: str = "gray") -> Any:
    """Show an image, grey or coloured, or a map of values."""
    return axes.imshow(values, vmin=low, vmax=max(high, low + 1e-6), cmap=colours, interpolation="nearest")


def save_png(figure: Figure, path: Path) -> None:
    """Write a figure to a PNG file atomically."""
    content = io.BytesIO()
    figure.savefig(content, format="png", metadata={"Software": None})
    write_atomically(path, content.getvalue())


def save_gif(frames: Sequence[Figure], path: Path, seconds_per_frame: float = 0.3) -> None:
    """Write figures of one size to an animated GIF that runs forever."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 (an extra)
    from PIL import Image  # noqa: PLC0415 (only here)

    images = []
    for frame in frames:
        canvas: Any = FigureCanvasAgg(frame)
        canvas.draw()
        pixels = np.asarray(canvas.buffer_rgba())[..., :3]
        images.append(Image.fromarray(np.ascontiguousarray(pixels)).quantize(64))
    content = io.BytesIO()
    images[0].save(
        content, "GIF", save_all=True, append_images=images[1:], duration=round(1000 * seconds_per_frame), loop=0
    )
    write_atomically(path, content.getvalue())
