"""The calls of a push, in a client's order: plan, missing, chunks, attestations, commit. `routes.py` serves them.

Tenant limits: calls in `intake/tenant_call_limits.py`, commits in `commits.py`, jobs in `kelvin/ipc/engine_jobs.py`.
"""

import asyncio
import time
from dataclasses import dataclass
from typing import Final

from blake3 import blake3
from msgspec import Raw, Struct

from kelvin.contracts.artifact_errors import ArtifactRejected
from kelvin.contracts.artifacts.manifest import encode_manifest, version_of
from kelvin.contracts.artifacts.push_api import (
    AttestRequest,
    Committed,
    Committing,
    Missing,
    MissingRequest,
    Plan,
    PlannedChunk,
    PlanRequest,
)
from kelvin.contracts.artifacts.runtime_control import GateFacts, GateJob
from kelvin.contracts.errors import CapacityExceeded, Conflict, InvalidRequest, NotFound, Refused, Unavailable
from kelvin.contracts.names import require_dns_label
from kelvin.contracts.traffic_errors import Overloaded
from kelvin.contracts.wire import decode
from snapshotter.intake.plan_record import KeptFile, PlanRecord
from snapshotter.intake.policy.file_roles import MAX_PATHS, MODULES, is_recipe_file
from snapshotter.intake.policy.intake import Intake, admit
from snapshotter.intake.policy.kept_tensorizer import KeptTensorizer
from snapshotter.intake.policy.layout import Layout, assemble, lay_out, pads_are_zero
from snapshotter.intake.policy.model_config import check_tokenizer_fits
from snapshotter.intake.policy.predictor_intake import predictor_facts
from snapshotter.intake.policy.quota import choose_dropped_pushes
from snapshotter.intake.policy.version_inputs import choose_sealing
from snapshotter.intake.tenant_call_limits import BodyBudget, CallLimiter, KeyedLocks
from snapshotter.push.commits import Commits, digest_of_list
from snapshotter.push.gate_jobs import GateJobs
from snapshotter.push.publisher import Publisher, Report
from snapshotter.push.staging import Staging
from snapshotter.store.attestation_store import AttestationStore
from snapshotter.store.catalog import Catalog, find_unstaged
from snapshotter.store.tenant_cache import TenantCache

# A tokenizer of 64 MiB and headers of 100 MB, as base64, with room for paths.
PLAN_BYTES: Final = 256 << 20
MAX_PLANS: Final = 2
PLAN_WAIT_S: Final = 120.0  # wait for a permit; a judge without an answer may hold one for longer (KELVIN_GATE_S)
BUDGET_BYTES: Final = 3 * PLAN_BYTES  # for bodies and large responses, half of it per tenant; more for large chunks
MAX_RECORDS: Final = 4  # plans that are read from disk; a large one takes some 150 MB
MAX_CHUNKS: Final = 16
COMMIT_WAIT_S: Final = 5.0
MAX_DECLARED_PUSHES: Final = 32
MAX_TEXT_BYTES: Final = 16 << 20  # of a plan request without file contents; MAX_PATHS paths take a third of it
_MAX_COMMAS_PER_FILE: Final = 16  # per file in a plan request, at most: between its fields, and some in its path
MAX_DRY_RUNS: Final = 8
MAX_CACHED_PARTS: Final = 600_000  # chunks and tensors of plans in memory: some 250 MB


@dataclass(frozen=True, slots=True)
class PushLimits:
    """The chunk size, and the limits of a push."""

    chunk_bytes: int
    max_version_bytes: int
    tenant_store_bytes: int  # for a tenant without its own limit


# All places of a chunk in the plan, by the digest that the client announced.
_PlacesByDigest = dict[str, list[PlannedChunk]]


class Pushes:
    """The calls of pushes; one object per process. Every method may raise `Refused` and may be repeated."""

    def __init__(
        self,
        staging: Staging,
        catalog: Catalog,
        publisher: Publisher,
        jobs: GateJobs,
        limits: PushLimits,
        attestations: AttestationStore,
    ) -> None:
        self._staging = staging
        self._catalog = catalog
        self._publisher = publisher
        self._jobs = jobs
        self._limits = limits
        self._attestations = attestations
        self.commits = Commits(self._publish)
        # In memory: whole plans, lists of digests, chunks until they are staged, responses until they are read.
        budget_bytes = max(BUDGET_BYTES, MAX_CHUNKS * limits.chunk_bytes)
        self.body_budget = BodyBudget("the memory for bodies of pushes", budget_bytes)
        self.plan_limiter = CallLimiter("the list of plans being judged", MAX_PLANS)
        self.chunk_limiter = CallLimiter("the list of chunks being stored", MAX_CHUNKS)
        self.record_limiter = CallLimiter("the list of plans being read", MAX_RECORDS)
        self._declared_places = TenantCache[_PlacesByDigest](MAX_DECLARED_PUSHES, MAX_CACHED_PARTS)
        # Plans of dry runs. They never reach the disk, so they need no clean-up.
        self._dry_runs = TenantCache[PlanRecord](MAX_DRY_RUNS, MAX_CACHED_PARTS)
        # A tenant's quota is decided for one push at a time.
        self._quota_locks = KeyedLocks()

    async def plan(self, tenant: str, body: bytes | bytearray) -> Plan:
        """Judge the directory, ask the gate, lay out the version, and open the plan."""
        request = await asyncio.to_thread(_decode_plan, body)
        require_dns_label(request.model, "model")
        intake = await asyncio.to_thread(admit, request)
        # Check this before the layout: headers may claim any size.
        if (needed_bytes := intake.total_bytes) > (max_bytes := self._limits.max_version_bytes):
            raise Refused(CapacityExceeded("bytes of one version", needed_bytes, max_bytes))
        facts = await self._judge_architecture(tenant, intake)
        sealing = choose_sealing(facts, intake.dtype, self._limits.chunk_bytes, intake.signature)
        layout, file_chunks = await asyncio.to_thread(_lay_out, intake, facts.first_use, self._limits.chunk_bytes)
        record = PlanRecord(
            plan_id="",
            tenant=tenant,
            model=request.model,
            format=sealing.format,
            chunk_bytes=sealing.chunk_bytes,
            engine=sealing.engine,
            limits=sealing.limits,
            files=layout.files,
            tensors=layout.tensors,
            chunks=layout.chunks,
            file_digests=file_chunks.digests,
            gate=facts,
            signature=sealing.signature,
            kept=_kept_file(intake.kept_tensorizer),
        )
        if request.dry_run:
            record = await asyncio.to_thread(record.with_id, "dry run")
            self._dry_runs.put(tenant, record.plan_id, record, len(record.chunks) + len(record.tensors))
            return record.to_plan()
        record = await asyncio.to_thread(record.with_id)
        kept = intake.kept_tensorizer
        contents = file_chunks.contents() | ({} if kept is None else {kept.rest_digest: kept.rest})
        await asyncio.to_thread(self._staging.open_plan, record, contents, time.time())
        return record.to_plan()

    async def _judge_architecture(self, tenant: str, intake: Intake) -> GateFacts:
        if intake.signature is not None:
            return predictor_facts()
        facts = await self._jobs.gate(_gate_job(tenant, intake))
        check_tokenizer_fits(intake.highest_token_id, facts.vocab_size)
        return facts

    async def find_missing(self, tenant: str, plan_id: str, request: MissingRequest) -> Missing:
        """Return the chunks that the client has to send: in no pack of the tenant, and not staged. Opens the push,
        unless it is a dry run. The caller holds a permit of `record_limiter`.
        """
        dry_run = self._dry_runs.get(tenant, plan_id)
        record = dry_run or await self._load(tenant, plan_id)
        record.check_digests(request.digests)
        push = await asyncio.to_thread(record.with_id, request.digests)
        limit = await self._storage_limit(tenant)
        async with self._quota_locks.hold(tenant):
            # In this order: a chunk that is packed in between appears in both, and counts once.
            open_promises = await asyncio.to_thread(self._staging.open_promises, tenant, push.plan_id, time.time())
            stored = await self._catalog.stored_chunks(tenant)
            publisher_objects = await self._attestations.publisher_objects(tenant)
            has_file_to_write = record.kept is not None and record.kept.digest not in stored
            added_bytes = record.to_declaration(request.digests, has_file_to_write).added_bytes()
            idle = choose_dropped_pushes(
                stored.stored_bytes + sum(publisher_objects.values()), stored, added_bytes, open_promises, limit
            )
            needed = find_unstaged(record, request.digests, stored)
            staged = await asyncio.to_thread(self._staging.find_staged, tenant, needed)
            staged.update(record.digests_staged_by_plan())  # also for a dry run, which stages nothing
            await asyncio.to_thread(self._staging.check_free_space, _unstaged_bytes(needed, staged))
            if dry_run is None:
                await self._drop_idle(tenant, idle, limit)
                staged = await self._open_push(push, request.digests, needed, has_file_to_write)
        version = await asyncio.to_thread(lambda: version_of(encode_manifest(record.manifest(request.digests))))
        return Missing(
            plan_id=plan_id if dry_run else push.plan_id,
            digests=tuple(digest for digest in needed if digest not in staged),
            version=version,
            exists=await self._publisher.exists(tenant, version),
        )

    async def _storage_limit(self, tenant: str) -> int:
        own = (await self._jobs.read_limits(tenant)).store_bytes
        return self._limits.tenant_store_bytes if own is None else own

    async def _open_push(
        self, push: PlanRecord, digests: tuple[str, ...], needed: dict[str, int], has_file_to_write: bool
    ) -> set[str]:
        """Declare the push. Return those of the `needed` chunks that are staged."""
        self.commits.forget(push.plan_id)  # a result of an earlier push
        await asyncio.to_thread(self._staging.open_push, push, digests, time.time(), has_file_to_write)
        self._cache_places(push, digests)
        staged = await asyncio.to_thread(self._staging.link_staged, push.tenant, push.plan_id, needed)
        if push.kept is not None and push.kept.rest in needed.keys() - staged:
            raise Refused(NotFound("plan", push.plan_id))  # dropped meanwhile; only a new plan stages it again
        return staged

    async def chunk_bytes(self, tenant: str, plan_id: str, digest: str) -> int:
        """Return the length of the chunk. Raises Conflict before `missing`, InvalidRequest if the push has no such
        chunk.
        """
        return (await self._places(tenant, plan_id, digest))[0].length

    async def put_chunk(self, tenant: str, plan_id: str, digest: str, data: bytes) -> None:
        """Check digest and padding of a chunk, and stage it. The caller has checked its length."""
        places = await self._places(tenant, plan_id, digest)
        await asyncio.to_thread(_check_chunk, places, digest, data)
        await asyncio.to_thread(self._staging.touch, tenant, plan_id, time.time())
        await asyncio.to_thread(self._staging.put_chunk, tenant, plan_id, digest, data)

    async def manifest(self, tenant: str, plan_id: str) -> bytes:
        """Return the manifest of an open push's version, for its signer. Raises NotFound, Conflict before `missing`."""
        async with self.record_limiter.hold_permit(tenant, PLAN_WAIT_S):
            record = await self._load(tenant, plan_id)
            digests = await asyncio.to_thread(self._staging.read_declared, tenant, plan_id)
            return await asyncio.to_thread(lambda: encode_manifest(record.manifest(digests)))

    async def attest(self, tenant: str, plan_id: str, request: AttestRequest) -> None:
        """Accept a publisher's statement about the version of an open push. It counts towards the tenant's stored
        bytes.
        """
        version = version_of(await self.manifest(tenant, plan_id))
        objects = self._attestations.statement_objects(tenant, version, request)
        limit = await self._storage_limit(tenant)
        async with self._quota_locks.hold(tenant):
            open_promises = await asyncio.to_thread(self._staging.open_promises, tenant, "", time.time())
            stored = await self._catalog.stored_chunks(tenant)
            publisher_objects = await self._attestations.publisher_objects(tenant)
            new = {key: len(raw) for key, raw in objects.items() if key not in publisher_objects}
            idle = choose_dropped_pushes(
                stored.stored_bytes + sum(publisher_objects.values()), stored, new, open_promises, limit
            )
            await self._drop_idle(tenant, idle, limit)
            await self._attestations.add_statement(tenant, version, objects)

    async def commit(
        self, tenant: str, plan_id: str, list_digest: str, client: str | None = None
    ) -> Committed | Committing:
        """Publish the version, or return the step of its commit. `list_digest` is the `digest_of_list` of the chunks,
        `client` the caller's name: see `Commits`.
        """
        answer = await self.commits.try_join(tenant, plan_id, list_digest, COMMIT_WAIT_S, client)
        if answer is not None:
            return answer
        await self._start_commit(tenant, plan_id, list_digest, client)
        answer = await self.commits.try_join(tenant, plan_id, list_digest, COMMIT_WAIT_S, client)
        if answer is None:  # cancelled because this process ends
            raise Refused(Unavailable("the snapshotter"))
        return answer

    async def _start_commit(self, tenant: str, plan_id: str, list_digest: str, client: str | None) -> None:
        async with self.record_limiter.hold_permit(tenant, PLAN_WAIT_S):
            record = await self._load(tenant, plan_id)
            digests = await asyncio.to_thread(self._staging.read_declared, tenant, plan_id)
            if await asyncio.to_thread(digest_of_list, digests) != list_digest:
                raise Refused(
                    Conflict("commit", "these are not the chunks of this push: request the missing chunks first")
                )
            if plan_id not in self.commits:  # another request may have started it
                self.commits.start(record, digests, client)

    async def _publish(self, record: PlanRecord, digests: tuple[str, ...], report: Report) -> Committed:
        """Publish the version, then drop what was staged. Also drop it if it can never be published."""
        try:
            with self._staging.pin(record.plan_id):
                committed = await self._publisher.publish(record, digests, report)
        except Refused as refused:
            # A full store is not the push's fault. It continues once there is room.
            if not (refused.failure.retryable or isinstance(refused.failure, Conflict | CapacityExceeded)):
                await self._drop_with_plan(record)
            raise
        await self._drop_with_plan(record)
        return committed

    async def _drop_with_plan(self, record: PlanRecord) -> None:
        """Drop the push and the plan that it began with."""
        await self._drop(record.tenant, record.plan_id)
        await self._drop(record.tenant, (await asyncio.to_thread(record.with_id)).plan_id)

    async def _drop_idle(self, tenant: str, plan_ids: tuple[str, ...], limit: int) -> None:
        """Drop pushes that were idle when they were chosen. Raises `Refused(Overloaded)` if the client of one is active
        again. The caller's next attempt chooses again.
        """
        for plan_id in plan_ids:
            if not await asyncio.to_thread(self._staging.drop_idle, tenant, plan_id, time.time()):
                raise Refused(Overloaded("the tenant's storage quota", limit, 1.0, "bytes"))
            self._declared_places.drop(tenant, plan_id)

    async def _drop(self, tenant: str, plan_id: str) -> None:
        self._declared_places.drop(tenant, plan_id)
        await asyncio.to_thread(self._staging.drop, tenant, plan_id)

    async def _load(self, tenant: str, plan_id: str) -> PlanRecord:
        record = await asyncio.to_thread(self._staging.load_plan, tenant, plan_id)
        await asyncio.to_thread(self._staging.touch, tenant, plan_id, time.time())
        return record

    async def _places(self, tenant: str, plan_id: str, digest: str) -> list[PlannedChunk]:
        declared = self._declared_places.get(tenant, plan_id)
        if declared is None:  # this process started after the client's `missing` call
            declared = await self._load_places(tenant, plan_id)
        if digest not in declared:
            raise Refused(InvalidRequest("digest", digest[:64], "is not a chunk of this plan"))
        return declared[digest]

    async def _load_places(self, tenant: str, plan_id: str) -> _PlacesByDigest:
        async with self.record_limiter.hold_permit(tenant, PLAN_WAIT_S):
            if (declared := self._declared_places.get(tenant, plan_id)) is not None:  # another request loaded it
                return declared
            record = await self._load(tenant, plan_id)
            digests = await asyncio.to_thread(self._staging.read_declared, tenant, plan_id)
            return self._cache_places(record, digests)

    def _cache_places(self, record: PlanRecord, digests: tuple[str, ...]) -> _PlacesByDigest:
        declared: _PlacesByDigest = {}
        for digest, chunk in zip(digests, record.chunks, strict=True):
            declared.setdefault(digest, []).append(chunk)
        self._declared_places.put(record.tenant, record.plan_id, declared, len(digests))
        return declared


class _RawWhole(Struct, frozen=True):
    between: Raw = Raw(b"")


class _RawFile(Struct, frozen=True):
    content: Raw = Raw(b"")
    header: Raw = Raw(b"")
    whole: _RawWhole | None = None

    def nbytes(self) -> int:
        found = (self.content, self.header, *(() if self.whole is None else (self.whole.between,)))
        return sum(memoryview(each).nbytes for each in found)


class _RawFiles(Struct, frozen=True):
    """The contents of files in a plan request, as raw slices of its body."""

    small_files: tuple[_RawFile, ...] = ()
    weights: tuple[_RawFile, ...] = ()


def _decode_plan(body: bytes | bytearray) -> PlanRequest:
    """Decode a plan. Count and measure it before parsing, to limit the memory. A path of four bytes takes eighty in
    memory, and a text with one wide character four times its bytes. File contents are base64, so they have no wide
    character.
    """
    if body.count(b",") > MAX_PATHS * _MAX_COMMAS_PER_FILE:
        raise Refused(ArtifactRejected("model", f"a directory may hold at most {MAX_PATHS} files"))
    files = decode(body, _RawFiles)
    if len(body) - sum(file.nbytes() for file in (*files.small_files, *files.weights)) > MAX_TEXT_BYTES:
        what = "(without the contents of files)"
        raise Refused(InvalidRequest("body", what, f"may take at most {MAX_TEXT_BYTES} bytes"))
    return decode(body, PlanRequest)


@dataclass(frozen=True, slots=True)
class _FileChunks:
    """The chunks of the pinned files. They are made here from the judged files, so that a client can't send others."""

    digests: tuple[str, ...]
    data: tuple[bytes, ...]

    def contents(self) -> dict[str, bytes]:
        return dict(zip(self.digests, self.data, strict=True))


def _lay_out(intake: Intake, first_use: tuple[str, ...], chunk_bytes: int) -> tuple[Layout, _FileChunks]:
    files = [(file, blake3(file.content).hexdigest()) for file in intake.files]
    layout = lay_out(files, intake.tensors, first_use, chunk_bytes)
    contents = {file.path: file.content for file in intake.files}
    data = tuple(assemble(chunk, contents) for chunk in layout.chunks[: layout.file_chunks])
    return layout, _FileChunks(tuple(blake3(chunk).hexdigest() for chunk in data), data)


def _unstaged_bytes(chunks: dict[str, int], staged: set[str]) -> int:
    return sum(length for digest, length in chunks.items() if digest not in staged)


def _kept_file(whole: KeptTensorizer | None) -> KeptFile | None:
    if whole is None:
        return None
    return KeptFile(
        path=whole.path, size=whole.size, digest=whole.digest, rest=whole.rest_digest, rest_bytes=len(whole.rest)
    )


def _gate_job(tenant: str, intake: Intake) -> GateJob:
    tensors = {tensor.name: (str(tensor.dtype), tensor.shape) for tensor in intake.tensors}
    recipe = {file.path: file.content.decode() for file in intake.files if is_recipe_file(file.path)}
    return GateJob(
        config_json=intake.config_json, tensors=tensors, recipe=recipe if MODULES in recipe else {}, tenant=tenant
    )


def _check_chunk(places: list[PlannedChunk], digest: str, data: bytes) -> None:
    found = blake3(data).hexdigest()
    if found != digest:
        raise Refused(InvalidRequest("chunk", found, f"its bytes do not match {digest}"))
    if not all(pads_are_zero(place, data) for place in places):
        raise Refused(InvalidRequest("chunk", digest, "its padding must be zeros"))
