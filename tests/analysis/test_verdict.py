"""What a difference says, in words: ahead, behind, or not to be told apart."""

from __future__ import annotations

import pytest

from metadropout.analysis.verdict import points, told_apart, verdict
from metadropout.evaluation import Evaluation

CASES = {
    "ahead": ([0.1, 0.2], "+15.00 ± 6.93 points", "B is ahead of A on these 2 tasks: the whole interval lies above 0."),
    "behind": (
        [-0.1, -0.2],
        "−15.00 ± 6.93 points",
        "B is behind A on these 2 tasks: the whole interval lies below 0.",
    ),
    "neither": (
        [-0.1, 0.2],
        "+5.00 ± 20.79 points",
        "B and A cannot be told apart on these 2 tasks: the interval contains 0.",
    ),
    "equal": (
        [0.0, 0.0],
        "+0.00 ± 0.00 points",
        "B and A cannot be told apart on these 2 tasks: the interval contains 0.",
    ),
    "one": ([0.3], "+30.00 points on a single task", "A single task does not tell B from A."),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_difference_is_put_into_words(case: str) -> None:
    values, written, said = CASES[case]
    difference = Evaluation(values)
    assert points(difference) == written
    assert verdict("B", "A", difference) == said
    assert told_apart(difference) == (case in ("ahead", "behind"))
