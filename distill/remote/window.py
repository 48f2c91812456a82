"""Many jobs at once, their results in order. Knows nothing of what the jobs do."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from typing import TypeVar

Result = TypeVar("Result")
READ_AHEAD = 4  # jobs begun or done beyond the first unfinished one, for each that may run at once


async def in_order(
    jobs: Iterable[Callable[[], Awaitable[Result]]], concurrency: int
) -> AsyncGenerator[list[Result], None]:
    """Results of `jobs` in their order, in lists of what is ready; at most `concurrency` run at once.

    One slow job holds up what follows it, not what runs: others go on, up to READ_AHEAD * concurrency jobs. An
    exception of a job comes when its turn does, after the results before it; jobs that are under way then are stopped.
    """
    gate = asyncio.Semaphore(concurrency)

    async def through(job: Callable[[], Awaitable[Result]]) -> Result:
        async with gate:
            return await job()

    under_way: deque[asyncio.Task[Result]] = deque()
    try:
        for job in jobs:
            under_way.append(asyncio.create_task(through(job)))
            if len(under_way) == READ_AHEAD * concurrency:
                yield await _ready(under_way)
        while under_way:
            yield await _ready(under_way)
    finally:
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)


async def _ready(under_way: deque[asyncio.Task[Result]]) -> list[Result]:
    """Wait for the first job, and take with it what is done right behind it."""
    results = [await under_way[0]]
    under_way.popleft()
    while under_way and under_way[0].done() and not under_way[0].cancelled() and not under_way[0].exception():
        results.append(under_way.popleft().result())
    return results
