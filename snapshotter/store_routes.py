"""What is asked of a tenant's objects at rest: check them, free what nothing needs. Beside the push API, like it."""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final

from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse

from contracts.collect import CollectReport, CollectRequest
from contracts.push import FsckLine
from contracts.wire import decode, encode
from snapshotter.bodies import read_body
from snapshotter.routes import JSON, Tenant

NDJSON: Final = "application/x-ndjson"
SMALL_BYTES: Final = 64 << 10

Fsck = Callable[[str], AsyncIterator[FsckLine]]
Collect = Callable[[str, bool], Awaitable[CollectReport]]


def store_routes(fsck: Fsck, collect: Collect) -> APIRouter:
    """Routes of `contracts/push.py` (the check) and `contracts/collect.py`."""
    router = APIRouter(prefix="/push/v1")

    @router.post("/fsck")
    async def check(tenant: Tenant) -> Response:
        lines = (encode(line) + b"\n" async for line in fsck(tenant))
        return StreamingResponse(lines, media_type=NDJSON)

    @router.post("/collect")
    async def free(tenant: Tenant, request: Request) -> Response:
        wish = decode(await read_body(request, SMALL_BYTES), CollectRequest)
        return Response(encode(await collect(tenant, wish.run)), media_type=JSON)

    return router
