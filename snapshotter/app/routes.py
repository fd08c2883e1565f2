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
from snapshotter.push.commits import digest_of_list
from snapshotter.push.publisher import Publisher, set_caller_key
from snapshotter.push.pushes import PLAN_BYTES, PLAN_WAIT_S, Pushes
from snapshotter.store.attestation_store import AttestationStore
from snapshotter.store.exports import Exports, check_version

# 64 hex digits, quotes and a comma for each of 700,000 chunks.
DIGESTS_BYTES: Final = 48 << 20
# Envelope and bundle, as base64.
ATTEST_BYTES: Final = 4 << 20
JSON: Final = "application/json"
# The failures of publishing and of sealing on a standby.
_OF_COMMIT: Final = (
    ArtifactRejected, CapacityExceeded, StorageQuotaExceeded, ChunkCorrupt, ManifestCorrupt, ProbeFailed, ReplicaLost,
)  # fmt: skip
_push_docs: Final = partial(route_docs, scope=Scope.PUSH)

_require_pusher = require_scope(Scope.PUSH)
NDJSON: Final = "application/x-ndjson"
SMALL_BYTES: Final = 64 << 10
SEAL_BYTES: Final = 32 << 20  # names of 200,000 tensors
Fsck = Callable[[str], AsyncIterator[FsckLine]]
Collect = Callable[[str, bool], Awaitable[CollectReport]]


def _pushing_tenant(request: Request) -> str:
    return _tenant_of(_require_pusher(request))


def _tenant_of(principal: Principal) -> str:
    return require_dns_label(principal.tenant, "tenant")  # it becomes the name of a directory


def _named_tenant(request: Request) -> str:
    """Return the caller's tenant or, for an operator, the one in `?tenant=`. To others, another tenant is not found."""
    principal = _require_pusher(request)
    named = request.query_params.get("tenant", principal.tenant)
    if named != principal.tenant and not scope_allows(principal.scopes, Scope.OPERATOR):
        raise Refused(NotFound("tenant", named[:63]))
    return require_dns_label(named, "tenant")


Tenant = Annotated[str, Depends(_pushing_tenant)]
NamedTenant = Annotated[str, Depends(_named_tenant)]


def push_routes(pushes: Pushes) -> APIRouter:
    """Return the routes of a push, from `kelvin/contracts/artifacts/push_api.py`."""
    router = APIRouter(prefix="/push/v1")

    def buffered(tenant: str, content: bytes) -> Response:
        return BufferedResponse(content, JSON, pushes.body_budget, tenant)

    async def receive_list_digest(tenant: str, request: Request) -> str:
        """Return the digest of the announced chunks. Their list takes up to 80 MB, so the commit does not keep it."""
        async with pushes.body_budget.receive(tenant, partial(read_body, request, DIGESTS_BYTES)) as body:
            return await asyncio.to_thread(lambda: digest_of_list(decode(body, CommitRequest).digests))

    @router.post("/plans", **_push_docs(Plan, ArtifactRejected, CapacityExceeded, request_body=PlanRequest))
    async def plan(tenant: Tenant, request: Request) -> Response:
        reading = partial(read_body, request, PLAN_BYTES)
        permit = pushes.plan_limiter.hold_permit(tenant, PLAN_WAIT_S)
        async with pushes.body_budget.receive(tenant, reading, permit) as body:
            return buffered(tenant, encode(await run_until_disconnect(request.receive, pushes.plan(tenant, body))))

    @router.post(
        "/plans/{plan_id}/missing",
        **_push_docs(Missing, NotFound, Conflict, CapacityExceeded, StorageQuotaExceeded, request_body=MissingRequest),
    )
    async def missing(tenant: Tenant, plan_id: str, request: Request) -> Response:
        reading = partial(read_body, request, DIGESTS_BYTES)
        permit = pushes.record_limiter.hold_permit(tenant, PLAN_WAIT_S)
        async with pushes.body_budget.receive(tenant, reading, permit) as body:
            return buffered(tenant, encode(await pushes.find_missing(tenant, plan_id, decode(body, MissingRequest))))

    @router.put(
        "/plans/{plan_id}/chunks/{digest}",
        **_push_docs(None, NotFound, Conflict, CapacityExceeded, status=204, request_body=bytes),
    )
    async def put_chunk(tenant: Tenant, plan_id: str, digest: str, request: Request) -> Response:
        nbytes = await pushes.chunk_bytes(tenant, plan_id, digest)
        reading = partial(read_exactly, request, nbytes, "chunk")
        async with pushes.body_budget.receive(tenant, reading, pushes.chunk_limiter.hold_permit(tenant)) as body:
            await pushes.put_chunk(tenant, plan_id, digest, bytes(body))
        return Response(status_code=204)

    @router.get("/plans/{plan_id}/manifest", **_push_docs(Manifest, NotFound, Conflict))
    async def manifest(tenant: Tenant, plan_id: str) -> Response:
        return buffered(tenant, await pushes.manifest(tenant, plan_id))

    @router.post(
        "/plans/{plan_id}/attestations",
        status_code=204,
        **_push_docs(
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
        async with pushes.body_budget.receive(tenant, partial(read_body, request, ATTEST_BYTES)) as body:
            await pushes.attest(tenant, plan_id, decode(body, AttestRequest))
        return Response(status_code=204)

    @router.post(
        "/plans/{plan_id}/commit",
        **_push_docs(
            Committed, NotFound, Conflict, *_OF_COMMIT, extra_responses={202: Committing}, request_body=CommitRequest
        ),
    )
    async def commit(tenant: Tenant, plan_id: str, request: Request) -> Response:
        list_digest = await receive_list_digest(tenant, request)
        set_caller_key(_require_pusher(request).key_id)
        answer = await pushes.commit(tenant, plan_id, list_digest, request.query_params.get(CLIENT_PHRASE))
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
    async def collect_garbage(tenant: NamedTenant, request: Request) -> Response:
        collect_request = decode(await read_body(request, SMALL_BYTES), CollectRequest)
        return Response(encode(await collect(tenant, collect_request.run)), media_type=JSON)

    @router.get("/manifests/{version}", **route_docs(Manifest, NotFound, ManifestCorrupt, scope=Scope.PUSH))
    async def manifest(tenant: Tenant, version: str) -> Response:
        async with exports.call_limiter.hold_permit(tenant):
            return BufferedResponse(await exports.manifest(tenant, version), JSON, exports.body_budget, tenant)

    @router.get("/originals/{version}", **route_docs(Original, NotFound, ManifestCorrupt, scope=Scope.PUSH))
    async def original(tenant: Tenant, version: str) -> Response:
        async with exports.call_limiter.hold_permit(tenant):
            return BufferedResponse(encode(await exports.original(tenant, version)), JSON, exports.body_budget, tenant)

    @router.get("/chunks/{digest}", **route_docs(bytes, NotFound, ChunkCorrupt, scope=Scope.PUSH))
    async def chunk(tenant: Tenant, digest: str) -> Response:
        async with exports.call_limiter.hold_permit(tenant):
            return BufferedResponse(await exports.chunk(tenant, digest), OCTETS, exports.body_budget, tenant)

    @router.get(
        "/versions/{version}/attestations", **route_docs(AttestationList, NotFound, ManifestCorrupt, scope=Scope.PUSH)
    )
    async def list_attestations(tenant: Tenant, version: str) -> Response:
        async with exports.call_limiter.hold_permit(tenant):
            await exports.manifest(tenant, version)  # raises NotFound if there is no such version
            entries = await attestations.list_entries(tenant, version)
            return BufferedResponse(encode(AttestationList(attestations=entries)), JSON, exports.body_budget, tenant)

    return router


def inner_routes(publisher: Publisher) -> APIRouter:
    """Return the routes for replicas. They are served on the internal socket only, never to outside callers."""
    router = APIRouter(prefix="/internal/v1")

    @router.post("/seals", status_code=204)
    async def add_seal(request: Request) -> Response:
        keep_seal = decode(await read_body(request, SEAL_BYTES), KeepSeal)
        check_version(keep_seal.seal.version)
        await publisher.add_seal(require_dns_label(keep_seal.tenant, "tenant"), keep_seal.seal)
        return Response(status_code=204)

    return router
