import inspect
from typing import Any, get_args, get_type_hints

import docstring_parser
import pytest

from metadropout.data import DATASETS, open_dataset
from metadropout.errors import DataError


@pytest.mark.parametrize("name", DATASETS)
def test_every_option_is_keyword_only_json_and_explained(name: str) -> None:
    function = DATASETS[name]
    hints = get_type_hints(function)
    helped = {argument.arg_name for argument in docstring_parser.parse(function.__doc__ or "").params}
    for parameter in inspect.signature(function).parameters.values():
        assert parameter.kind is inspect.Parameter.KEYWORD_ONLY
        assert parameter.name in helped
        kinds: set[Any] = {*(get_args(hints[parameter.name]) or [hints[parameter.name]])}
        plain = {int, float, str, bool, type(None), list[str]}
        assert all(kind in plain or isinstance(kind, str | int) for kind in kinds), kinds
        assert parameter.default is None or isinstance(parameter.default, int | float | str | bool)


def test_a_data_set_opens_by_name_with_its_options() -> None:
    splits = open_dataset("glyphs", train_classes=7, validation_classes=3, test_classes=4)
    assert (len(splits.train), len(splits.test)) == (7, 4)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(
        DataError, match="no data set 'imagenet'; known are cifar_fs, fc100, folder, glyphs, miniimagenet, omniglot"
    ):
        open_dataset("imagenet")
