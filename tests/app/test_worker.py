"""The worker's promises: the newest request of a visitor wins, and what is kept has an end."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

pytest.importorskip("starlette", reason="no test of the page: starlette is not installed")

from metadropout.app.problems import RequestError
from metadropout.app.tasks import Kept
from metadropout.app.worker import LONGEST_QUEUE, Ticket, Worker


def test_quick_strokes_do_not_queue_up() -> None:
    worker, begun, computed = Worker(), threading.Event(), []

    def slow(ticket: Ticket) -> str:
        begun.set()
        while True:  # as adapting does between noise samples
            ticket.check()

    def quick(number: int) -> Any:
        def work(ticket: Ticket) -> int:
            computed.append(number)
            return number

        return work

    async def strokes() -> list[Any]:
        first = asyncio.create_task(worker.run("me", slow))
        await asyncio.to_thread(begun.wait)
        others = [asyncio.create_task(worker.run("me", quick(number))) for number in range(20)]
        return await asyncio.gather(first, *others, return_exceptions=True)

    first, *others, last = asyncio.run(strokes())
    worker.close()
    assert last == 19
    assert computed[-1] == 19
    assert all(isinstance(error, RequestError) and error.code == "outdated" for error in [first])
    assert all(result == number or result.code == "outdated" for number, result in enumerate(others))
    assert len(computed) < 20


def test_who_leaves_is_not_computed_for() -> None:
    worker, begun = Worker(), threading.Event()

    def slow(ticket: Ticket) -> None:
        begun.set()
        while True:
            ticket.check()

    async def leave() -> str:
        leaving = asyncio.create_task(worker.run("one", slow))
        await asyncio.to_thread(begun.wait)
        leaving.cancel()
        return await worker.run("other", lambda ticket: "done")

    assert asyncio.run(asyncio.wait_for(leave(), 20)) == "done"
    worker.close()


def test_a_queue_that_is_too_long_is_refused() -> None:
    worker, begun, end = Worker(), threading.Event(), threading.Event()

    def hold(ticket: Ticket) -> None:
        begun.set()
        end.wait(20)

    async def crowd() -> list[Any]:
        first = asyncio.create_task(worker.run("first", hold))
        await asyncio.to_thread(begun.wait)
        tasks = [asyncio.create_task(worker.run(str(n), lambda ticket: "ok")) for n in range(LONGEST_QUEUE + 1)]
        await asyncio.sleep(0.05)
        end.set()
        return await asyncio.gather(first, *tasks, return_exceptions=True)

    _, *results = asyncio.run(crowd())
    worker.close()
    assert results[:-1] == ["ok"] * LONGEST_QUEUE
    assert results[-1].status == 503


def test_an_error_goes_to_whoever_asked_and_the_worker_goes_on() -> None:
    worker = Worker(lambda: 1 / 0)  # type: ignore[arg-type,return-value]

    async def ask() -> int:
        with pytest.raises(KeyError):
            await worker.run("me", lambda ticket: {}["missing"])
        return await worker.run("me", lambda ticket: 5)

    assert asyncio.run(ask()) == 5
    worker.close()


def test_what_is_kept_fits_into_its_memory() -> None:
    kept: Kept[int] = Kept(100)
    for number in range(50):
        kept.put(number, number, 30)
        assert kept.get(0 if number < 20 else number) is not None  # 0 is used all the time
    assert (len(kept), kept.bytes) == (3, 90)
    kept.put("large", 1, 1000)
    assert (len(kept), kept.get("large")) == (1, 1)
