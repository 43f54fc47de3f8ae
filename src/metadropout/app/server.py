"""The server behind the page: a handful of questions, answered as JSON."""

from __future__ import annotations

import asyncio
import base64
import io
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from PIL import Image, ImageOps
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from metadropout.app import asked
from metadropout.app.asked import BoundaryRequest, ClassifyRequest, LookRequest, TaskRequest
from metadropout.app.guard import Guard
from metadropout.app.problems import RequestError
from metadropout.app.tasks import Model, Task, Tasks, as_images
from metadropout.app.worker import Ticket, Worker
from metadropout.classify.pictures import Target, to_bytes
from metadropout.data.decode import open_image
from metadropout.data.glyphs import SIZE, Glyphs
from metadropout.data.images import UInt8Array
from metadropout.data.trees import UnreadableError
from metadropout.errors import MetadropoutError
from metadropout.weights import WeightSet

STATIC = Path(__file__).parent / "static"
T = TypeVar("T")
Endpoint = Callable[["Page", Request], Awaitable[Response]]

FIRST_UNSEEN = 10_000_000
"""Number of the first glyph that no weights were trained on: recipes number theirs from 0 to three millions at most."""
UNSEEN = 100_000
OTHER_HANDS = 8
"""How many more images of a glyph there are, to test with."""
PREVIEW = 160
"""Pixels of the picture that stands for a photo on the page."""


class Page:
    """What the page can ask.

    Args:
        weights: what it offers.
    """

    def __init__(self, weights: Sequence[WeightSet]) -> None:
        self.models = {one.name: Model(one) for one in weights}
        self.tasks = Tasks()
        self.worker = Worker(self._warm_up)
        self.decoding = asyncio.Semaphore(2)  # a photo of 50 megapixels takes 200 MB
        self.uploads = asyncio.Semaphore(8)

    def _warm_up(self) -> None:
        """Adapt once, because kernels are built and loaded on first use; by one thread, to leave the user the rest."""
        torch.set_num_threads(1)
        for model in self.models.values():
            shape = model.weights.image_shape
            blank = Task(((bytes(shape.channels * shape.height * shape.width),),) * 5, shape)
            with suppress(MetadropoutError):  # weights that cannot do this say so when they are asked
                self.tasks.adapted(model, blank, samples=10, steps=1, ticket=Ticket(lambda ticket: None))

    def model(self, name: str) -> Model:
        """Return weights by their name."""
        if name not in self.models:
            raise RequestError(404, "weights", f"no weights '{name[:60]}' here; known are: {', '.join(self.models)}")
        return self.models[name]

    async def list_models(self, request: Request) -> Response:
        """List the weights, and what the page has to know of each."""
        listed = []
        for name, model in self.models.items():
            card, shape = model.weights.card, model.weights.image_shape
            result = card.result("inductive")
            listed.append(
                {
                    "name": name,
                    "method": card.method,
                    "data": card.data,
                    "summary": model.weights.summary,
                    "way": card.way,
                    "shot": card.shot,
                    "accuracy": None if result is None else str(result),
                    "drawings": card.drawings,
                    "shape": list(shape),
                    "steps": model.steps,
                    "adapts": model.adapts_by_steps,
                    "noise": model.draws_noise,
                }
            )
        limits = {
            "classes": asked.MAX_CLASSES,
            "examples": asked.MAX_EXAMPLES,
            "images": asked.MAX_IMAGES,
            "queries": asked.MAX_QUERIES,
            "photo_bytes": asked.MAX_PHOTO,
            "work": asked.MAX_WORK,
        }
        return JSONResponse({"weights": listed, "limits": limits})

    async def draw_glyphs(self, request: Request) -> Response:
        """Draw invented characters that no weights have seen: as strokes, to be shown, and as images."""
        count = _number(request, "classes", 1, asked.MAX_CLASSES)
        examples = _number(request, "examples", 1, 5)
        seed = _number(request, "seed", 0, 2**31 - 1)
        numbers = np.random.default_rng(seed).choice(UNSEEN, count, replace=False)
        return JSONResponse({"glyphs": await asyncio.to_thread(_glyphs, numbers.tolist(), examples)})

    async def prepare_photo(self, request: Request) -> Response:
        """Decode a photo and bring it to the shape of weights."""
        model = self.model(request.query_params.get("weights", ""))
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/octet-stream" and not kind.startswith("image/"):
            raise RequestError(415, "type", "send the file itself, as application/octet-stream")
        target = Target(model.weights.image_shape, model.weights.card.drawings)
        async with self.uploads:
            content = await asked.read_body(request, asked.MAX_PHOTO)
            try:
                async with self.decoding:
                    return JSONResponse(await asyncio.to_thread(_prepare, content, target))
            except UnreadableError as error:
                raise RequestError(422, "photo", f"this file cannot be used: {error}") from None

    async def classify(self, request: Request) -> Response:
        """Adapt to examples, unless that was done before, and give the probabilities of new images."""
        body = await asked.read_json(request, ClassifyRequest)
        task = self._task(body)
        queries = asked.decoded(body.queries, self._shape(body), "queries")

        def work(ticket: Ticket) -> dict[str, Any]:
            answers = [self._answer(name, task, body, queries, ticket) for name in body.weights]
            return {"task": task.name, "answers": answers}

        return await self._compute(request, f"{body.visitor}/classify", work)

    async def boundary(self, request: Request) -> Response:
        """Say where images of two classes lie about the decision boundaries of models."""
        body = await asked.read_json(request, BoundaryRequest)
        task, shape = self._task(body), self._shape(body)
        first, second = body.pair
        if not (0 <= first < len(task.classes) and 0 <= second < len(task.classes) and first != second):
            raise RequestError(400, "pair", f"pair must be two different classes from 0 to {len(task.classes) - 1}")
        others = [asked.decoded(images, shape, f"others.{n}") for n, images in enumerate(body.others)] or [(), ()]
        if len(others) != 2:
            raise RequestError(400, "others", "others must be a list of images for each of the two classes")
        mine = None if body.mine is None else as_images(asked.decoded([body.mine], shape, "mine"), shape)

        def work(ticket: Ticket) -> dict[str, Any]:
            from metadropout.app import seeing  # noqa: PLC0415 - scikit-learn takes a second to load

            x, y = task.tensors(body.pair)
            tests, labels = [], []
            for number, images in enumerate(others):
                found = as_images(images, shape) if images else seeing.moved_copies(x[y == number])
                tests.append(found)
                labels.append(torch.full((len(found),), number))
            panels = []
            for name in body.weights:
                ticket.check()
                learner = {name: self._look_into(name, body)}
                query = torch.cat(tests), torch.cat(labels)
                panels += seeing.boundary(learner, (x, y), query, mine, body.samples)
            return {"task": task.name, "panels": panels}

        return await self._compute(request, f"{body.visitor}/boundary", work)

    async def multipliers(self, request: Request) -> Response:
        """Give the learned multipliers over the examples, layer by layer."""
        return await self._look(request, "multipliers")

    async def features(self, request: Request) -> Response:
        """Give samples of the perturbed features of an example."""
        return await self._look(request, "features")

    async def _look(self, request: Request, what: str) -> Response:
        body = await asked.read_json(request, LookRequest)
        task = self._task(body)
        if body.image >= task.images:
            raise RequestError(400, "image", f"image is {body.image}, but there are {task.images} examples")

        def work(ticket: Ticket) -> dict[str, Any]:
            from metadropout.app import seeing  # noqa: PLC0415 - scikit-learn takes a second to load

            x, _ = task.tensors()
            seen = []
            for name in body.weights:
                ticket.check()
                learner = self._look_into(name, body)
                if what == "multipliers":
                    seen.append(seeing.multipliers(name, learner, x))
                else:
                    seen.append(seeing.sampled_features(name, learner, x, body.image))
            return {"task": task.name, "models": seen}

        return await self._compute(request, f"{body.visitor}/{what}", work)

    def _look_into(self, name: str, body: TaskRequest) -> Any:
        model = self.model(name)
        return model.with_steps(model.steps if body.steps is None else body.steps)

    def _shape(self, body: TaskRequest) -> Any:
        shapes = {self.model(name).weights.image_shape for name in body.weights}
        if len(shapes) > 1:
            raise RequestError(400, "weights", "these weights take images of different sizes: choose others")
        return shapes.pop()

    def _task(self, body: TaskRequest) -> Task:
        """Return the task of a request: the one that it brings, or one that was brought before."""
        shape = self._shape(body)
        if (body.task is None) == (body.classes is None):
            raise RequestError(400, "task", "give either the examples, as classes, or the name of a task")
        if body.classes is None:
            task = self.tasks.task(body.task or "")
            if task.shape != shape:
                raise RequestError(400, "weights", "these weights take images of another size: send the examples again")
        else:
            asked.check_classes(body.classes)
            classes = [asked.decoded(images, shape, f"classes.{n}") for n, images in enumerate(body.classes)]
            task = Task(tuple(classes), shape)
            self.tasks.keep(task)
        for name in body.weights:
            model = self.model(name)
            steps = model.steps if body.steps is None else body.steps
            asked.check_work(task.images, model.learner.samples_used(body.samples), steps)
        return task

    def _answer(
        self, name: str, task: Task, body: ClassifyRequest, queries: Sequence[bytes], ticket: Ticket
    ) -> dict[str, Any]:
        model, start = self.model(name), time.perf_counter()
        ticket.check()
        try:
            classifier, known = self.tasks.adapted(model, task, samples=body.samples, steps=body.steps, ticket=ticket)
        except MetadropoutError as error:
            raise RequestError(400, "weights", str(error)) from None
        adapted = time.perf_counter()
        probabilities: list[list[float]] = []
        if queries:
            with torch.no_grad():
                found = classifier(as_images(queries, task.shape)).double().exp()
            if not found.isfinite().all():
                raise RequestError(422, "diverged", f"{name}: adapting diverged; take fewer steps or other examples")
            probabilities = [[round(p, 5) for p in row] for row in found.tolist()]
        return {
            "weights": name,
            "probabilities": probabilities,
            "samples": model.learner.samples_used(body.samples),
            "known": known,
            "adapt_ms": round(1000 * (adapted - start), 1),
            "answer_ms": round(1000 * (time.perf_counter() - adapted), 1),
        }

    async def _compute(self, request: Request, visitor: str, work: Callable[[Ticket], Mapping[str, Any]]) -> Response:
        """Compute an answer; not if its visitor leaves before."""
        computing = asyncio.ensure_future(self.worker.run(visitor, work))
        leaving = asyncio.ensure_future(_left(request))
        try:
            await asyncio.wait({computing, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not computing.done():
                raise RequestError(499, "left", "the visitor has left")
            return JSONResponse(computing.result())
        finally:
            computing.cancel()
            leaving.cancel()


async def _left(request: Request) -> None:
    """Wait until the visitor closes the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _number(request: Request, name: str, least: int, most: int) -> int:
    text = request.query_params.get(name, str(least))
    if not (text.isascii() and text.isdigit() and len(text) < 12 and least <= int(text) <= most):
        raise RequestError(400, name, f"{name} must be a whole number from {least} to {most}")
    return int(text)


def _glyphs(numbers: Sequence[int], examples: int) -> list[dict[str, Any]]:
    hands = np.arange(examples + OTHER_HANDS)
    drawn = []
    for number in numbers:
        glyph = Glyphs(FIRST_UNSEEN + number, 1, images_per_class=len(hands))
        images = glyph.gather(np.zeros_like(hands), hands)
        strokes = glyph.strokes(0)
        each = [
            {
                "strokes": np.round(points.astype(np.float64) / SIZE, 4).tolist(),
                "image": base64.b64encode(image.tobytes()).decode(),
            }
            for points, image in zip(strokes, images, strict=True)
        ]
        drawn.append({"name": glyph.class_names[0], "examples": each[:examples], "others": each[examples:]})
    return drawn


def _encoded(array: UInt8Array) -> str:
    return base64.b64encode(array.tobytes()).decode()


def _prepare(content: bytes, target: Target) -> dict[str, Any]:
    image = open_image(content)
    array = to_bytes(image, target)
    small = ImageOps.fit(image.convert("RGB"), (PREVIEW, PREVIEW), method=Image.Resampling.LANCZOS)
    file = io.BytesIO()
    small.save(file, "PNG")
    return {
        "image": _encoded(array),
        "preview": "data:image/png;base64," + base64.b64encode(file.getvalue()).decode(),
        "width": image.width,
        "height": image.height,
    }


def _answering(endpoint: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    """Turn errors of a request into answers that say what is wrong."""

    @wraps(endpoint)
    async def answer(request: Request) -> Response:
        try:
            return await endpoint(request)
        except RequestError as error:
            return error.response()
        except ValidationError as error:
            return RequestError(400, "field", str(error)).response()

    return answer


async def _http_error(request: Request, error: Exception) -> Response:
    """Answer a wrong address or method as JSON, too."""
    assert isinstance(error, HTTPException)
    said = {404: "there is no such page", 405: "this address takes another method"}
    answer = RequestError(error.status_code, "address", said.get(error.status_code, error.detail)).response()
    answer.headers.update(error.headers or {})
    return answer


async def _failure(request: Request, error: Exception) -> Response:
    """Answer a mistake of the program without telling what it was about; the log has it."""
    return RequestError(500, "failure", "something went wrong here; the terminal of the server says what").response()


def create_app(weights: Sequence[WeightSet]) -> Starlette:
    """Make the web application.

    Args:
        weights: what the page offers, in this order.
    """
    page = Page(weights)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(page.worker.close)

    async def index(request: Request) -> Response:
        return FileResponse(STATIC / "index.html")

    routes = [
        Route("/", index),
        Mount("/static", StaticFiles(directory=STATIC)),
        Route("/api/weights", _answering(page.list_models)),
        Route("/api/glyphs", _answering(page.draw_glyphs)),
        Route("/api/photo", _answering(page.prepare_photo), methods=["POST"]),
        Route("/api/classify", _answering(page.classify), methods=["POST"]),
        Route("/api/boundary", _answering(page.boundary), methods=["POST"]),
        Route("/api/multipliers", _answering(page.multipliers), methods=["POST"]),
        Route("/api/features", _answering(page.features), methods=["POST"]),
    ]
    app = Starlette(
        routes=routes,
        middleware=[Middleware(Guard)],
        exception_handlers={HTTPException: _http_error, Exception: _failure},
        lifespan=lifespan,
    )
    app.state.page = page
    return app
