"""Fixtures of the data tests: a data directory and a cache of their own, made images, and a local web server."""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

REAL_DATA = os.environ.get("METADROPOUT_DATA")


@pytest.fixture(autouse=True)
def data_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty data directory; no test sees or changes the user's."""
    home = tmp_path / "data"
    home.mkdir()
    monkeypatch.setenv("METADROPOUT_DATA", str(home))
    monkeypatch.setenv("METADROPOUT_CACHE", str(tmp_path / "cache"))
    return home


@pytest.fixture
def cache_home(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture(scope="session")
def real_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("prepared")


@pytest.fixture
def real_data(real_cache: Path, data_home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The real archives, where METADROPOUT_DATA has them; prepared once for all tests."""
    if not REAL_DATA or not (Path(REAL_DATA) / "omniglot").exists() or not (Path(REAL_DATA) / "cifar100.zip").exists():
        pytest.skip("METADROPOUT_DATA does not name a folder with omniglot/ and cifar100.zip")
    monkeypatch.setenv("METADROPOUT_DATA", REAL_DATA)
    monkeypatch.setenv("METADROPOUT_CACHE", str(real_cache))
    return Path(REAL_DATA)


@pytest.fixture
def png() -> Callable[..., bytes]:
    """Makes the bytes of an image from a seed: `png(seed, size=(8, 8), mode="RGB", format="PNG")`."""

    def make(seed: int, size: tuple[int, int] = (8, 8), mode: str = "RGB", format: str = "PNG") -> bytes:
        pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
        content = io.BytesIO()
        Image.fromarray(pixels).convert(mode).save(content, format)
        return content.getvalue()

    return make


@pytest.fixture
def write_classes(png: Callable[..., bytes]) -> Callable[..., Path]:
    """Writes `root/<class>/<image>.png`: `write_classes(root, {"cat": 3, "dog": 2}, size=(8, 8))`."""

    def write(root: Path, classes: dict[str, int], size: tuple[int, int] = (8, 8), mode: str = "RGB") -> Path:
        for number, (name, count) in enumerate(classes.items()):
            folder = root / name
            folder.mkdir(parents=True, exist_ok=True)
            for i in range(count):
                (folder / f"{i:04d}.png").write_bytes(png(1000 * number + i, size, mode))
        return root

    return write


class Server:
    """A web server on this machine whose manners a test decides."""

    def __init__(self) -> None:
        self.content = b""
        self.honours_ranges = True
        self.break_after: list[int | None] = []
        """For each coming request: how many bytes to send before hanging up; None sends everything."""
        self.ranges: list[str | None] = []
        """The Range header of each request so far."""
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                server._answer(self)

            def log_message(self, *_: object) -> None:
                pass

        self._httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._httpd.server_address[1]}/file.zip"
        self._thread = threading.Thread(target=self._httpd.serve_forever, args=(0.02,))
        self._thread.start()

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        wanted = request.headers.get("Range")
        self.ranges.append(wanted)
        if request.path.endswith("missing.zip"):
            request.send_error(404)
            return
        start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted and self.honours_ranges else 0
        if start and start >= len(self.content):
            request.send_error(416)
            return
        body = self.content[start:]
        request.send_response(206 if start else 200)
        request.send_header("Content-Length", str(len(body)))
        if start:
            request.send_header("Content-Range", f"bytes {start}-{len(self.content) - 1}/{len(self.content)}")
        request.end_headers()
        limit = self.break_after.pop(0) if self.break_after else None
        request.wfile.write(body if limit is None else body[:limit])

    def close(self) -> None:
        self._httpd.shutdown()
        self._thread.join()
        self._httpd.server_close()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    server = Server()
    yield server
    server.close()
