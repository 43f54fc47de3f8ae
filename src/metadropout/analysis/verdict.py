"""What a difference between two methods on the same tasks says, in plain words."""

from __future__ import annotations

from metadropout.evaluation import Evaluation


def points(difference: Evaluation) -> str:
    """Write a difference of accuracies with its interval, in percentage points."""
    mean = f"{100 * difference.mean:+.2f}".replace("-", "\N{MINUS SIGN}")
    if len(difference.accuracies) == 1:
        return f"{mean} points on a single task"
    return f"{mean} ± {100 * difference.interval:.2f} points"


def told_apart(difference: Evaluation) -> bool:
    """Say whether the interval of a difference leaves out 0; a single task has no interval."""
    return len(difference.accuracies) > 1 and abs(difference.mean) > difference.interval


def verdict(name: str, base: str, difference: Evaluation) -> str:
    """Say in a sentence what a difference means.

    Args:
        name: of the method.
        base: of the one that it is held against.
        difference: how far the method is ahead, task by task.
    """
    tasks = len(difference.accuracies)
    if tasks == 1:
        return f"A single task does not tell {name} from {base}."
    if not told_apart(difference):
        return f"{name} and {base} cannot be told apart on these {tasks} tasks: the interval contains 0."
    side, where = ("ahead of", "above") if difference.mean > 0 else ("behind", "below")
    return f"{name} is {side} {base} on these {tasks} tasks: the whole interval lies {where} 0."
