"""Probe a process's health port as a kubelet does."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import aiohttp


@asynccontextmanager
async def probing(port: int) -> AsyncIterator[Callable[[str], Awaitable[tuple[int, str]]]]:
    """Yield a function that gets a path. It returns (status, body), or status 0 if the connection fails."""
    async with aiohttp.ClientSession() as session:

        async def says(path: str) -> tuple[int, str]:
            try:
                async with session.get(f"http://127.0.0.1:{port}{path}") as answer:
                    return answer.status, await answer.text()
            except aiohttp.ClientError:
                return 0, ""

        yield says
