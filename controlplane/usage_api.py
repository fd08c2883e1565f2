"""Where records of requests and lifetimes are handed to the ledger: 204 means durable. Repeats are harmless."""

from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from contracts.control import LifetimeBatch, RequestBatch
from contracts.usage import RequestRecord
from controlplane.bodies import LARGE_BYTES, nothing, read
from controlplane.ledger import Ledger


def routes(ledger: Ledger, seen: Callable[[tuple[RequestRecord, ...]], None]) -> list[Route]:
    """Internal routes; a batch is one transaction, and then `seen`."""

    async def requests(request: Request) -> Response:
        batch = await read(request, RequestBatch, LARGE_BYTES)
        await ledger.append_requests(batch)
        seen(batch.records)
        return nothing()

    async def lifetimes(request: Request) -> Response:
        await ledger.append_lifetimes(await read(request, LifetimeBatch, LARGE_BYTES))
        return nothing()

    return [
        Route("/internal/v1/usage/requests", requests, methods=["POST"]),
        Route("/internal/v1/usage/lifetimes", lifetimes, methods=["POST"]),
    ]
