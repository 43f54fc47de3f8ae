"""Options from signatures: a part's keyword-only arguments are its options, their docstring is the help.

A number says in its type which values it may have: `steps: Annotated[int, Limits(0, 1000)] = 5`.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import docstring_parser
from pydantic import BaseModel, BeforeValidator, ConfigDict, TypeAdapter, ValidationError, create_model
from pydantic_core import PydanticCustomError, core_schema

from metadropout.errors import ConfigError, shortened


@dataclass(frozen=True)
class Limits:
    """The smallest and the largest value that an option may have, for its type: `Annotated[float, Limits(0, 1)]`.

    They keep out what can only be a slip: a value that no machine or memory can hold, or that makes training diverge
    at once. Nothing that somebody may want to try is refused.
    """

    least: float
    most: float
    above: bool = False
    """Whether `least` itself is too small."""

    def __contains__(self, value: float) -> bool:
        return (self.least < value if self.above else self.least <= value) and value <= self.most

    def __str__(self) -> str:
        least, most = (f"{limit:d}" if isinstance(limit, int) else f"{limit:g}" for limit in (self.least, self.most))
        return f"above {least}, up to {most}" if self.above else f"from {least} to {most}"

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> core_schema.CoreSchema:
        return core_schema.no_info_wrap_validator_function(self._validate, handler(source))

    def _validate(self, value: Any, convert: Callable[[Any], Any]) -> Any:
        number = convert(value)
        if isinstance(value, bool) or number not in self:
            raise PydanticCustomError("limits", "it must be {limits}", {"limits": str(self)})
        return number


Seed = Annotated[int, Limits(0, 2**63 - 1)]
Way = Annotated[int, Limits(2, 10_000)]
Shot = Annotated[int, Limits(1, 10_000)]
Iterations = Annotated[int, Limits(1, 99_999_999)]  # the names of checkpoints have eight digits
Episodes = Annotated[int, Limits(1, 1_000_000)]
Steps = Annotated[int, Limits(0, 1000)]
Samples = Annotated[int, Limits(1, 10_000)]
Threads = Annotated[int, Limits(0, 1024)]
ImageSize = Annotated[int, Limits(1, 1024)]
Channels = Annotated[int, Limits(1, 4096)]
Share = Annotated[float, Limits(0, 1)]


@dataclass(frozen=True)
class Option:
    """One option of a part: what `--section.name` sets."""

    name: str
    type: Any
    default: Any
    help: str
    limits: Limits | None
    """Of the option, or of each value in its list."""
    checked: Any
    """The type with its limits, for pydantic."""
    owner: Callable[..., Any]
    """The function that declares it: the part itself, its constructor, or one that the constructor hands on to."""


@cache
def options_of(part: Callable[..., Any]) -> tuple[Option, ...]:
    """List the options of a class or function: its keyword-only parameters, with the help of its docstring.

    A constructor that ends in `**options` hands them on to its base class, and so has the options of that one, too.
    """
    found: dict[str, Option] = {}
    help_texts = _argument_help(part)
    for function in reversed(list(_functions_of(part))):
        plain, full = get_type_hints(function), get_type_hints(function, include_extras=True)
        for p in inspect.signature(function).parameters.values():
            if p.kind is inspect.Parameter.KEYWORD_ONLY:
                found[p.name] = Option(
                    p.name,
                    plain[p.name],
                    p.default,
                    help_texts.get(p.name, ""),
                    next(_limits_in(full[p.name]), None),
                    _with_choices_as_text(full[p.name]),
                    function,
                )
    return tuple(found.values())


def _functions_of(part: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """Yield what takes a part's options: a function, or a constructor and those that it hands options on to."""
    if not inspect.isclass(part):
        yield part
        return
    for owner in inspect.getmro(part):
        if constructor := vars(owner).get("__init__"):
            yield constructor
            kinds = [p.kind for p in inspect.signature(constructor).parameters.values()]
            if inspect.Parameter.VAR_KEYWORD not in kinds:
                return


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
        if not first["loc"]:
            raise ConfigError(f"{where}: the name of an option is no text: {first['input']!a}") from None
        name = str(first["loc"][0])
        if first["type"] == "extra_forbidden":
            names = ", ".join(option.name for option in known) or "none"
            raise ConfigError(
                f"{where}.{shortened(name)} is not an option here; the options of {where} are: {names}"
            ) from None
        if first["type"] == "missing":
            help_text = next(option.help for option in known if option.name == name)
            raise ConfigError(f"{where}.{name} is missing: it is needed here ({help_text})") from None
        raise ConfigError(_problem(f"{where}.{name}", error)) from None


def check_value(name: str, kind: Any, value: Any) -> Any:
    """Check a single value, such as an argument of a command.

    Args:
        name: what it is called in messages, such as "--episodes".
        kind: its type, which may have limits.
        value: what was given; a string is converted.
    """
    try:
        return TypeAdapter(kind).validate_python(value)
    except ValidationError as error:
        raise ConfigError(_problem(name, error)) from None


def _problem(name: str, error: ValidationError) -> str:
    first = error.errors()[0]
    if first["type"] == "limits":
        return f"{name} is {shortened(first['input'])}; {first['msg']}"
    given = first["input"]
    shown = f"'{shortened(given)}'" if isinstance(given, str) else shortened(given)
    return f"{name} is {shown}: {first['msg'].lower()}"


@cache
def _model(part: Callable[..., Any], skip: tuple[str, ...]) -> type[BaseModel]:
    fields: dict[str, Any] = {
        option.name: (option.checked, ... if option.default is inspect.Parameter.empty else option.default)
        for option in options_of(part)
        if option.name not in skip
    }
    return create_model("Options", __config__=ConfigDict(extra="forbid", protected_namespaces=()), **fields)


def _limits_in(kind: Any) -> Iterator[Limits]:
    for inner in get_args(kind):
        if isinstance(inner, Limits):
            yield inner
        else:
            yield from _limits_in(inner)


def _with_choices_as_text(kind: Any) -> Any:
    """Let a choice among numbers, or true, be given as text, as it comes from the command line; pydantic would not."""
    if get_origin(kind) is not Literal:
        return kind
    choices = {json.dumps(choice).strip('"'): choice for choice in get_args(kind)}
    return Annotated[
        kind, BeforeValidator(lambda value: choices.get(value, value) if isinstance(value, str) else value)
    ]


def _argument_help(part: Callable[..., Any]) -> dict[str, str]:
    """Collect the `Args:` sections of a part's docstring, and of its base classes' for inherited arguments."""
    texts: dict[str, str] = {}
    for owner in reversed(inspect.getmro(part)) if inspect.isclass(part) else [part]:
        for argument in docstring_parser.parse(owner.__doc__ or "").params:
            texts[argument.arg_name] = " ".join((argument.description or "").split())
    return texts
