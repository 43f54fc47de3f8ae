"""Downloads that resume where they broke off, and count only once their checksum is right.

Not pooch: it starts a broken download over, takes any number of bytes, and lets two processes fetch the same file.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from metadropout.data.locks import exclusive
from metadropout.data.progress import progress_bar
from metadropout.data.sources import file_digest
from metadropout.errors import DataError

TIMEOUT = 30.0
ATTEMPTS = 5
MAX_BYTES = 4 * 2**30
_PIECE = 2**16


def download(url: str, path: Path, md5: str) -> None:
    """Fetch a file unless it is there already.

    What has arrived is kept in `path.part` until all of it has. A later call goes on from there, if the server lets
    it, and otherwise starts over.

    Args:
        url: where from, http or https.
        path: where to.
        md5: the checksum it has to have.

    Raises:
        DataError: if it cannot be fetched or has other contents; `path` does not exist then.
    """
    part = path.with_name(f"{path.name}.part")
    by_hand = f"or download {url} in another way and put it at {path}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with exclusive(path.with_name(f"{path.name}.lock")):
            if path.exists():  # another process has fetched it meanwhile
                return
            _fetch(url, part)
            if (actual := file_digest(part, "md5")) != md5:
                part.unlink()
                raise DataError(f"{url}: what was sent has the MD5 {actual} instead of {md5}; try again, {by_hand}")
            os.replace(part, path)
    except (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError) as error:
        reason = getattr(error, "reason", None) or error
        kept = f"; {part.stat().st_size} bytes are kept and will be resumed" if part.exists() else ""
        raise DataError(f"{url}: cannot be downloaded ({reason}){kept}; run the command again, {by_hand}") from error
    except OSError as error:
        raise DataError(
            f"cannot write {error.filename or part}: {error.strerror or error}; make room and check the permissions of "
            f"{path.parent}, or set METADROPOUT_DATA to a folder that can be written to"
        ) from error


def _fetch(url: str, part: Path) -> None:
    """Bring the whole file into `part`, going on after breaks as long as each attempt brings something."""
    for attempt in range(1, ATTEMPTS + 1):
        before = part.stat().st_size if part.exists() else 0
        try:
            if _attempt(url, part, before):
                return
            raise http.client.IncompleteRead(b"")
        except (http.client.HTTPException, ConnectionError, TimeoutError) as error:
            progressed = part.exists() and part.stat().st_size > before
            if attempt == ATTEMPTS or not progressed:
                raise ConnectionError("the connection broke off") from error


def _attempt(url: str, part: Path, start: int) -> bool:
    """Fetch what is missing; whether the end was reached."""
    request = urllib.request.Request(url, headers={"Range": f"bytes={start}-"} if start else {})
    try:
        response = urllib.request.urlopen(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        with contextlib.closing(error):
            if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE and start:
                part.unlink()  # what is kept is as long as the file or longer: it cannot be its beginning
                return _attempt(url, part, 0)
            raise
    with response:
        resumed = response.status == http.HTTPStatus.PARTIAL_CONTENT
        if resumed and not str(response.headers.get("Content-Range", "")).startswith(f"bytes {start}-"):
            raise urllib.error.URLError("the server resumed at another place than asked for")
        length = response.headers.get("Content-Length")
        expected = None if length is None else (start if resumed else 0) + int(length)
        if expected is not None and expected > MAX_BYTES:
            raise urllib.error.URLError(f"the server announces {expected} bytes, which cannot be right")
        with (
            part.open("ab" if resumed else "wb") as file,
            progress_bar(f"downloading {part.stem}", expected, bytes_=True) as advance,
        ):
            advance(file.tell())
            _copy(response.read, file.write, advance)
            return expected is None or file.tell() == expected


def _copy(read: Callable[[int], bytes], write: Callable[[bytes], int], advance: Callable[[int], None]) -> None:
    total = 0
    while piece := read(_PIECE):
        total += len(piece)
        if total > MAX_BYTES:
            raise urllib.error.URLError(f"the server sends more than {MAX_BYTES} bytes, which cannot be right")
        write(piece)
        advance(len(piece))
