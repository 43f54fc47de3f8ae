"""`metadropout predict`: classify a folder of images after a few examples of each class."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from metadropout.classify import FewShotClassifier
from metadropout.classify.folders import (
    Examples,
    Predictions,
    image_names,
    open_folder,
    page,
    predict_folder,
    read_examples,
)
from metadropout.cli.numbers import add_number
from metadropout.cli.progress import CountDisplay
from metadropout.data.class_lists import counted, listed
from metadropout.errors import ConfigError
from metadropout.export import SUFFIXES, save_model
from metadropout.files import write_atomically
from metadropout.learners.base import TEST_SAMPLES
from metadropout.options import Samples, Seed, Share, Steps

INVERT = {"auto": "auto", "yes": True, "no": False}

EPILOG = """\
  metadropout predict cifar-fs-5way-1shot-maml --support examples --query photos --out predictions.csv --html page.html
The folder 'examples' has a folder for each class with one or more images of it: examples/cat/1.jpg, examples/dog/7.png.
All images in 'photos' and its folders are classified; if those have the names of classes, accuracy is printed, too.
Images that cannot be read are named and left out. 'metadropout weights' lists the weights: take those of Omniglot for
drawn characters, those of CIFAR-FS for small photos.
"""


def register(parser: argparse.ArgumentParser) -> None:
    """Give the command's parser its arguments."""
    parser.description = (
        "Classifies a folder of images after a few examples of each class. Writes a table of file, class and "
        "probability."
    )
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("weights", metavar="WEIGHTS", help="a name that 'metadropout weights' lists, or a file")
    parser.add_argument("--support", type=Path, required=True, metavar="DIR", help="examples: a folder for each class")
    parser.add_argument("--query", type=Path, required=True, metavar="DIR", help="the images to classify")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the table, as CSV")
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="also write a page with the most and the least certain answers"
    )
    add_number(
        parser, "--threshold", Share, metavar="P", help="say 'not sure' where no class has this probability (0 to 1)"
    )
    parser.add_argument(
        "--transductive",
        action="store_true",
        help="normalise all images together, as the paper does: better where they are of all classes in equal parts",
    )
    parser.add_argument(
        "--invert",
        choices=list(INVERT),
        default="auto",
        help="for weights of drawings: whether images are dark on light (default: auto, by the edge of each)",
    )
    add_number(parser, "--steps", Steps, help="steps of adapting (default: as many as in training the weights)")
    add_number(parser, "--mc-samples", Samples, default=TEST_SAMPLES, help="noise samples per step (default: 30)")
    add_number(parser, "--seed", Seed, default=0, help="of the noise (default: 0)")
    parser.add_argument(
        "--save-model",
        type=Path,
        metavar="FILE",
        help="also save the adapted classifier: NAME.onnx (ONNX), or NAME.pt2 (for torch.export.load)",
    )
    parser.set_defaults(run=run_command)


def run_command(namespace: argparse.Namespace) -> int:
    """Classify, write what was asked for, and return the exit status."""
    if namespace.save_model is not None and namespace.save_model.suffix not in SUFFIXES:
        raise ConfigError(f"--save-model is {namespace.save_model}; a model's file ends in {' or '.join(SUFFIXES)}")
    if namespace.save_model is not None and namespace.transductive:
        raise ConfigError("--save-model cannot be used with --transductive: a saved model answers for each image alone")
    classifier = FewShotClassifier(
        namespace.weights,
        inductive=not namespace.transductive,
        mc_samples=namespace.mc_samples,
        steps=namespace.steps,
        invert=INVERT[namespace.invert],  # type: ignore[arg-type]
        threshold=namespace.threshold,
        seed=namespace.seed,
    )
    weights = classifier.load()
    support, query = open_folder(namespace.support), open_folder(namespace.query)
    total = len(image_names(query))
    with CountDisplay("reading examples", len(support.names)) as display:
        examples = read_examples(namespace.support, classifier.target(weights), display.advance)
    with CountDisplay("classifying", total) as display:
        predictions = predict_folder(classifier, weights, examples, query, display.advance)
    write_atomically(namespace.out, predictions.table())
    if namespace.html is not None:
        write_atomically(namespace.html, page(predictions, examples, support))
    if namespace.save_model is not None:
        save_model(classifier, namespace.save_model)
    _report(predictions, examples, namespace)
    return 0


def _report(predictions: Predictions, examples: Examples, namespace: argparse.Namespace) -> None:
    """Say on standard error what was left out, and on standard output what was done."""
    for names, where in ((examples.unreadable, namespace.support), (predictions.unreadable, namespace.query)):
        if names:
            print(
                f"{where}: left out, {counted(len(names), 'image')} that cannot be read: {listed(names)}",
                file=sys.stderr,
            )
    if same := predictions.also_examples:
        count = counted(
            len(same),
            "image is an example, too, so that its answer shows",
            "images are examples, too, so that their answers show",
        )
        print(f"{namespace.query}: {count} nothing: {listed(same)}", file=sys.stderr)
    classes = predictions.classifier.classes_
    sure = sum(
        answer == likeliest for answer, likeliest in zip(predictions.answers, predictions.likeliest, strict=True)
    )
    unsure = f", not sure of {len(predictions.files) - sure}" if namespace.threshold is not None else ""
    print(
        f"{namespace.out}: {counted(len(predictions.files), 'image')}, {len(classes)} classes, "
        f"{counted(len(examples.files), 'example')} in all{unsure}"
    )
    if (accuracy := predictions.accuracy()) is not None:
        print(f"{100 * accuracy:.2f} % of the answers are the name of the image's folder")
    for path in (namespace.html, namespace.save_model):
        if path is not None:
            print(path)
