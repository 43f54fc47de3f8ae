"""Folders of image files: examples in a folder for each class, and new images to classify."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from metadropout.classify.estimator import IMAGES_PER_PASS, MOST_TOGETHER, FewShotClassifier
from metadropout.classify.pictures import Target, picture
from metadropout.data.archives import open_tree, paths_in
from metadropout.data.class_lists import counted, listed
from metadropout.data.decode import FORMATS, SUFFIXES, open_image, to_array
from metadropout.data.images import ImageShape
from metadropout.data.trees import FileTree, UnreadableError
from metadropout.errors import DataError
from metadropout.weights import WeightSet

NOT_SURE = "not sure"
SHOWN = 5
"""How many of the most and of the least certain answers a page shows."""
THUMBNAIL = 112
"""Largest side of a picture on a page."""
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


@dataclass(frozen=True)
class Examples:
    """The examples of each class."""

    x: Tensor
    """Brought to the shape of the weights, shape (n, channels, height, width)."""
    labels: list[str]
    files: list[str]
    """Relative to the folder."""
    digests: dict[str, str]
    """Of each file's content → its name."""
    unreadable: list[str]
    """Those that were left out, with the reason."""


@dataclass
class Predictions:
    """What a folder's images were taken for."""

    classifier: FewShotClassifier
    tree: FileTree
    files: list[str] = field(default_factory=list)
    """Relative to the folder."""
    answers: list[str] = field(default_factory=list)
    """The class, or "not sure"."""
    likeliest: list[str] = field(default_factory=list)
    """The class, also where it is not sure."""
    certainties: list[float] = field(default_factory=list)
    """The largest probability."""
    unreadable: list[str] = field(default_factory=list)
    """Files that were left out, with the reason."""
    also_examples: list[str] = field(default_factory=list)
    """Files whose content is that of an example, so that their answers show nothing."""

    def add(self, files: Sequence[str], probabilities: NDArray[np.float64]) -> None:
        """Add the answers to some images."""
        self.files += files
        self.likeliest += [str(c) for c in self.classifier.classes_[probabilities.argmax(axis=1)]]
        self.answers += [
            NOT_SURE if answer is None else str(answer) for answer in self.classifier.decide(probabilities)
        ]
        self.certainties += probabilities.max(axis=1).tolist()

    def accuracy(self) -> float | None:
        """Return the share of right answers, where all images lie in folders with the names of classes."""
        truths = [Path(name).parent.name for name in self.files]
        if not truths or set(truths) - {str(label) for label in self.classifier.classes_}:
            return None
        return float(np.mean([answer == truth for answer, truth in zip(self.answers, truths, strict=True)]))

    def table(self) -> bytes:
        """Return the answers as a CSV table: file, class, probability."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["file", "class", "probability"])
        for name, answer, certainty in zip(self.files, self.answers, self.certainties, strict=True):
            writer.writerow([name, answer, f"{certainty:.4f}"])
        return text.getvalue().encode(errors="backslashreplace")  # file names need not be text

    def extremes(self) -> tuple[list[int], list[int]]:
        """Return the numbers of the most and of the least certain answers; no image is in both."""
        order = np.argsort(self.certainties, kind="stable")[::-1].tolist()
        most = order[: min(SHOWN, (len(order) + 1) // 2)]
        return most, [number for number in order[::-1][:SHOWN] if number not in most]


def read_examples(folder: Path, target: Target, on_file: Callable[[], None] = lambda: None) -> Examples:
    """Read the examples of each class: `folder/CLASS/image`.

    Args:
        folder: the folder, or a zip or tar archive of it.
        target: what to bring images to.
        on_file: called after each file.

    Raises:
        DataError: if there are no class folders, fewer than two classes have an image that can be read, or an image is
            in two of them.
    """
    tree = open_folder(folder)
    paths = paths_in(tree, SUFFIXES)
    stray = [name for name, path in paths.items() if len(path) < 2]
    if not paths or stray:
        found = f"'{listed(stray[:1])}' lies outside of any class folder" if stray else "no images in it"
        raise DataError(f"{folder}: {found}; put the examples of each class into a folder of its own: CLASS/image.jpg")
    labels, files, pictures, unreadable = [], [], [], []
    digests: dict[str, str] = {}
    for name, path in paths.items():
        on_file()
        try:
            content = tree.read(name)
            pictures.append(picture(open_image(content), target))
        except UnreadableError as error:
            unreadable.append(f"{name} ({error})")
            continue
        first = digests.setdefault(digest := hashlib.sha256(content).hexdigest(), name)
        if paths[first][0] != path[0]:
            raise DataError(
                f"{folder}: '{listed([first])}' and '{listed([name])}' are the same image in two classes; delete one"
            )
        assert digest in digests
        labels.append(path[0])
        files.append(name)
    left_out = f" ({listed(unreadable)} cannot be read)" if unreadable else ""
    if empty := sorted({path[0] for path in paths.values()} - set(labels)):
        raise DataError(f"{folder}: no image of class '{listed(empty[:1])}' can be read{left_out}; replace them")
    if len(set(labels)) < 2:
        raise DataError(f"{folder}: has one class only, '{labels[0]}'; a classifier needs at least two classes")
    return Examples(torch.stack(pictures), labels, files, digests, unreadable)


def open_folder(folder: Path) -> FileTree:
    """Open a folder or an archive of images."""
    if not folder.exists():
        raise DataError(f"{folder}: there is no such folder")
    return open_tree(folder)


def image_names(tree: FileTree) -> list[str]:
    """Return the image files of a folder, in order.

    Raises:
        DataError: if there are none.
    """
    names = [name for name in tree.names if name.lower().endswith(SUFFIXES)]
    if not names:
        raise DataError(f"{tree.location}: there are no images in it; known are {', '.join(FORMATS)}")
    return names


def predict_folder(
    classifier: FewShotClassifier,
    weights: WeightSet,
    examples: Examples,
    tree: FileTree,
    on_file: Callable[[], None] = lambda: None,
) -> Predictions:
    """Adapt a classifier to examples and let it answer for all images of a folder, a few at a time.

    Args:
        classifier: its parameters say how; it is fitted here.
        weights: those that it names.
        examples: what it learns from.
        tree: the folder of images to classify.
        on_file: called after each image.
    """
    classifier.fit_prepared(weights, examples.x, examples.labels)
    result = Predictions(classifier, tree)
    size = IMAGES_PER_PASS if classifier.inductive else MOST_TOGETHER
    names = image_names(tree)
    if len(names) > size and not classifier.inductive:
        raise DataError(
            f"{tree.location}: {len(names)} images are too many to be normalised together (at most {size}); answer for "
            "each by itself, which is the default"
        )
    for first in range(0, len(names), size):
        read, pictures = [], []
        for name in names[first : first + size]:
            try:
                content = tree.read(name)
                pictures.append(picture(open_image(content), classifier.target(weights)))
            except UnreadableError as error:
                result.unreadable.append(f"{name} ({error})")
            else:
                read.append(name)
                if hashlib.sha256(content).hexdigest() in examples.digests:
                    result.also_examples.append(name)
            on_file()
        if read:
            result.add(read, classifier.proba_of_prepared(torch.stack(pictures)))
    if not result.files:
        raise DataError(f"{tree.location}: none of its images can be read: {listed(result.unreadable)}")
    return result


def page(predictions: Predictions, examples: Examples, support: FileTree) -> str:
    """Return a page that shows the examples, and the answers that were the most and the least certain.

    Pictures are drawn anew from decoded pixels, so that nothing else that a file may hold gets into the page.
    """
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    own = predictions
    most, least = own.extremes()
    by_class: dict[str, list[str]] = {}
    for label, name in zip(examples.labels, examples.files, strict=True):
        by_class.setdefault(label, []).append(name)
    return environment.get_template("page.html").render(
        policy=POLICY,
        weights=own.classifier.weights_,
        classifier=own.classifier,
        count=counted(len(own.files), "image"),
        classes=[
            (label, counted(len(names), "example"), [thumbnail(support, name) for name in names[:SHOWN]])
            for label, names in by_class.items()
        ],
        totals=Counter(own.answers).most_common(),
        groups=[
            ("Most certain", list(_shown(own, most))),
            ("Least certain", list(_shown(own, least))),
        ],
        accuracy=own.accuracy(),
        unreadable=[_text(name) for name in own.unreadable + examples.unreadable],
        also_examples=[_text(name) for name in own.also_examples],
    )


def _shown(own: Predictions, numbers: Sequence[int]) -> Iterator[dict[str, Any]]:
    for number in numbers:
        name = own.files[number]
        yield {
            "picture": thumbnail(own.tree, name),
            "file": _text(name),
            "answer": own.answers[number],
            "likeliest": own.likeliest[number],
            "probability": own.certainties[number],
        }


def thumbnail(tree: FileTree, name: str) -> str:
    """Return a small picture of an image file as a data URL."""
    image = open_image(tree.read(name))
    scale = min(1.0, THUMBNAIL / max(image.size))
    width, height = (max(1, round(side * scale)) for side in image.size)
    pixels = to_array(image, ImageShape(3, height, width))
    content = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels.transpose(1, 2, 0))).save(content, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(content.getvalue()).decode()}"


def _text(name: str) -> str:
    return name.encode(errors="backslashreplace").decode()
