"""What is asked of a tenant's objects at rest: check them, free what nothing needs, give them out, keep a seal."""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final

from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse

from contracts.artifact_errors import ChunkCorrupt, ManifestCorrupt
from contracts.control import Scope
from contracts.errors import NotFound
from contracts.manifest import Manifest
from contracts.names import dns_label
from contracts.push import AttestationList, CollectReport, CollectRequest, FsckLine, KeepSeal, Original
from contracts.wire import decode, encode
from service.openapi import OCTETS, described
from snapshotter.attestations import Attestations
from snapshotter.bodies import Lent, read_body
from snapshotter.exports import Exports, check_version
from snapshotter.publish import Publisher
from snapshotter.routes import JSON, NamedTenant, Tenant

NDJSON: Final = "application/x-ndjson"
SMALL_BYTES: Final = 64 << 10
SEAL_BYTES: Final = 32 << 20  # names of 200,000 tensors

Fsck = Callable[[str], AsyncIterator[FsckLine]]
Collect = Callable[[str, bool], Awaitable[CollectReport]]


def store_routes(fsck: Fsck, collect: Collect, exports: Exports, attestations: Attestations) -> APIRouter:
    """Routes of `contracts/push.py` that check and collect."""
    router = APIRouter(prefix="/push/v1")

    @router.post("/fsck", **described(FsckLine, media_type=NDJSON, scope=Scope.PUSH))
    async def check(tenant: Tenant) -> Response:
        lines = (encode(line) + b"\n" async for line in fsck(tenant))
        return StreamingResponse(lines, media_type=NDJSON)

    @router.post("/collect", **described(CollectReport, NotFound, takes=CollectRequest, scope=Scope.PUSH))
    async def free(tenant: NamedTenant, request: Request) -> Response:
        wish = decode(await read_body(request, SMALL_BYTES), CollectRequest)
        return Response(encode(await collect(tenant, wish.run)), media_type=JSON)

    @router.get("/manifests/{version}", **described(Manifest, NotFound, ManifestCorrupt, scope=Scope.PUSH))
    async def manifest(tenant: Tenant, version: str) -> Response:
        async with exports.turns.take(tenant):
            return Lent(await exports.manifest(tenant, version), JSON, exports.room, tenant)

    @router.get("/originals/{version}", **described(Original, NotFound, ManifestCorrupt, scope=Scope.PUSH))
    async def original(tenant: Tenant, version: str) -> Response:
        async with exports.turns.take(tenant):
            return Lent(encode(await exports.original(tenant, version)), JSON, exports.room, tenant)

    @router.get("/chunks/{digest}", **described(bytes, NotFound, ChunkCorrupt, scope=Scope.PUSH))
    async def chunk(tenant: Tenant, digest: str) -> Response:
        async with exports.turns.take(tenant):
            return Lent(await exports.chunk(tenant, digest), OCTETS, exports.room, tenant)

    @router.get(
        "/versions/{version}/attestations",
        **described(AttestationList, NotFound, ManifestCorrupt, scope=Scope.PUSH),
    )
    async def attested(tenant: Tenant, version: str) -> Response:
        async with exports.turns.take(tenant):
            await exports.manifest(tenant, version)  # there is one, or it is not found
            found = await attestations.entries(tenant, version)
            return Lent(encode(AttestationList(attestations=found)), JSON, exports.room, tenant)

    return router


def inner_routes(publisher: Publisher) -> APIRouter:
    """What replicas ask, over the socket alone: no caller from outside comes here."""
    router = APIRouter(prefix="/internal/v1")

    @router.post("/seals", status_code=204)
    async def keep(request: Request) -> Response:
        found = decode(await read_body(request, SEAL_BYTES), KeepSeal)
        check_version(found.seal.version)
        await publisher.add_seal(dns_label(found.tenant, "tenant"), found.seal)
        return Response(status_code=204)

    return router
