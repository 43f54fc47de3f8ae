"""Images of any kind: the same pixels whichever way they come, prepared as data sets prepare theirs."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import metadropout as md
from metadropout.classify.pictures import Target, as_tensor, split_up
from metadropout.data import ImageShape
from metadropout.data.omniglot import _ink

GREY, COLOUR = ImageShape(1, 28, 28), ImageShape(3, 32, 32)
PHOTOS, DRAWN = Target(COLOUR), Target(GREY, drawings=True)
BYTES = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)


def kinds_of(tmp_path: Path) -> dict[str, Any]:
    Image.fromarray(BYTES).save(tmp_path / "a.png")
    floats = BYTES.astype(np.float32) / 255
    return {
        "path": tmp_path / "a.png",
        "text": str(tmp_path / "a.png"),
        "PIL": Image.fromarray(BYTES),
        "bytes (H, W, C)": BYTES,
        "bytes (1, H, W, C)": BYTES[None],
        "bytes (1, C, H, W)": BYTES.transpose(2, 0, 1)[None],
        "list of (C, H, W)": [BYTES.transpose(2, 0, 1)],
        "floats": floats[None],
        "doubles": floats[None].astype(np.float64),
        "integers": BYTES[None].astype(np.int64),
        "tensor": torch.from_numpy(BYTES.transpose(2, 0, 1).copy())[None],
        "float tensor": torch.from_numpy(floats.transpose(2, 0, 1).copy())[None],
        "list of paths": [tmp_path / "a.png"],
        "array of texts": np.array([str(tmp_path / "a.png")]),
        "nested lists": [BYTES.tolist()],
    }


def test_an_image_is_the_same_in_whichever_way_it_comes(tmp_path: Path) -> None:
    wanted = torch.from_numpy(BYTES.transpose(2, 0, 1).copy()).float()[None] / 255
    for kind, image in kinds_of(tmp_path).items():
        found = as_tensor(image, PHOTOS)
        assert found.shape == (1, 3, 32, 32), kind
        assert (found - wanted).abs().max() < 1e-6, kind


@pytest.mark.parametrize("size", [(10, 10), (300, 200), (32, 31), (1, 500)])
@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA", "P", "1", "I;16", "LA", "CMYK"])
@pytest.mark.parametrize("target", [PHOTOS, DRAWN])
def test_any_size_and_mode_is_brought_to_the_shape_of_the_weights(
    size: tuple[int, int], mode: str, target: Target
) -> None:
    found = as_tensor(Image.new(mode, size), target)
    assert found.shape == (1, *target.shape)
    assert found.min() >= 0
    assert found.max() <= 1


def test_drawings_are_prepared_as_omniglots_are() -> None:
    rng = np.random.default_rng(0)
    ink = Image.fromarray(np.where(rng.random((105, 105)) < 0.1, 0, 255).astype(np.uint8)).convert("1")
    wanted = torch.from_numpy(_ink(ink, GREY).copy()).float() / 255
    assert (as_tensor(ink, DRAWN)[0] - wanted).abs().max() < 1e-6


def test_dark_drawings_on_a_light_ground_are_inverted_and_others_are_not() -> None:
    drawn = np.zeros((28, 28), np.uint8)
    drawn[5:20, 10:14] = 255
    wanted = as_tensor(drawn, DRAWN)
    assert torch.equal(as_tensor(255 - drawn, DRAWN), wanted)
    assert (as_tensor(1 - drawn / 255, DRAWN) - wanted).abs().max() < 1e-6
    assert torch.equal(as_tensor(255 - drawn, DRAWN._replace(invert=False)), 1 - wanted)
    assert torch.equal(as_tensor(drawn, DRAWN._replace(invert=True)), 1 - wanted)
    assert torch.equal(as_tensor(drawn, DRAWN._replace(invert=False)), wanted)


def test_photographs_are_not_inverted() -> None:
    assert as_tensor(np.full((32, 32, 3), 255, np.uint8), PHOTOS).min() == 1


def test_a_drawing_that_is_not_square_is_neither_cut_nor_stretched() -> None:
    wide = np.zeros((28, 112), np.uint8)
    wide[:, 50:62] = 255
    found = as_tensor(wide, DRAWN)[0, 0]
    assert max(found[:8].max(), found[-8:].max()) == 0  # paper was added above and below
    assert found[14].max() > 0.9


@pytest.mark.parametrize(
    ("array", "count"),
    [((28, 28), 1), ((28, 28, 3), 1), ((7, 28, 28), 7), ((7, 1, 28, 28), 7), ((7, 28, 28, 3), 7), ((3, 28, 28), 3)],
)
def test_the_axes_of_an_array_are_understood(array: tuple[int, ...], count: int) -> None:
    assert len(split_up(np.zeros(array, np.uint8))) == count
    assert as_tensor(np.zeros(array, np.uint8), PHOTOS).shape == (count, 3, 32, 32)


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (np.full((1, 28, 28), 2.0), "0 to 1"),
        (np.full((1, 28, 28), np.nan), "0 to 1"),
        (np.full((1, 28, 28), -3), "from 0 to 255"),
        (np.zeros((1, 28, 28), complex), "not an image"),
        (np.zeros(28), "shape"),
        (np.zeros((1, 0, 28)), "no pixels"),
        ([np.zeros((28, 28, 2))], "not an image"),
        (["no-such-file.png"], "no-such-file.png: No such file"),
        (3, "give a list"),
        ([None], "not an image"),
    ],
)
def test_what_is_no_image_is_refused_with_the_reason(image: Any, message: str) -> None:
    with pytest.raises(md.DataError, match=message):
        as_tensor(image, DRAWN)


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\nbroken")
    with pytest.raises(md.DataError, match=r"broken\.png"):
        as_tensor([tmp_path / "broken.png"], DRAWN)


def test_an_image_of_30000_pixels_a_side_is_refused_before_it_takes_memory(tmp_path: Path) -> None:
    content = io.BytesIO()
    Image.new("1", (30_000, 30_000)).save(content, "PNG")
    (tmp_path / "huge.png").write_bytes(content.getvalue())
    with pytest.raises(md.DataError, match=r"huge\.png: more than the 50000000 pixels allowed"):
        as_tensor(tmp_path / "huge.png", DRAWN)


def test_a_strip_of_30000_pixels_is_an_image_like_any_other() -> None:
    assert as_tensor(Image.new("L", (30_000, 1)), PHOTOS).shape == (1, 3, 32, 32)


def test_a_pil_image_that_is_too_large_is_refused() -> None:
    with pytest.raises(md.DataError, match="pixels are more than"):
        as_tensor(Image.new("1", (10_000, 10_000)), DRAWN)


def test_no_images_are_no_error() -> None:
    assert as_tensor([], DRAWN).shape == (0, 1, 28, 28)
