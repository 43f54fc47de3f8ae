import io
import struct
import zlib
from collections.abc import Callable

import numpy as np
import pytest
from PIL import Image

from metadropout.data.decode import decode_all, open_image, to_array
from metadropout.data.images import ImageShape
from metadropout.data.trees import UnreadableError
from metadropout.errors import DataError


def encode(image: Image.Image, format: str = "PNG", **options: object) -> bytes:
    content = io.BytesIO()
    image.save(content, format, **options)
    return content.getvalue()


@pytest.mark.parametrize("format", ["PNG", "BMP", "TIFF", "PPM"])
def test_every_lossless_format_gives_the_same_pixels(format: str) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    array = to_array(open_image(encode(Image.fromarray(pixels), format)), ImageShape(3, 5, 7))
    assert np.array_equal(array, pixels.transpose(2, 0, 1))


@pytest.mark.parametrize("format", ["JPEG", "WEBP", "GIF"])
def test_lossy_formats_are_read(format: str) -> None:
    array = to_array(open_image(encode(Image.new("RGB", (6, 6), (200, 30, 90)), format)), ImageShape(3, 6, 6))
    assert np.abs(array.astype(int) - np.array([200, 30, 90])[:, None, None]).max() < 12


@pytest.mark.parametrize(("mode", "value"), [("1", 1), ("L", 255), ("LA", (255, 255)), ("P", 255), ("RGB", (255,) * 3)])
def test_white_is_white_in_every_mode(mode: str, value: object) -> None:
    image = Image.new("RGB", (4, 4), "white").convert("P") if mode == "P" else Image.new(mode, (4, 4), value)  # type: ignore[arg-type]
    for channels in (1, 3):
        assert (to_array(open_image(encode(image)), ImageShape(channels, 4, 4)) == 255).all()


def test_sixteen_bits_keep_the_upper_eight() -> None:
    image = Image.fromarray(np.array([[0, 0x1234, 0xFFFF]], dtype=np.uint16))
    assert to_array(open_image(encode(image)), ImageShape(1, 1, 3)).tolist() == [[[0, 0x12, 0xFF]]]


def test_transparent_parts_become_white() -> None:
    image = Image.new("RGBA", (2, 1), (10, 20, 30, 255))
    image.putpixel((1, 0), (10, 20, 30, 0))
    assert to_array(open_image(encode(image)), ImageShape(3, 1, 2)).tolist() == [[[10, 255]], [[20, 255]], [[30, 255]]]


def test_exif_turns_the_image_upright() -> None:
    image = Image.fromarray(np.array([[0, 255]], dtype=np.uint8))
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was held so that the picture has to be turned clockwise
    upright = open_image(encode(image, exif=exif))
    assert to_array(upright, ImageShape(1, 2, 1)).tolist() == [[[0], [255]]]


def test_crop_keeps_the_centre_and_stretch_keeps_everything() -> None:
    pixels = np.zeros((10, 30), dtype=np.uint8)
    pixels[:, 10:20] = 255  # a white square in the middle of a black strip
    image, shape = Image.fromarray(pixels), ImageShape(1, 10, 10)
    assert to_array(image, shape, fit="crop").mean() > 230
    assert to_array(image, shape, fit="stretch").mean() == pytest.approx(85, abs=5)


def test_a_decompression_bomb_is_refused_before_it_unfolds() -> None:
    # A valid PNG of 60000 x 60000 pixels in a few bytes: only its header is looked at.
    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", 60000, 60000, 1, 0, 0, 0, 0)
    bomb = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")
    with pytest.raises(UnreadableError, match="pixels"):
        open_image(bomb)


def test_sizes_just_above_the_limit_are_refused() -> None:
    with pytest.raises(UnreadableError, match="8000 x 7000 pixels are more than"):
        open_image(encode(Image.new("1", (8000, 7000))))


def test_formats_that_start_programs_are_not_opened() -> None:
    postscript = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n"
    with pytest.raises(UnreadableError, match="known format"):
        open_image(postscript)


@pytest.mark.parametrize("keep", [10, 60, 90])
def test_a_cut_image_is_unreadable(keep: int, png: Callable[..., bytes]) -> None:
    content = png(0)
    with pytest.raises(UnreadableError):
        open_image(content[: len(content) * keep // 100])


def test_all_damaged_images_are_named_at_once(png: Callable[..., bytes]) -> None:
    files = {"a": png(0), "b": b"nonsense", "c": png(1), "d": png(2)[:50]}
    decoded = decode_all(files, files.__getitem__, lambda image: to_array(image, ImageShape(3, 8, 8)), "the folder")
    with pytest.raises(
        DataError, match=r"the folder: 2 of the images cannot be read: b \(.*\), d \(.*replace or delete"
    ):
        list(decoded)


def test_damaged_images_are_skipped_where_wanted_and_named(
    png: Callable[..., bytes], caplog: pytest.LogCaptureFixture
) -> None:
    files = {"a": png(0), "b": b"nonsense", "c": png(1)}

    def read(name: str) -> bytes:
        if name == "pipe":
            raise UnreadableError("it is a named pipe")
        return files[name]

    names = [*files, "pipe"]
    decoded = decode_all(names, read, lambda image: to_array(image, ImageShape(3, 8, 8)), "the folder", skip=True)
    assert [array is None for array in decoded] == [False, True, False, True]
    assert "the folder: left out, 2 images that cannot be read: b (" in caplog.text
    assert "pipe (it is a named pipe)" in caplog.text
