"""Where records of requests and lifetimes are handed to the ledger: 204 means durable. Repeats are harmless.

And where replicas of pods say how they have lived so far.
"""

from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from contracts.control import LifetimeBatch, LivesSoFar, RequestBatch
from contracts.usage import LifetimeRecord, RequestRecord
from controlplane.bodies import LARGE_BYTES, nothing, read, read_body
from controlplane.clock import Clock
from controlplane.ledger import Ledger
from controlplane.usage_batches import read_batch


def routes(
    ledger: Ledger,
    seen: Callable[[tuple[RequestRecord, ...]], None],
    ended: Callable[[tuple[LifetimeRecord, ...]], None],
    clock: Clock,
) -> list[Route]:
    """Internal routes; a batch is one transaction, and then `seen` or `ended`."""

    async def requests(request: Request) -> Response:
        body = await read_body(request, LARGE_BYTES)
        records, unreadable = read_batch(body, RequestRecord, clock.wall_s() * 1_000_000)
        await ledger.append_requests(RequestBatch(records=records), unreadable)
        seen(records)
        return nothing()

    async def lifetimes(request: Request) -> Response:
        body = await read_body(request, LARGE_BYTES)
        records, unreadable = read_batch(body, LifetimeRecord, clock.wall_s() * 1_000_000)
        await ledger.append_lifetimes(LifetimeBatch(records=records), unreadable)
        ended(records)
        return nothing()

    async def lives(request: Request) -> Response:
        await ledger.note_lives(await read(request, LivesSoFar, LARGE_BYTES), clock.wall_s() * 1_000_000)
        return nothing()

    return [
        Route("/internal/v1/usage/requests", requests, methods=["POST"]),
        Route("/internal/v1/usage/lifetimes", lifetimes, methods=["POST"]),
        Route("/internal/v1/usage/lives", lives, methods=["POST"]),
    ]
