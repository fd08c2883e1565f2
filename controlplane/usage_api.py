"""Where records of requests and lifetimes are handed to the ledger: 204 means durable. Repeats are harmless.

And where replicas of pods say how they have lived so far.
"""

from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from contracts.control import LifetimeBatch, LivesSoFar, RequestBatch
from contracts.usage import LifetimeRecord, RequestRecord
from controlplane.bodies import LARGE_BYTES, nothing, read
from controlplane.clock import Clock
from controlplane.ledger import Ledger


def routes(
    ledger: Ledger,
    seen: Callable[[tuple[RequestRecord, ...]], None],
    ended: Callable[[tuple[LifetimeRecord, ...]], None],
    clock: Clock,
) -> list[Route]:
    """Internal routes; a batch is one transaction, and then `seen` or `ended`."""

    async def requests(request: Request) -> Response:
        batch = await read(request, RequestBatch, LARGE_BYTES)
        await ledger.append_requests(batch)
        seen(batch.records)
        return nothing()

    async def lifetimes(request: Request) -> Response:
        batch = await read(request, LifetimeBatch, LARGE_BYTES)
        await ledger.append_lifetimes(batch)
        ended(batch.records)
        return nothing()

    async def lives(request: Request) -> Response:
        await ledger.note_lives(await read(request, LivesSoFar, LARGE_BYTES), clock.wall_s() * 1_000_000)
        return nothing()

    return [
        Route("/internal/v1/usage/requests", requests, methods=["POST"]),
        Route("/internal/v1/usage/lifetimes", lifetimes, methods=["POST"]),
        Route("/internal/v1/usage/lives", lives, methods=["POST"]),
    ]
