"""The page's server, with the weights that come with the package."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

import metadropout as md

pytest.importorskip("starlette", reason="no test of the page: starlette is not installed")
pytest.importorskip("uvicorn", reason="no test of the page: uvicorn is not installed")

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
NAMES = ("omniglot-5way-1shot-maml", "omniglot-5way-1shot-metadropout", "cifar-fs-5way-1shot-maml")


@pytest.fixture(scope="session")
def weight_sets() -> list[Any]:
    return [md.load_weights(name) for name in NAMES]


@pytest.fixture(scope="session")
def app(weight_sets: list[Any]) -> Iterator[Any]:
    from metadropout.app.server import create_app  # noqa: PLC0415 (after the packages were found)

    made = create_app(weight_sets)
    yield made
    made.state.page.worker.close()


@pytest.fixture(scope="session")
def address(weight_sets: list[Any]) -> Iterator[str]:
    """A real server on a free port, run as the command runs it."""
    import uvicorn  # noqa: PLC0415

    from metadropout.app.server import create_app  # noqa: PLC0415
    from metadropout.cli.app import listen, settings  # noqa: PLC0415

    listening = listen(0)
    server = uvicorn.Server(settings(create_app(weight_sets)))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.02)
    yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    server.should_exit = True
    thread.join(timeout=20)
    listening.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="no browser test: playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("no browser test: there is no chromium on this machine")
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium has no sandbox for root
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield browser
        browser.close()
