"""One load from beginning to end, as a command runs it: with a bar on a terminal, until Ctrl-C.

Knows how the parts are put together, and which of them need an optional package.
"""

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvruntime.bench.figures import Record
from kvruntime.bench.load import run_load
from kvruntime.bench.workload import Workload
from kvruntime.errors import InvalidRequest, MissingDependency
from kvruntime.report import progress_bars
from kvruntime.weights import Progress

if TYPE_CHECKING:
    from kvruntime.bench.client import Client

__all__ = ["Session", "make_client", "plotting", "run_session"]


@dataclass(frozen=True, slots=True)
class Session:
    """What a load left behind; not whole where Ctrl-C ended it."""

    url: str
    model: str
    records: list[Record]
    is_whole: bool


def run_session(
    client: "Client", workload: Workload, max_concurrency: int | None, warmup: int
) -> Session:
    """Send the whole load, with a bar on a terminal."""
    asked = workload.asked()
    arrivals = workload.arrivals(asked)
    is_whole = True

    async def run() -> list[Record]:
        nonlocal is_whole
        async with client:
            await client.warm_up(workload.warm_up(warmup))
            with progress_bars() as progress:
                records = await run_load(
                    client.send,
                    asked,
                    arrivals,
                    max_concurrency=max_concurrency,
                    on_done=lambda done: _tell(progress, done, len(asked)),
                )
        task = asyncio.current_task()
        is_whole = task is not None and not task.cancelling()
        return records

    records = asyncio.run(run())
    return Session(client.url, client.model, records, is_whole)


def _tell(progress: Progress | None, done: int, total: int) -> None:
    if progress:
        progress("requests", done, total)


def make_client(url: str, endpoint: str, **settings: Any) -> "Client":
    """A client of the server; httpx is needed from here on."""
    try:
        from kvruntime.bench.client import Client, Endpoint  # noqa: PLC0415 -- an optional extra
    except ImportError as error:
        raise MissingDependency(
            "kvruntime bench serve needs the package httpx, which is not installed: "
            "pip install 'kvruntime[bench]'"
        ) from error
    if endpoint not in list(Endpoint):
        raise InvalidRequest(f"endpoint must be one of {', '.join(Endpoint)}, got {endpoint!r}")
    return Client(url, endpoint=Endpoint(endpoint), **settings)


def plotting() -> Any:
    """The module that draws; matplotlib is needed from here on."""
    try:
        from kvruntime.bench import plot  # noqa: PLC0415 -- an optional extra
    except ImportError as error:
        raise MissingDependency(
            "--plot needs the package matplotlib, which is not installed: "
            "pip install 'kvruntime[bench]'"
        ) from error
    return plot
