import pytest
from hypothesis import given
from hypothesis import strategies as st

from metadropout.data.class_lists import by_share, check_lists
from metadropout.errors import DataError


@given(
    n=st.integers(20, 200), validation=st.floats(0, 0.45), test=st.floats(0.05, 0.45), seed=st.integers(0, 2**32 - 1)
)
def test_shares_cover_all_classes_once_and_reproducibly(n: int, validation: float, test: float, seed: int) -> None:
    names = [f"class{i}" for i in range(n)]
    lists = by_share(names, validation, test, seed)
    assert sorted(name for part in lists.values() for name in part) == sorted(names)
    assert abs(len(lists["test"]) - n * test) <= 1
    assert abs(len(lists["validation"]) - n * validation) <= 1
    assert by_share(names, validation, test, seed) == lists


def test_a_split_by_share_never_changes() -> None:
    lists = by_share(list("abcdefghij"), 0.2, 0.3, seed=0)
    assert {part: "".join(names) for part, names in lists.items()} == {
        "train": "ciejb",
        "validation": "gh",
        "test": "daf",
    }


@pytest.mark.parametrize(("validation", "test"), [(0.5, 0.5), (-0.1, 0.2), (0.1, 0.0), (0.1, 1.0)])
def test_impossible_shares_are_refused(validation: float, test: float) -> None:
    with pytest.raises(DataError, match="leave no classes for some split"):
        by_share(list("abcdef"), validation, test, 0)


def test_all_classes_can_be_test_classes() -> None:
    lists = by_share(list("ab"), 0, 1, 0)
    assert (lists["train"], lists["validation"], sorted(lists["test"])) == ([], [], ["a", "b"])


def test_too_few_classes_are_refused() -> None:
    with pytest.raises(DataError, match="1 classes are too few"):
        by_share(["a"], 0.2, 0.2, 0)


def test_a_class_in_two_lists_is_refused() -> None:
    with pytest.raises(DataError, match="here: 'b' would be in more than one split"):
        check_lists({"train": ["a", "b"], "test": ["b"]}, ["a", "b"], "here")


def test_an_unknown_class_is_refused() -> None:
    with pytest.raises(DataError, match="here: there is no class 'c'"):
        check_lists({"train": ["a"], "test": ["c"]}, ["a", "b"], "here")
