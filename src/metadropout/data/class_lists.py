"""Which classes belong to which split: shipped lists, explicit lists, and shares of all classes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources

import numpy as np

from metadropout.errors import DataError

SplitLists = Mapping[str, Sequence[str]]
"""The names of the classes of "train", "validation" and "test"; "validation" may be empty or absent."""


def published(name: str) -> SplitLists:
    """Return a class list that is part of the package.

    Args:
        name: "cifar_fs" or "fc100".
    """
    text = resources.files("metadropout.data").joinpath("splits", f"{name}.json").read_text(encoding="utf-8")
    lists = json.loads(text)
    return {"train": lists["train"], "validation": lists["val"], "test": lists["test"]}


def by_share(classes: Sequence[str], validation: float, test: float, seed: int) -> SplitLists:
    """Shuffle the classes with a seed and give each split its share of them.

    Args:
        classes: all names, in an order that does not depend on the machine.
        validation: share of the validation classes, from 0 to 1.
        test: share of the test classes; 1 makes all of them test classes.
        seed: of the shuffle.
    """
    only_test = (validation, test) == (0, 1)
    if not only_test and not (0 <= validation < 1 and 0 < test < 1 and validation + test < 1):
        raise DataError(
            f"validation_share {validation} and test_share {test} leave no classes for some split; they have to be "
            "positive and below 1 together (or 0 and 1, for testing only)"
        )
    # RandomState, because its stream is frozen: the split is the same with every version of NumPy.
    shuffled = [classes[i] for i in np.random.RandomState(seed).permutation(len(classes))]
    n_test, n_validation = max(1, round(len(classes) * test)), round(len(classes) * validation)
    n_train = len(classes) - n_test - n_validation
    if n_train < 1 and not only_test:
        raise DataError(f"{len(classes)} classes are too few to split into training, validation and test classes")
    return {
        "train": shuffled[:n_train],
        "validation": shuffled[n_train : n_train + n_validation],
        "test": shuffled[n_train + n_validation :],
    }


def check_lists(lists: SplitLists, known: Sequence[str], where: str) -> None:
    """Refuse lists that name a class twice, or one that does not exist.

    Raises:
        DataError: naming the classes.
    """
    names = [name for part in lists.values() for name in part]
    if missing := sorted(set(names) - set(known)):
        raise DataError(f"{where}: there is no class {listed(map(repr, missing), 5)}; correct the list of classes")
    if twice := sorted(name for name, count in Counter(names).items() if count > 1):
        raise DataError(
            f"{where}: {listed(map(repr, twice), 5)} would be in more than one split; test classes must not be seen in "
            "training, so list each class once"
        )


def listed(names: Iterable[str], most: int = 10) -> str:
    """Return the first of some names for a message, and how many more there are."""
    names = [name.encode(errors="backslashreplace").decode() for name in names]  # file names need not be text
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def counted(count: int, what: str, several: str = "") -> str:
    """Return a number of things in words: "1 file", "3 files"."""
    return f"{count} {what if count == 1 else several or f'{what}s'}"


def is_text(name: str) -> bool:
    """Whether a file's name can be written down: on some systems names are any bytes, not UTF-8."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
