"""Images of any kind, brought to the shape of the weights in the way in which data sets bring theirs to it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps
from torch import Tensor

from metadropout.data import ImageShape
from metadropout.data.decode import MAX_PIXELS, open_image, to_array
from metadropout.data.images import UInt8Array
from metadropout.data.trees import MAX_FILE_BYTES, UnreadableError
from metadropout.errors import DataError
from metadropout.files import read_regular

ImageLike = Any
"""A path, a PIL image, or an array or tensor: (height, width), (height, width, channels) or (channels, height, width).
"""

Invert = bool | Literal["auto"]
"""Whether dark drawings on a light ground are inverted: "auto" decides for each image, for weights of drawings only."""

CHANNELS = (1, 3, 4)
"""How many channels an image can have: grey, colour, colour with transparency."""


class Target(NamedTuple):
    """What images are brought to."""

    shape: ImageShape
    drawings: bool = False
    """Whether they are to be ink (1) on paper (0)."""
    invert: Invert = "auto"


def as_tensor(images: Any, target: Target) -> Tensor:
    """Return images as floats in [0, 1], shape (n, channels, height, width).

    Args:
        images: one image or several; see `split_up`.
        target: what to bring them to.

    Raises:
        DataError: if one cannot be read, with its name or number.
    """
    found = []
    for number, image in enumerate(split_up(images)):
        try:
            found.append(picture(image, target))
        except UnreadableError as error:
            name = image if isinstance(image, str | Path) else f"image {number}"
            raise DataError(f"{name}: {error}") from None
    return torch.stack(found) if found else torch.zeros(0, *target.shape)


def split_up(images: Any) -> Sequence[ImageLike]:
    """Return images one by one.

    Args:
        images: a path or a PIL image is one image. So is an array or tensor of two axes, (height, width), or of three
            whose last has 1, 3 or 4 entries, (height, width, channels); of three others, (n, height, width), it is n
            grey ones. Of four axes it is (n, channels, height, width) where the second has 1, 3 or 4 entries, and
            (n, height, width, channels) otherwise. Anything else is a sequence of images, of which each may have
            another size.
    """
    if isinstance(images, str | Path | Image.Image):
        return [images]
    if isinstance(images, Tensor):
        images = images.detach().cpu().numpy()
    if hasattr(images, "__array__") and not isinstance(images, np.ndarray):  # a pandas column, say
        images = np.asarray(images)
    if isinstance(images, np.ndarray) and images.dtype.kind in "OUS" and images.ndim == 1:
        return [item.item() if isinstance(item, np.generic) else item for item in images]
    if isinstance(images, np.ndarray):
        if images.ndim not in (2, 3, 4):
            raise DataError(
                f"images are an array of shape {images.shape}; give (n, channels, height, width), (n, height, width, "
                "channels) or (n, height, width), or a list of images"
            )
        single = images.ndim == 2 or (images.ndim == 3 and images.shape[2] in CHANNELS)
        return [images] if single else list(images)
    if not isinstance(images, Iterable):
        raise DataError(
            f"images are a {type(images).__name__}; give a list of paths, PIL images or arrays, or an array"
        )
    several = list(images)
    if several and isinstance(several[0], list | tuple):  # numbers in lists
        return split_up(np.asarray(several))
    return several


def picture(image: ImageLike, target: Target) -> Tensor:
    """Return one image as floats in [0, 1], shape (channels, height, width).

    Args:
        image: a path, a PIL image, an array or a tensor.
        target: what to bring it to.

    Raises:
        UnreadableError: if it cannot be read.
    """
    if isinstance(image, str | Path):
        image = read_picture(Path(image))
    elif isinstance(image, Image.Image):
        image = checked(image)
    else:
        array = as_array(image)
        if array.dtype.kind == "f" and array.transpose(2, 0, 1).shape == target.shape:
            return _as_it_is(array, target)  # not rounded to bytes, as it need not be resized
        image = Image.fromarray(np.squeeze(_as_bytes(array), axis=2) if array.shape[2] == 1 else _as_bytes(array))
    return torch.tensor(to_bytes(image, target)).to(torch.float32).mul_(1 / 255)


def read_picture(path: Path) -> Image.Image:
    """Decode an image file, without trusting a byte of it.

    Raises:
        UnreadableError: if it is missing, damaged, too large or of another format.
    """
    try:
        return open_image(read_regular(path, MAX_FILE_BYTES))
    except OSError as error:
        raise UnreadableError(error.strerror or str(error)) from None


def checked(image: Image.Image) -> Image.Image:
    """Return an opened image upright, refusing one that is too large or turns out to be damaged."""
    if image.width * image.height > MAX_PIXELS:
        raise UnreadableError(f"{image.width} x {image.height} pixels are more than the {MAX_PIXELS} allowed")
    if not image.width * image.height:
        raise UnreadableError("it has no pixels")
    try:
        return ImageOps.exif_transpose(image)
    except Exception as error:  # an image that was opened lazily is decoded only now
        raise UnreadableError(f"damaged: {error}") from None


def to_bytes(image: Image.Image, target: Target) -> UInt8Array:
    """Return a decoded image as bytes, shape (channels, height, width), as data sets prepare theirs."""
    if not target.drawings:
        return to_array(image, target.shape, fit="crop")
    # As Omniglot is prepared: inverted first, then shrunk.
    own = ImageShape(1, image.height, image.width)
    grey = to_array(image, own)[0]
    inverted = is_dark_on_light(grey / 255) if target.invert == "auto" else target.invert
    ink = Image.fromarray(~grey if inverted else grey)
    if ink.width != ink.height:  # strokes are neither cut off nor stretched
        ink = ImageOps.pad(ink, (max(ink.size),) * 2, method=Image.Resampling.LANCZOS, color=0)
    return to_array(ink, target.shape)


def is_dark_on_light(grey: NDArray[Any]) -> bool:
    """Say whether a drawing is dark on a light ground: whether its edge, which is mostly ground, is mostly light."""
    edge = np.concatenate([grey[0], grey[-1], grey[:, 0], grey[:, -1]])
    return float(np.mean(edge > 0.5)) > 0.5


def as_array(image: Any) -> NDArray[Any]:
    """Return an array or tensor as (height, width, channels), of whatever numbers.

    Raises:
        UnreadableError: if it is no image.
    """
    if isinstance(image, Tensor):
        image = image.detach().cpu().numpy()
    try:
        array = np.asarray(image)
    except ValueError as error:
        raise UnreadableError(f"not an image: {error}") from None
    if array.ndim == 2:
        array = array[:, :, None]
    elif array.ndim == 3 and array.shape[0] in CHANNELS and array.shape[2] not in CHANNELS:
        array = array.transpose(1, 2, 0)
    if array.ndim != 3 or array.shape[2] not in CHANNELS or array.dtype.kind not in "biuf":
        shape = f"an array of shape {array.shape}" if array.ndim else f"a {type(image).__name__}"
        raise UnreadableError(
            f"{shape} of type {array.dtype} is not an image; give (height, width) or (height, width, channels) with "
            "1, 3 or 4 channels"
        )
    if not array.size:
        raise UnreadableError(f"an array of shape {array.shape} has no pixels")
    return array


def _as_bytes(array: NDArray[Any]) -> UInt8Array:
    """Return the pixels of an array as bytes from 0 to 255."""
    if array.dtype == np.uint8:
        return np.ascontiguousarray(array)
    if array.dtype == np.bool_:
        return array.astype(np.uint8) * np.uint8(255)
    if array.dtype.kind == "f":
        array = np.rint(_checked_floats(array) * 255)
    elif array.min() < 0 or array.max() > 255:
        raise UnreadableError(f"its numbers go from {array.min()} to {array.max()}, not from 0 to 255")
    return array.astype(np.uint8)


def _as_it_is(array: NDArray[Any], target: Target) -> Tensor:
    values = _checked_floats(array).astype(np.float32)
    if target.drawings and (is_dark_on_light(values[:, :, 0]) if target.invert == "auto" else target.invert):
        values = 1 - values
    return torch.from_numpy(np.ascontiguousarray(values.transpose(2, 0, 1)))


def _checked_floats(array: NDArray[Any]) -> NDArray[Any]:
    low, high = float(array.min()), float(array.max())
    if not (low >= 0 and high <= 1):  # which is also false of NaN
        raise UnreadableError(
            f"its numbers go from {low:g} to {high:g}; floats have to be in 0 to 1 (bytes: 0 to 255, as uint8)"
        )
    return array
