import dataclasses
import json

import numpy as np
import pytest

from metadropout.data import ClassSubset, Identity, ImageSet, ImageShape, Splits, open_dataset
from metadropout.data.images import IntArray, UInt8Array
from metadropout.data.rotations import RotatedClasses


class Greys(ImageSet):
    """Class k has images of grey k * 10 + (0, 1, …)."""

    def __init__(self, names: str, sizes: list[int], first: int = 0) -> None:
        self.class_names, self.class_sizes = list(names), np.array(sizes)
        self.image_shape, self.first = ImageShape(1, 2, 2), first

    def gather(self, classes: IntArray, images: IntArray) -> UInt8Array:
        greys = (self.first + classes * 10 + images).astype(np.uint8)
        return np.broadcast_to(greys[:, None, None, None], (len(greys), 1, 2, 2)).copy()


def split(parent: ImageSet, train: list[int], test: list[int]) -> Splits:
    return Splits(ClassSubset(parent, train), None, ClassSubset(parent, test))


ALL = Greys("abcde", [3, 4, 5, 3, 4])
HERE = split(ALL, [0, 1], [2]).identity


def test_names_are_listed_split_by_split_in_their_order() -> None:
    assert split(ALL, [1, 0], [2]).identity.classes == {"train": ["b", "a"], "validation": [], "test": ["c"]}


def test_it_survives_being_written_down() -> None:
    assert Identity(**json.loads(json.dumps(dataclasses.asdict(HERE)))) == HERE


def test_classes_in_no_split_do_not_count() -> None:
    assert split(Greys("abc", [3, 4, 5]), [0, 1], [2]).identity == HERE


@pytest.mark.parametrize(
    ("other", "changes"),
    [
        (split(ALL, [0, 1], [2]), []),
        (split(ALL, [0, 1], [2, 3, 4]), ["2 test classes are new: 'd', 'e'"]),
        (split(ALL, [0], [2]), ["1 train class is gone: 'b'"]),
        (split(ALL, [0], [2, 1]), ["1 train class is gone: 'b'", "1 test class is new: 'b'"]),
        (split(ALL, [1, 0], [2]), ["the train classes are in another order"]),
        (
            split(Greys("abc", [3, 4, 5], first=1), [0, 1], [2]),
            ["the classes are the same, but their images are not"],
        ),
        (split(Greys("abc", [3, 4, 4]), [0, 1], [2]), ["the classes are the same, but their images are not"]),
    ],
)
def test_changes_are_named(other: Splits, changes: list[str]) -> None:
    assert HERE.changes(other.identity) == changes
    assert (other.identity == HERE) == (not changes)


def test_rotated_classes_are_told_apart() -> None:
    digests = RotatedClasses(ALL).class_digests()
    assert len(set(digests)) == len(digests) == 20


def test_glyphs_are_identified_without_drawing_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("metadropout.data.glyphs._draw_class", None)
    one, other, fewer = (
        open_dataset("glyphs", **options).identity for options in ({}, {"seed": 1}, {"images_per_class": 19})
    )
    assert one == open_dataset("glyphs").identity
    assert len({one.digest, other.digest, fewer.digest}) == 3
    assert one.classes["test"][0] == "glyph-1100"
