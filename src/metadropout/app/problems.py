"""What a request can get wrong, as the answers that say so."""

from __future__ import annotations

from starlette.responses import JSONResponse


class RequestError(Exception):
    """A request that cannot be served.

    Args:
        status: of HTTP.
        code: a word for programs.
        message: a sentence for people: what is wrong, and what to do.
    """

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message

    def response(self) -> JSONResponse:
        """Return the answer."""
        # The rest of a body that is refused is not read, so the connection cannot be used again.
        closing = {"Connection": "close"} if self.status in (408, 413) else {}
        waiting = {"Retry-After": "1"} if self.status == 503 else {}
        content = {"error": {"code": self.code, "message": self.message}}
        return JSONResponse(content, self.status, headers=closing | waiting)
