"""Accuracy of `metadropout predict` on folders of image files, beside that of `evaluate` on the same tasks.

    python -m metadropout.bench.folders omniglot-5way-1shot-metadropout cifar-fs-5way-1shot-maml --way 5 3 10

needs Omniglot or CIFAR-100 in the data directory (METADROPOUT_DATA). Each task is written as folders of the published
image files: of upright characters of Omniglot's evaluation alphabets that are test classes of the weights, or of test
classes of CIFAR-FS. `evaluate` starts classes from the head's rows where the task has as many classes as in training,
and from their mean elsewhere; `predict` from what the weights' card says is better.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from metadropout.classify import FewShotClassifier
from metadropout.classify.folders import open_folder, predict_folder, read_examples
from metadropout.data import ClassSubset, EpisodeSampler, ImageSet, open_dataset
from metadropout.data.archives import open_tree
from metadropout.data.locations import data_directory
from metadropout.data.trees import FileTree
from metadropout.evaluation import Evaluation, evaluate
from metadropout.weights import WeightSet, load_weights

UPRIGHT = "/rot000"


def main() -> None:
    """Measure what the command line asks for, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("weights", nargs="+", help="names of weights, or files")
    parser.add_argument("--tasks", type=int, default=100)
    parser.add_argument("--way", type=int, nargs="+", default=[5])
    parser.add_argument("--shot", type=int, default=1)
    parser.add_argument("--query", type=int, default=15)
    namespace = parser.parse_args()
    print("| weights | way | `predict` | `evaluate`, inductive | difference task by task |\n|---|---|---|---|---|")
    for name in namespace.weights:
        for way in namespace.way:
            found, wanted = measure(load_weights(name), namespace.tasks, way, namespace.shot, namespace.query)
            print(f"| {name} | {way} | {found} | {wanted} | {found.minus(wanted)} |", flush=True)


def measure(weights: WeightSet, tasks: int, way: int, shot: int = 1, query: int = 15) -> tuple[Evaluation, Evaluation]:
    """Return what `predict` and `evaluate` reach on the same tasks."""
    images, files = unseen_classes(weights)
    sampler = EpisodeSampler(images, way=way, shot=shot, query=query, seed=0, inductive=True)
    wanted = evaluate(weights.learner(), sampler, episodes=tasks, mc_samples=30, seed=0)
    accuracies = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for task in range(tasks):
            classifier = FewShotClassifier(weights, seed=task)
            write_task(folder, sampler, task, files)
            examples = read_examples(folder / "support", classifier.target(weights))
            result = predict_folder(classifier, weights, examples, open_folder(folder / "query"))
            accuracy = result.accuracy()
            assert accuracy is not None
            accuracies.append(accuracy)
            shutil.rmtree(folder / "support")
            shutil.rmtree(folder / "query")
    return Evaluation(accuracies), wanted


def write_task(folder: Path, sampler: EpisodeSampler, task: int, files: Callable[[str], list[bytes]]) -> None:
    """Write the images of a task as files: FOLDER/support/CLASS/1.png, FOLDER/query/CLASS/2.png."""
    indices = sampler.indices(0, task)
    for number, chosen in zip(indices.classes, indices.images, strict=True):
        name = sampler.images.class_names[number]
        contents = files(name)
        for place, image in enumerate(chosen):
            part = folder / ("support" if place < sampler.shot else "query") / name.replace("/", "-")
            part.mkdir(parents=True, exist_ok=True)
            (part / f"{image}.png").write_bytes(contents[image])


def unseen_classes(weights: WeightSet) -> tuple[ImageSet, Callable[[str], list[bytes]]]:
    """Return classes on which weights were not trained, and what gives the published files of each."""
    data = weights.config.data
    test = open_dataset(data["name"], **{name: value for name, value in data.items() if name != "name"}).test
    if data["name"] == "omniglot":
        wanted = [n for n, c in enumerate(test.class_names) if c.startswith("images_eval") and c.endswith(UPRIGHT)]
        tree = open_tree(data_directory() / "omniglot" / "images_evaluation.zip")
        return ClassSubset(test, wanted), lambda name: files_of(tree, name.removesuffix(UPRIGHT))
    if data["name"] in ("cifar_fs", "fc100"):
        tree = open_tree(data_directory() / "cifar100.zip")
        return test, lambda name: files_of(tree, name)
    raise SystemExit(f"{weights.name}: there are no files to write of {data['name']}")


def files_of(tree: FileTree, class_name: str) -> list[bytes]:
    """Return the contents of the image files of a class, in the order in which the data set numbers them."""
    names = [name for name in tree.names if f"/{name}".rpartition("/")[0].endswith(f"/{class_name}")]
    return [tree.read(name) for name in names]


if __name__ == "__main__":
    main()
