"""One thread that computes, for each visitor the newest request only."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from metadropout.app.problems import RequestError

T = TypeVar("T")
_log = logging.getLogger(__name__)

LONGEST_QUEUE = 64
"""How many visitors may wait at once."""


class Outdated(Exception):  # noqa: N818 (no error, but a reason to stop)
    """Nobody waits for this result any more."""


class Ticket:
    """A request that waits or is being computed."""

    def __init__(self, work: Callable[[Ticket], Any]) -> None:
        self.work = work
        self.result: Future[Any] = Future()
        self._dropped = threading.Event()

    def drop(self) -> None:
        """Say that nobody waits for it any more."""
        self._dropped.set()

    def check(self) -> None:
        """Stop the computation if nobody waits for it; long work calls this now and then."""
        if self._dropped.is_set():
            raise Outdated


class Worker:
    """Computes what is asked, one request after the other.

    Strokes come faster than answers can: a new request of a visitor takes the place of the one that waits, and stops
    the one that is being computed.
    """

    def __init__(self, initialise: Callable[[], None] = lambda: None) -> None:
        self._waiting: OrderedDict[str, Ticket] = OrderedDict()
        self._running: tuple[str, Ticket] | None = None
        self._changed = threading.Condition()
        self._closed = False
        self._initialise = initialise
        self.dropped = 0
        """How many requests were overtaken by newer ones."""
        self._thread = threading.Thread(target=self._loop, name="metadropout-app", daemon=True)
        self._thread.start()

    async def run(self, visitor: str, work: Callable[[Ticket], T]) -> T:
        """Compute something for a visitor and return it.

        Raises:
            RequestError: if a newer request of the visitor has taken its place, or too many wait.
        """
        ticket = Ticket(work)
        self._enter(visitor, ticket)
        try:
            return await asyncio.wrap_future(ticket.result)
        except Outdated:
            raise RequestError(409, "outdated", "a newer request has taken this one's place") from None
        except asyncio.CancelledError:  # the visitor has gone
            self._leave(visitor, ticket)
            raise

    def close(self) -> None:
        """Stop after what is being computed."""
        with self._changed:
            self._closed = True
            for ticket in self._waiting.values():
                ticket.drop()
            self._changed.notify()
        self._thread.join(timeout=10)

    def _enter(self, visitor: str, ticket: Ticket) -> None:
        with self._changed:
            if (before := self._waiting.get(visitor)) is not None:
                before.drop()
                before.result.set_exception(Outdated())
                self.dropped += 1
                self._waiting[visitor] = ticket  # at the same place in the queue
            elif len(self._waiting) >= LONGEST_QUEUE:
                raise RequestError(503, "busy", "too many requests wait already; try again in a moment")
            else:
                self._waiting[visitor] = ticket
            if self._running is not None and self._running[0] == visitor:
                self._running[1].drop()
            self._changed.notify()

    def _leave(self, visitor: str, ticket: Ticket) -> None:
        with self._changed:
            ticket.drop()
            if self._waiting.get(visitor) is ticket:
                del self._waiting[visitor]

    def _loop(self) -> None:
        try:
            self._initialise()
        except Exception:  # requests that meet the same are told
            _log.exception("the page's worker could not prepare itself")
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    return
                visitor, ticket = self._waiting.popitem(last=False)
                self._running = visitor, ticket
            if ticket.result.set_running_or_notify_cancel():
                try:
                    ticket.check()
                    ticket.result.set_result(ticket.work(ticket))
                except Outdated as error:
                    self.dropped += 1
                    ticket.result.set_exception(error)
                except BaseException as error:  # whoever waits is told
                    ticket.result.set_exception(error)
            with self._changed:
                self._running = None
