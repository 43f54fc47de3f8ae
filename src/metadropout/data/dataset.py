"""What a data set is: a function that opens it, and what there is to say of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import update_wrapper
from pathlib import Path
from typing import Generic, ParamSpec

from metadropout.data.cache import Manifest
from metadropout.data.findings import Finding
from metadropout.data.images import Splits
from metadropout.data.sources import Source

Options = ParamSpec("Options")


class DataSet(Generic[Options]):
    """The function that opens a data set, and what is known of it; see `data_set`."""

    def __init__(
        self,
        function: Callable[Options, Splits],
        *,
        title: str,
        citation: str,
        prepared_as: str,
        find_in: Callable[[Path], Source | None] | None,
        absent: str,
        identify: Callable[[Manifest], Iterable[Finding]] | None,
    ) -> None:
        self.function, self.title, self.citation = function, title, citation
        self.prepared_as, self.find_in, self.absent, self.identify = prepared_as, find_in, absent, identify
        update_wrapper(self, function)  # its signature and docstring say which options there are

    def __call__(self, *arguments: Options.args, **options: Options.kwargs) -> Splits:
        return self.function(*arguments, **options)


def data_set(
    title: str,
    *,
    citation: str = "",
    prepared_as: str = "",
    find_in: Callable[[Path], Source | None] | None = None,
    absent: str = "not here",
    identify: Callable[[Manifest], Iterable[Finding]] | None = None,
) -> Callable[[Callable[Options, Splits]], DataSet[Options]]:
    """Return a decorator for the function that opens a data set; its keyword-only parameters are the options.

    Args:
        title: what the data set is called in reports.
        citation: who described it, as in "Lake et al., 2015".
        prepared_as: how the names of its prepared files begin; empty for one that needs no files.
        find_in: looks for its files in a directory; None for files that only the user can name.
        absent: what to say where its files are not there.
        identify: compares what was prepared with what is published.
    """
    return lambda function: DataSet(
        function,
        title=title,
        citation=citation,
        prepared_as=prepared_as,
        find_in=find_in,
        absent=absent,
        identify=identify,
    )
