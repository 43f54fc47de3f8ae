"""`metadropout app` in a process of its own: it serves until Ctrl-C, and says what is wrong before it begins."""

from __future__ import annotations

import json
import re
import signal
import socket
from pathlib import Path
from urllib.request import urlopen

import pytest
from toys import finish, start

from metadropout.cli import main

pytest.importorskip("starlette", reason="no test of the page: starlette is not installed")
uvicorn = pytest.importorskip("uvicorn", reason="no test of the page: uvicorn is not installed")


def test_it_serves_the_weights_of_the_package_until_ctrl_c() -> None:
    process = start("app", "--port", "0", "--no-browser")
    try:
        assert process.stdout is not None
        said = process.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1:\d+", said)
        assert found, said
        with urlopen(f"{found[0]}/api/weights", timeout=60) as answer:
            names = [one["name"] for one in json.load(answer)["weights"]]
        process.send_signal(signal.SIGINT)
        _, errors = finish(process, 60)
    finally:
        process.kill()
    assert "omniglot-5way-1shot-metadropout" in names
    assert (process.returncode, errors) == (0, "")


def test_what_cannot_be_served_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["app", "--port", str(port), "--no-browser"]) == 1
    assert f"--port {port} cannot be used" in capsys.readouterr().err
    assert main(["app", "--weights", "none", "--no-browser"]) == 1
    assert "there are no weights 'none'" in capsys.readouterr().err
    twice = ["omniglot-5way-1shot-maml"] * 2
    assert main(["app", "--no-browser", "--weights", *twice]) == 1
    assert "called the same" in capsys.readouterr().err
    assert main(["app", "--port", "70000"]) == 1
    assert "from 0 to 65535" in capsys.readouterr().err


def test_the_browser_opens_unless_told_not_to(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []

    class Timer:
        def __init__(self, seconds: float, action: object, arguments: list[str]) -> None:
            opened.extend(arguments)

        def start(self) -> None:
            pass

    monkeypatch.setattr("metadropout.cli.app.threading.Timer", Timer)
    monkeypatch.setattr(uvicorn.Server, "run", lambda self, sockets: None)
    for options in ([], ["--no-browser"]):
        assert main(["app", "--port", "0", "--weights", "omniglot-5way-1shot-maml", *options]) == 0
    assert len(opened) == 1
    assert opened[0].startswith("http://127.0.0.1:")
