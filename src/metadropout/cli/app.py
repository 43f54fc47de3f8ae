"""`metadropout app`: the web page for drawing and dropping examples, on this machine only."""

from __future__ import annotations

import argparse
import errno
import socket
import threading
import webbrowser
from importlib.util import find_spec
from typing import Annotated, Any

from metadropout.cli.numbers import add_number
from metadropout.errors import ConfigError, MetadropoutError
from metadropout.options import Limits

HOST = "127.0.0.1"
PORT = 8321

EPILOG = """\
  metadropout app                                   opens the page, with the weights that come with the package
  metadropout app --weights mine.safetensors        with weights of your own ('metadropout export' makes them)
Nothing leaves this machine: the page asks no other server for anything and works without a network.
Ctrl-C stops it.
"""


def register(parser: argparse.ArgumentParser) -> None:
    """Give the command's parser its arguments."""
    parser.description = (
        "Starts a web page on this machine: draw characters or drop photos, one or a few examples of each "
        "class, and see at once what a new one is taken for; look into MAML and Meta-dropout side by side."
    )
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_number(
        parser,
        "--port",
        Annotated[int, Limits(0, 65535)],
        metavar="N",
        help=f"the page is http://{HOST}:N (default: {PORT}, or a free one if that is taken; 0: any free one)",
    )
    parser.add_argument("--no-browser", action="store_true", help="do not open the page in a browser")
    parser.add_argument(
        "--weights",
        nargs="+",
        metavar="WEIGHTS",
        help="names that 'metadropout weights' lists, or files (default: all that come with the package)",
    )
    parser.set_defaults(run=run_command)


def run_command(namespace: argparse.Namespace) -> int:
    """Serve the page until Ctrl-C, and return the exit status."""
    for package in ("starlette", "uvicorn", "sklearn"):
        if find_spec(package) is None:
            raise MetadropoutError(f"the page needs {package}: install it with `pip install 'metadropout[app]'`")
    import uvicorn  # noqa: PLC0415 (an extra)

    from metadropout.app.server import create_app  # noqa: PLC0415 (an extra)
    from metadropout.weights import available, load_weights  # noqa: PLC0415 (PyTorch takes seconds to load)

    names = namespace.weights or available()
    if not names:
        raise ConfigError(
            "no weights come with this package; name a file that 'metadropout export' has made: --weights FILE"
        )
    sets = [load_weights(name) for name in names]
    if len({one.name for one in sets}) < len(sets):
        raise ConfigError("--weights names two sets that are called the same; rename one of the files")
    app = create_app(sets)
    listening = listen(namespace.port)
    address = f"http://{HOST}:{listening.getsockname()[1]}"
    print(f"metadropout app: {address} (Ctrl-C stops it)", flush=True)
    if not namespace.no_browser:
        threading.Timer(0.5, webbrowser.open, [address]).start()
    try:
        uvicorn.Server(settings(app)).run(sockets=[listening])
    except KeyboardInterrupt:  # uvicorn has closed everything in order
        pass
    finally:
        listening.close()
    return 0


def settings(app: Any) -> Any:
    """Return uvicorn's settings for the page: few connections, nothing said of each."""
    import uvicorn  # noqa: PLC0415 (an extra)

    return uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        limit_concurrency=256,
        timeout_keep_alive=15,
        timeout_graceful_shutdown=2,
        h11_max_incomplete_event_size=32 * 1024,
        server_header=False,
        ws="none",
    )


def listen(port: int | None) -> socket.socket:
    """Take a port of this machine; the usual one or, if that is taken and none was asked for, any free one."""
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((HOST, PORT if port is None else port))
    except OSError as error:
        if error.errno not in (errno.EADDRINUSE, errno.EACCES):
            raise
        if port is not None:
            listening.close()
            raise ConfigError(f"--port {port} cannot be used: {error.strerror}; choose another, or 0") from None
        listening.bind((HOST, 0))
    listening.listen(128)
    listening.setblocking(False)
    return listening
