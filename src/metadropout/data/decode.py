"""From the bytes of an image file to a uint8 array of the size and channels asked for."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Literal

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from metadropout.data.class_lists import counted, listed
from metadropout.data.images import ImageShape, UInt8Array
from metadropout.data.trees import UnreadableError
from metadropout.errors import DataError

# Formats decoded by Pillow itself. Others start a program (EPS starts Ghostscript) or are rarely of use here.
FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM")
SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm", ".pbm")

# A file of a few kilobytes can unfold to gigabytes of pixels. 50 megapixels are more than any camera's picture that
# somebody would shrink to a few-shot image without having shrunk it before.
MAX_PIXELS = 50_000_000

_log = logging.getLogger(__name__)

Fit = Literal["crop", "stretch"]


def open_image(content: bytes) -> Image.Image:
    """Decode an image, upright, without trusting a byte of it.

    Raises:
        UnreadableError: if it is damaged, of an unknown format or too large.
    """
    try:
        image: Image.Image = Image.open(io.BytesIO(content), formats=FORMATS)
        width, height = image.size
        if width * height > MAX_PIXELS:
            raise UnreadableError(f"{width} x {height} pixels are more than the {MAX_PIXELS} allowed")
        image.load()
        return ImageOps.exif_transpose(image)
    except UnreadableError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise UnreadableError(f"more than the {MAX_PIXELS} pixels allowed") from error
    except UnidentifiedImageError as error:
        raise UnreadableError("not an image of a known format") from error
    except Exception as error:  # Pillow's decoders meet damage with anything from OSError to struct.error
        raise UnreadableError(f"damaged: {error}") from error


def to_array(image: Image.Image, shape: ImageShape, *, fit: Fit = "stretch") -> UInt8Array:
    """Return the image as (channels, height, width), by Lanczos where its size has to change.

    Args:
        image: any mode; transparent parts become white.
        shape: what to bring it to; 1 channel is grey, 3 are RGB.
        fit: "crop" keeps the proportions and cuts what stands out at the centre, "stretch" keeps everything.
    """
    image = _with_channels(image, shape.channels)
    size = (shape.width, shape.height)
    if image.size != size:
        if fit == "crop":
            image = ImageOps.fit(image, size, method=Image.Resampling.LANCZOS)
        else:
            image = image.resize(size, Image.Resampling.LANCZOS)
    array = np.asarray(image, dtype=np.uint8)
    return array[None] if shape.channels == 1 else np.ascontiguousarray(array.transpose(2, 0, 1))


def decode_all(
    names: Iterable[str],
    read: Callable[[str], bytes],
    convert: Callable[[Image.Image], UInt8Array],
    where: str,
    *,
    skip: bool = False,
    way_out: str = "",
) -> Iterator[UInt8Array | None]:
    """Decode file after file; the unreadable ones are named together at the end, so that one run finds them all.

    Args:
        names: the files, in the order wanted.
        read: gives the bytes of one; may raise UnreadableError.
        convert: from the decoded image to the array; may raise UnreadableError.
        where: the folder or archive, for the message.
        skip: whether to give None for an unreadable file, and name it in a warning.
        way_out: what the user can do about unreadable files besides replacing them.

    Raises:
        DataError: after the last file, if any could not be read and was not to be skipped.
    """
    unreadable: list[str] = []
    for name in names:
        try:
            array = convert(open_image(read(name)))
        except UnreadableError as error:
            unreadable.append(f"{name} ({error})")
            if skip:
                yield None
        else:
            yield array
    if unreadable and skip:
        _log.warning(
            "%s: left out, %s that cannot be read: %s", where, counted(len(unreadable), "image"), listed(unreadable)
        )
    elif unreadable:
        raise DataError(
            f"{where}: {len(unreadable)} of the images cannot be read: {listed(unreadable)}; "
            f"replace or delete them{way_out}, then prepare again"
        )


def _with_channels(image: Image.Image, channels: int) -> Image.Image:
    if image.mode.startswith("I"):  # 16 bits: keep the upper 8, where Pillow's own conversion would clip
        wide = np.asarray(image).astype(np.int64)
        image = Image.fromarray((wide.clip(0, 65535) >> 8).astype(np.uint8))
    if image.mode == "F":
        raise UnreadableError("floating-point pixels have no fixed range; save it with 8 bits")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image)
    return image.convert("L" if channels == 1 else "RGB")
