"""Sending requests when they are due. Knows time and concurrency; does not know HTTP.

Time is the clock of the running event loop, so that tests run it in none.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from kvruntime.bench.figures import Record
from kvruntime.bench.prompts import Asked

__all__ = ["run_load"]

Send = Callable[[Asked, Record], Awaitable[None]]


async def run_load(
    send: Send,
    asked: Sequence[Asked],
    arrivals: Sequence[float],
    *,
    max_concurrency: int | None = None,
    on_done: Callable[[int], None] = lambda _: None,
) -> list[Record]:
    """Send each request at its time, at most `max_concurrency` at once; return one record a request.

    Times in the records count from the beginning. `arrivals` are in order. Where the load is
    cancelled, as Ctrl-C does, what has been noted so far comes back: records that were not sent have
    `sent` None. `on_done` hears how many are over.
    """
    records = [Record(arrival=arrival) for arrival in arrivals]
    start = asyncio.get_running_loop().time()
    with suppress(asyncio.CancelledError):  # the records say how far it came
        await _send_all(send, asked, records, max_concurrency, on_done)
    for record in records:
        record.count_from(start)
    return records


async def _send_all(
    send: Send,
    asked: Sequence[Asked],
    records: Sequence[Record],
    max_concurrency: int | None,
    on_done: Callable[[int], None],
) -> None:
    loop = asyncio.get_running_loop()
    start, num_done = loop.time(), 0
    seats = asyncio.Semaphore(max_concurrency) if max_concurrency else None

    async def ask(one: Asked, record: Record) -> None:
        nonlocal num_done
        try:
            await send(one, record)
        finally:
            if seats:
                seats.release()
        num_done += 1
        on_done(num_done)

    async with asyncio.TaskGroup() as group:
        for one, record in zip(asked, records, strict=True):
            await asyncio.sleep(max(0.0, start + record.arrival - loop.time()))
            if seats:
                await seats.acquire()
            group.create_task(ask(one, record))
