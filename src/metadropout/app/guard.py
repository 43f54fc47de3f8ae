"""Who may ask: the page itself, from this machine. Everybody else is told why not.

A server on 127.0.0.1 can be reached by any page that the user's browser has open: by a request to its address, or by a
name that first leads to the page's own server and then to 127.0.0.1 (DNS rebinding). So the host that a request names
must be this machine, and the page that sends it must be this one.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from metadropout.app.problems import RequestError

HOSTS = ("127.0.0.1", "localhost", "::1")

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'none'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Cache-Control": "no-store",
}


class Guard:
    """Refuses requests from elsewhere, and forbids the page everything that it does not need."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        try:
            check_sender(Headers(scope=scope))
        except RequestError as error:
            await error.response()(scope, receive, send_guarded)
        else:
            await self.app(scope, receive, send_guarded)


def check_sender(headers: Headers) -> None:
    """Refuse a request that does not come from this server's own page, or from a program on this machine."""
    hosts = headers.getlist("host")
    host = hosts[0] if len(hosts) == 1 else ""
    if _host_name(f"//{host}") not in HOSTS:
        raise RequestError(
            403, "host", "this server answers on this machine only: open it as http://127.0.0.1 and its port"
        )
    origin = headers.get("origin")
    if origin is not None and origin != f"http://{host}":
        raise RequestError(403, "origin", "this request was sent by another page; only this server's own may send any")
    if headers.get("sec-fetch-site", "none") not in ("none", "same-origin") and headers.get("sec-fetch-mode") not in (
        "navigate",  # a link to the page is no harm
    ):
        raise RequestError(403, "origin", "this request was sent by another page; only this server's own may send any")


def _host_name(address: str) -> str | None:
    try:
        return urlsplit(address).hostname
    except ValueError:
        return None
