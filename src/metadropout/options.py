"""Options from signatures: a part's keyword-only arguments are its options, their docstring is the help."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, get_type_hints

import docstring_parser
from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from metadropout.errors import ConfigError


@dataclass(frozen=True)
class Option:
    """One option of a part: what `--section.name` sets."""

    name: str
    type: Any
    default: Any
    help: str


@cache
def options_of(part: Callable[..., Any]) -> tuple[Option, ...]:
    """List the options of a class or function: its keyword-only parameters, with the help of its docstring."""
    hints = get_type_hints(part.__init__ if inspect.isclass(part) else part)
    help_texts = _argument_help(part)
    return tuple(
        Option(p.name, hints[p.name], p.default, help_texts.get(p.name, ""))
        for p in inspect.signature(part).parameters.values()
        if p.kind is inspect.Parameter.KEYWORD_ONLY
    )


def check_options(
    part: Callable[..., Any], given: dict[str, Any], where: str, skip: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Check given values against a part's options and return all of them, defaults included.

    Args:
        part: the class or function that has the options.
        given: values by option name; strings are converted.
        where: what the options are called in messages, such as "learner".
        skip: options that are not the user's to set.
    """
    known = [option for option in options_of(part) if option.name not in skip]
    model = _model(part, skip)
    try:
        return model(**given).model_dump(mode="json")
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        if first["type"] == "extra_forbidden":
            names = ", ".join(option.name for option in known) or "none"
            raise ConfigError(f"{where}.{name} is not an option here; the options of {where} are: {names}") from None
        if first["type"] == "missing":
            help_text = next(option.help for option in known if option.name == name)
            raise ConfigError(f"{where}.{name} is missing: it is needed here ({help_text})") from None
        raise ConfigError(f"{where}.{name} is {first['input']!r}: {first['msg'].lower()}") from None


@cache
def _model(part: Callable[..., Any], skip: tuple[str, ...]) -> type[BaseModel]:
    fields: dict[str, Any] = {
        option.name: (option.type, ... if option.default is inspect.Parameter.empty else option.default)
        for option in options_of(part)
        if option.name not in skip
    }
    return create_model("Options", __config__=ConfigDict(extra="forbid", protected_namespaces=()), **fields)


def _argument_help(part: Callable[..., Any]) -> dict[str, str]:
    """Collect the `Args:` sections of a part's docstring, and of its base classes' for inherited arguments."""
    texts: dict[str, str] = {}
    for owner in reversed(inspect.getmro(part)) if inspect.isclass(part) else [part]:
        for argument in docstring_parser.parse(owner.__doc__ or "").params:
            texts[argument.arg_name] = " ".join((argument.description or "").split())
    return texts
