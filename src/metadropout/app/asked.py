"""What requests ask for: their bodies, read within limits and checked field by field."""

from __future__ import annotations

import asyncio
import base64
import binascii
from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import ClientDisconnect, Request

from metadropout.app.problems import RequestError
from metadropout.data import ImageShape
from metadropout.runs.reading import described

MAX_JSON = 8 * 2**20
MAX_PHOTO = 25 * 2**20
"""Bytes of a body."""
READING_SECONDS = 30.0

MAX_CLASSES, MAX_EXAMPLES, MAX_IMAGES = 20, 20, 100
"""Classes, examples of each, and examples of all together."""
MAX_QUERIES = 64
MAX_SAMPLES, MAX_STEPS = 100, 20
MAX_WORK = 20_000
"""Images that pass through the network while a model adapts: examples x noise samples x steps."""

Encoded = Annotated[str, Field(max_length=2**18)]
Model = TypeVar("Model", bound=BaseModel)


class TaskRequest(BaseModel):
    """What all questions have in common: weights, how to adapt them, and examples or the name of a task."""

    model_config = ConfigDict(strict=True, extra="forbid")

    visitor: Annotated[str, Field(min_length=1, max_length=64)]
    """Whose newer requests take the place of older ones."""
    weights: Annotated[list[str], Field(min_length=1, max_length=2)]
    samples: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] = 10
    steps: Annotated[int, Field(ge=0, le=MAX_STEPS)] | None = None
    task: Annotated[str, Field(max_length=64)] | None = None
    """The name of a task that an earlier answer gave."""
    classes: Annotated[list[Annotated[list[Encoded], Field(max_length=MAX_EXAMPLES)]], Field(max_length=200)] | None = (
        None
    )
    """Of each class its examples: bytes in the shape of the weights, as base64."""


class ClassifyRequest(TaskRequest):
    """Which class new images are of."""

    queries: Annotated[list[Encoded], Field(max_length=MAX_QUERIES)] = []


class BoundaryRequest(TaskRequest):
    """Where images of two classes lie about the decision boundary."""

    pair: tuple[int, int] = (0, 1)
    others: Annotated[list[Annotated[list[Encoded], Field(max_length=MAX_QUERIES)]], Field(max_length=2)] = []
    """More images of each of the two classes, for testing."""
    mine: Encoded | None = None
    """A new image of unknown class."""


class LookRequest(TaskRequest):
    """What happens to one of the examples inside of a network."""

    image: Annotated[int, Field(ge=0, lt=MAX_IMAGES)] = 0


async def read_body(request: Request, limit: int) -> bytes:
    """Read a body of limited size, in limited time.

    Raises:
        RequestError: as soon as it is too large; the rest is not read.
    """
    too_large = RequestError(413, "size", f"the body is larger than the {limit // 2**20} MB allowed; send less at once")
    declared = request.headers.get("content-length", "0")
    if not declared.isascii() or not declared.isdigit() or int(declared) > limit:
        raise too_large
    content = bytearray()
    try:
        async with asyncio.timeout(READING_SECONDS):
            async for part in request.stream():
                content += part
                if len(content) > limit:
                    raise too_large
    except TimeoutError:
        raise RequestError(408, "slow", f"the body did not arrive within {READING_SECONDS:.0f} seconds") from None
    except ClientDisconnect:
        raise RequestError(400, "body", "the body ended too early") from None
    return bytes(content)


async def read_json(request: Request, model: type[Model]) -> Model:
    """Read a body of JSON and check it."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise RequestError(415, "type", "send the body as application/json")
    content = await read_body(request, MAX_JSON)
    try:
        return model.model_validate_json(content)
    except ValidationError as error:
        raise RequestError(400, "field", described(error)) from None
    except RecursionError:
        raise RequestError(400, "field", "the body is nested too deeply") from None


def decoded(images: list[str], shape: ImageShape, where: str) -> tuple[bytes, ...]:
    """Return images in base64 as bytes, which must be as many as the weights take."""
    found = []
    wanted = shape.channels * shape.height * shape.width
    for number, text in enumerate(images):
        try:
            content = base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError):
            raise RequestError(400, "image", f"{where}.{number}: is not base64") from None
        if len(content) != wanted:
            raise RequestError(
                400,
                "image",
                f"{where}.{number}: has {len(content)} bytes, but these weights take images of {shape.channels} x "
                f"{shape.height} x {shape.width} = {wanted}",
            )
        found.append(content)
    return tuple(found)


def check_classes(classes: list[list[str]]) -> None:
    """Refuse examples from which nothing can be learned, or too many."""
    if not 2 <= len(classes) <= MAX_CLASSES:
        raise RequestError(
            400, "classes", f"there are {len(classes)} classes with examples; there must be 2 to {MAX_CLASSES}"
        )
    for number, images in enumerate(classes):
        if not images:
            raise RequestError(400, "classes", f"class {number + 1} has no example; give it one, or leave it out")
    if (count := sum(map(len, classes))) > MAX_IMAGES:
        raise RequestError(400, "classes", f"there are {count} examples; {MAX_IMAGES} are allowed")


def check_work(images: int, samples: int, steps: int) -> None:
    """Refuse what would keep the machine busy for too long."""
    if images * samples * steps > MAX_WORK:
        fits = max(1, MAX_WORK // (images * max(1, steps)))
        raise RequestError(
            400,
            "work",
            f"{images} examples x {samples} samples x {steps} steps would take too long; at most {fits} samples",
        )
