"""The snapshotter's HTTP routes. Bodies have limits, and the tenant comes only from the caller's credential.

There are routes for a push, for a tenant's stored objects (check, collect, export), and for replicas.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Annotated, Final

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import StreamingResponse

from kelvin.contracts.artifact_errors import (
    ArtifactRejected,
    ChunkCorrupt,
    ManifestCorrupt,
    ProbeFailed,
    StorageQuotaExceeded,
)
from kelvin.contracts.artifacts.manifest import Manifest
from kelvin.contracts.artifacts.push_api import (
    CLIENT_PHRASE,
    AttestationList,
    AttestRequest,
    CollectReport,
    CollectRequest,
    CommitRequest,
    Committed,
    Committing,
    FsckLine,
    KeepSeal,
    Missing,
    MissingRequest,
    Original,
    Plan,
    PlanRequest,
)
from kelvin.contracts.errors import CapacityExceeded, Conflict, NotFound, Refused
from kelvin.contracts.names import require_dns_label
from kelvin.contracts.serving.control_messages import Principal, Scope, scope_allows
from kelvin.contracts.traffic_errors import ReplicaLost
from kelvin.contracts.wire import decode, encode
from kelvin.ipc.openapi import OCTETS, route_docs
from kelvin.ipc.principal import require_scope
from kelvin.process.race import run_until_disconnect
from snapshotter.intake.request_bodies import BufferedResponse, read_body, read_exactly
from snapshotter.push.commits import digests_digest
from snapshotter.push.publisher import Publisher, set_caller_key
from snapshotter.push.pushes import PLAN_BYTES, PLAN_TURN_S, Pushes
from snapshotter.store.attestation_store import AttestationStore
from snapshotter.store.exports import Exports, check_version

# 64 hex digits, quotes and a comma for each of 700,000 chunks.
DIGESTS_BYTES: Final = 48 << 20
# Envelope and bundle, as base64.
ATTEST_BYTES: Final = 4 << 20
JSON: Final = "application/json"
# The failures of publishing and of sealing on a standby.
_OF_COMMITS: Final = (
    ArtifactRejected, CapacityExceeded, StorageQuotaExceeded, ChunkCorrupt, ManifestCorrupt, ProbeFailed, ReplicaLost,
)  # fmt: skip
_described: Final = partial(route_docs, scope=Scope.PUSH)

_pusher_of = require_scope(Scope.PUSH)
NDJSON: Final = "application/x-ndjson"
SMALL_BYTES: Final = 64 << 10
SEAL_BYTES: Final = 32 << 20  # names of 200,000 tensors
Fsck = Callable[[str], AsyncIterator[FsckLine]]
Collect = Callable[[str, bool], Awaitable[CollectReport]]


def _pushing_tenant(request: Request) -> str:
    return _tenant_of(_pusher_of(request))


def _tenant_of(principal: Principal) -> str:
    return require_dns_label(principal.tenant, "tenant")  # it becomes the name of a directory


def _named_tenant(request: Request) -> str:
    """Return the caller's tenant or, for an operator, the one in `?tenant=`. To others, another tenant is not found."""
    principal = _pusher_of(request)
    named = request.query_params.get("tenant", principal.tenant)
    if named != principal.tenant and not scope_allows(principal.scopes, Scope.OPERATOR):
        raise Refused(NotFound("tenant", named[:63]))
    return require_dns_label(named, "tenant")


Tenant = Annotated[str, Depends(_pushing_tenant)]
NamedTenant = Annotated[str, Depends(_named_tenant)]


def push_routes(pushes: Pushes) -> APIRouter:
    """Return the routes of a push, from `kelvin/contracts/artifacts/push_api.py`."""
    router = APIRouter(prefix="/push/v1")

    def answer_of(tenant: str, content: bytes) -> Response:
        return BufferedResponse(content, JSON, pushes.body_room, tenant)

    async def announced_in(tenant: str, request: Request) -> str:
        """Return the digest of the announced chunks. Their list takes up to 80 MB, so the commit does not keep it."""
        async with pushes.body_room.receive(tenant, partial(read_body, request, DIGESTS_BYTES)) as body:
            return await asyncio.to_thread(lambda: digests_digest(decode(body, CommitRequest).digests))

    @router.post("/plans", **_described(Plan, ArtifactRejected, CapacityExceeded, request_body=PlanRequest))
    async def plan(tenant: Tenant, request: Request) -> Response:
        reading = partial(read_body, request, PLAN_BYTES)
        turn = pushes.plan_turns.take(tenant, PLAN_TURN_S)
        async with pushes.body_room.receive(tenant, reading, turn) as body:
            return answer_of(tenant, encode(await run_until_disconnect(request.receive, pushes.plan(tenant, body))))

    @router.post(
        "/plans/{plan_id}/missing",
        **_described(Missing, NotFound, Conflict, CapacityExceeded, StorageQuotaExceeded, request_body=MissingRequest),
    )
    async def missing(tenant: Tenant, plan_id: str, request: Request) -> Response:
        reading = partial(read_body, request, DIGESTS_BYTES)
        async with pushes.body_room.receive(tenant, reading, pushes.record_turns.take(tenant, PLAN_TURN_S)) as body:
            return answer_of(tenant, encode(await pushes.find_missing(tenant, plan_id, decode(body, MissingRequest))))

    @router.put(
        "/plans/{plan_id}/chunks/{digest}",
        **_described(None, NotFound, Conflict, CapacityExceeded, status=204, request_body=bytes),
    )
    async def put_chunk(tenant: Tenant, plan_id: str, digest: str, request: Request) -> Response:
        nbytes = await pushes.chunk_bytes(tenant, plan_id, digest)
        reading = partial(read_exactly, request, nbytes, "chunk")
        async with pushes.body_room.receive(tenant, reading, pushes.chunk_turns.take(tenant)) as body:
            await pushes.put_chunk(tenant, plan_id, digest, bytes(body))
        return Response(status_code=204)

    @router.get("/plans/{plan_id}/manifest", **_described(Manifest, NotFound, Conflict))
    async def manifest(tenant: Tenant, plan_id: str) -> Response:
        return answer_of(tenant, await pushes.manifest(tenant, plan_id))

    @router.post(
        "/plans/{plan_id}/attestations",
        status_code=204,
        **_described(
            None,
            NotFound,
            Conflict,
            ArtifactRejected,
            CapacityExceeded,
            StorageQuotaExceeded,
            ChunkCorrupt,
            status=204,
            request_body=AttestRequest,
        ),
    )
    async def attest(tenant: Tenant, plan_id: str, request: Request) -> Response:
        async with pushes.body_room.receive(tenant, partial(read_body, request, ATTEST_BYTES)) as body:
            await pushes.attest(tenant, plan_id, decode(body, AttestRequest))
        return Response(status_code=204)

    @router.post(
        "/plans/{plan_id}/commit",
        **_described(
            Committed, NotFound, Conflict, *_OF_COMMITS, extra_responses={202: Committing}, request_body=CommitRequest
        ),
    )
    async def commit(tenant: Tenant, plan_id: str, request: Request) -> Response:
        announced = await announced_in(tenant, request)
        set_caller_key(_pusher_of(request).key_id)
        answer = await pushes.commit(tenant, plan_id, announced, request.query_params.get(CLIENT_PHRASE))
        return Response(encode(answer), 202 if isinstance(answer, Committing) else 200, media_type=JSON)

    return router


def store_routes(fsck: Fsck, collect: Collect, exports: Exports, attestations: AttestationStore) -> APIRouter:
    """Return the routes over stored objects, from `kelvin/contracts/artifacts/push_api.py`: check, collect, export."""
    router = APIRouter(prefix="/push/v1")

    @router.post("/fsck", **route_docs(FsckLine, media_type=NDJSON, scope=Scope.PUSH))
    async def check(tenant: Tenant) -> Response:
        lines = (encode(line) + b"\n" async for line in fsck(tenant))
        return StreamingResponse(lines, media_type=NDJSON)

    @router.post("/collect", **route_docs(CollectReport, NotFound, request_body=CollectRequest, scope=Scope.PUSH))
    async def free(tenant: NamedTenant, request: Request) -> Response:
        wish = decode(await read_body(request, SMALL_BYTES), CollectRequest)
        return Response(encode(await collect(tenant, wish.run)), media_type=JSON)

    @router.get("/manifests/{version}", **route_docs(Manifest, NotFound, ManifestCorrupt, scope=Scope.PUSH))
    async def manifest(tenant: Tenant, version: str) -> Response:
        async with exports.turns.take(tenant):
            return BufferedResponse(await exports.manifest(tenant, version), JSON, exports.room, tenant)

    @router.get("/originals/{version}", **route_docs(Original, NotFound, ManifestCorrupt, scope=Scope.PUSH))
    async def original(tenant: Tenant, version: str) -> Response:
        async with exports.turns.take(tenant):
            return BufferedResponse(encode(await exports.original(tenant, version)), JSON, exports.room, tenant)

    @router.get("/chunks/{digest}", **route_docs(bytes, NotFound, ChunkCorrupt, scope=Scope.PUSH))
    async def chunk(tenant: Tenant, digest: str) -> Response:
        async with exports.turns.take(tenant):
            return BufferedResponse(await exports.chunk(tenant, digest), OCTETS, exports.room, tenant)

    @router.get(
        "/versions/{version}/attestations",
        **route_docs(AttestationList, NotFound, ManifestCorrupt, scope=Scope.PUSH),
    )
    async def attested(tenant: Tenant, version: str) -> Response:
        async with exports.turns.take(tenant):
            await exports.manifest(tenant, version)  # raises NotFound if there is no such version
            found = await attestations.entries(tenant, version)
            return BufferedResponse(encode(AttestationList(attestations=found)), JSON, exports.room, tenant)

    return router


def inner_routes(publisher: Publisher) -> APIRouter:
    """Return the routes for replicas. They are served on the internal socket only, never to outside callers."""
    router = APIRouter(prefix="/internal/v1")

    @router.post("/seals", status_code=204)
    async def keep(request: Request) -> Response:
        found = decode(await read_body(request, SEAL_BYTES), KeepSeal)
        check_version(found.seal.version)
        await publisher.add_seal(require_dns_label(found.tenant, "tenant"), found.seal)
        return Response(status_code=204)

    return router
