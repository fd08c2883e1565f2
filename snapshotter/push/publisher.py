"""Publish a version from a push: packs, indexes, draft, seal, attestation, manifest, registration. All idempotent.

The order is the invariant: an object is written and read back before anything refers to it. So a crash leaves
unreferenced objects, never a dangling reference. A retry skips the steps that are done.
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final

from blake3 import blake3
from msgspec import structs

from kelvin.blobstore.blob_store import BlobNotFound, BlobShort, BlobStore
from kelvin.blobstore.bounded_gather import bounded_gather
from kelvin.blobstore.chunk_locations import encode_pack_list, read_chunk
from kelvin.blobstore.packs import FileIndex, PackEntry, assign_offsets, encode_file_index, encode_footer, encode_table
from kelvin.contracts.artifact_errors import NON_CHUNK_CODES, ArtifactRejected, ChunkCorrupt
from kelvin.contracts.artifacts.manifest import Manifest, encode_manifest, version_of
from kelvin.contracts.artifacts.object_keys import (
    condemned_key,
    draft_key,
    index_key,
    inputs_key,
    manifest_key,
    pack_key,
    pack_list_key,
)
from kelvin.contracts.artifacts.push_api import CommitStep, Committed
from kelvin.contracts.artifacts.runtime_control import SealAttestation, SealJob
from kelvin.contracts.errors import Conflict, Refused, Unavailable
from kelvin.contracts.serving.control_messages import VersionRegistration
from snapshotter.intake.plan_record import KeptFile, PlanRecord
from snapshotter.intake.policy.kept_tensorizer import FilePart, file_parts
from snapshotter.intake.policy.layout import group_into_packs
from snapshotter.intake.tenant_call_limits import KeyedLocks
from snapshotter.push.gate_jobs import GateJobs
from snapshotter.push.staging import Staging
from snapshotter.store.attestation_store import AttestationStore
from snapshotter.store.catalog import Catalog
from snapshotter.store.pack_check import (
    ensure_object,
    has_content,
    has_digest,
    try_file_index,
    verify_file,
    verify_pack,
)

Report = Callable[[CommitStep], None]
_BLOCK: Final = 8 << 20
_MAX_CACHED_CHUNKS: Final = 4

_caller_key_id: ContextVar[str] = ContextVar("pushed_by", default="")


def set_caller_key(key_id: str) -> None:
    """Set the API key for the requests of this task and the tasks that it starts, as in
    `kelvin.process.request_context`.

    The key is not part of the plan, whose id is the digest of its content.
    """
    _caller_key_id.set(key_id)


@dataclass(frozen=True, slots=True, eq=False)
class RunningCommit:
    """A running commit's version and chunks, from before it lists the store until the version is registered."""

    tenant: str
    version: str
    chunks: frozenset[str]


class KeptFileReader:
    """One pass over the file that `record` keeps: its staged chunks and the bytes between them, in file order.

    Each chunk is verified at its first read, and the whole file at the end, so other bytes are never visible under the
    file's name. Holds a block and a few chunks in memory.
    """

    def __init__(self, staging: Staging, record: PlanRecord, digests: tuple[str, ...]) -> None:
        assert record.kept is not None
        self._staging = staging
        self._record = record
        self._kept = record.kept
        count = len(record.file_digests)
        self._parts = file_parts(record.chunks[count:], digests[count:], self._kept.size)
        self._cache: OrderedDict[str, bytes] = OrderedDict()
        self._verified: set[str] = set()

    async def blocks(self) -> AsyncIterator[bytes]:
        """Yield the file. Raises `Refused`: Conflict if a staged chunk was lost, ArtifactRejected if the file differs
        from the announced one.
        """
        hasher = blake3()
        block = bytearray()
        for part in self._parts:
            block += await self._read(part)
            if len(block) >= _BLOCK:
                yield await asyncio.to_thread(_hash_block, hasher, block)
                block = bytearray()
        last = await asyncio.to_thread(_hash_block, hasher, block)
        if hasher.hexdigest() != self._kept.digest:
            rule = "its tensors and the bytes between them do not match the file's digest"
            raise Refused(ArtifactRejected(self._kept.path, rule))
        yield last

    async def _read(self, part: FilePart) -> bytes:
        digest = part.digest or self._kept.rest
        if digest in self._verified and digest not in self._cache:  # scattered tensors: read only the part
            key = self._staging_key(digest)
            return await asyncio.to_thread(self._staging.read_chunk_part, *key, part.offset, part.length)
        data = self._cache.get(digest) or await self._read_verified(digest)
        self._cache.move_to_end(digest)
        return data[part.offset : part.offset + part.length]

    async def _read_verified(self, digest: str) -> bytes:
        data = await asyncio.to_thread(self._staging.read_chunk, *self._staging_key(digest))
        if not await has_digest(data, digest):
            raise await _discard_damaged(self._staging, self._record, digest)
        self._verified.add(digest)
        self._cache[digest] = data
        while len(self._cache) > _MAX_CACHED_CHUNKS:
            self._cache.popitem(last=False)
        return data

    def _staging_key(self, digest: str) -> tuple[str, str, str]:
        return self._record.tenant, self._record.plan_id, digest


async def _discard_damaged(staging: Staging, record: PlanRecord, damaged_digest: str) -> Refused:
    """Discard the staged chunk `damaged_digest` and all other damaged chunks of the push. Return the refusal to raise.
    A power cut damages many chunks at once. The client then requests the missing chunks and sends all of them in one
    round.
    """
    await asyncio.to_thread(staging.discard_chunk, record.tenant, damaged_digest)
    for digest in await asyncio.to_thread(staging.staged_digests, record.tenant, record.plan_id):
        data = await asyncio.to_thread(staging.read_chunk, record.tenant, record.plan_id, digest)
        if not await has_digest(data, digest):
            await asyncio.to_thread(staging.discard_chunk, record.tenant, digest)
    return Refused(Conflict("commit", "chunks were lost after they were sent: send them again"))


def _hash_block(hasher: blake3, block: bytearray) -> bytes:
    hasher.update(block)
    return bytes(block)


class Publisher:
    """The publisher of versions. One commit at a time writes a tenant's packs, and one at a time seals a version."""

    def __init__(
        self,
        store: BlobStore,
        staging: Staging,
        catalog: Catalog,
        jobs: GateJobs,
        pack_bytes: int,
        attestations: AttestationStore,
    ) -> None:
        self._store = store
        self._staging = staging
        self._catalog = catalog
        self._jobs = jobs
        self._pack_bytes = pack_bytes
        self._attestations = attestations
        self._tenant_locks = KeyedLocks()
        self._version_locks = KeyedLocks()
        self._running: list[RunningCommit] = []

    def __repr__(self) -> str:
        return f"<Publisher packing={len(self._tenant_locks)} sealing={len(self._version_locks)}>"

    async def exists(self, tenant: str, version: str) -> bool:
        """Return whether readers can see the version."""
        try:
            await self._store.stat(manifest_key(tenant, version))
        except BlobNotFound:
            return False
        return True

    async def publish(self, record: PlanRecord, digests: tuple[str, ...], report: Report) -> Committed:
        """Publish the version of `digests`, continuing where an earlier attempt stopped.

        Raises `Refused`: Conflict for a chunk that was not sent (request the missing chunks again), ChunkCorrupt if the
        store returns other bytes than it got, CapacityExceeded if it is full. ArtifactRejected if a kept file differs
        from the announced one, Conflict if the version is still damaged after a failed restore, Unavailable, and the
        sealing job's refusals.
        """
        manifest = record.manifest(digests)
        raw = encode_manifest(manifest)
        version = version_of(raw)
        with self._track_running(RunningCommit(record.tenant, version, frozenset(digests))):
            async with self._tenant_locks.hold(record.tenant):
                stored = await self._catalog.stored_chunks(record.tenant)
                missing = to_pack = stored.find_missing(record.chunk_lengths(digests))
                if record.kept is not None and record.kept.digest not in stored:
                    await self._keep_file(record, record.kept, digests, report)
                    to_pack = stored.find_missing(record.pinned_chunk_lengths(digests))
                for chunks in group_into_packs(to_pack.items(), self._pack_bytes):
                    await self._write_pack(record, chunks, report)
                await self._write_pack_list(record.tenant, version, digests)
            async with self._version_locks.hold(f"{record.tenant}/{version}"):
                inputs = record.digest_of_inputs(digests)
                created, resealed = await self._ensure_version(record.tenant, version, manifest, inputs, report)
            report(CommitStep.PUBLISHING)
            await self._store.delete(condemned_key(record.tenant, version))  # left if the version was deleted before
            registration = _registration(record, version, manifest)
            result = await self._jobs.register(registration)
            if result is not None and result.fault is not None:
                report(CommitStep.VERIFYING)
                await self._check_after_failed_restore(registration, digests, result.fault, is_resealed=resealed)
                result = await self._jobs.register(structs.replace(registration, checked=True))
        return Committed(
            model=record.model,
            version=version,
            created=created,
            total_bytes=manifest.total_bytes,
            new_chunks=len(missing),
            restored=result is not None and result.was_deleted,
            start_problem=None if result is None or result.start_problem is None else result.start_problem.message,
        )

    async def add_seal(self, tenant: str, seal: SealAttestation) -> None:
        """Store a seal that a replica recorded for an unsealed fingerprint. One at a time for a version. Raises
        NotFound, ManifestMissing.
        """
        async with self._version_locks.hold(f"{tenant}/{seal.version}"):
            await self._attestations.add_seal(tenant, seal)

    @asynccontextmanager
    async def hold_packs(self, tenant: str) -> AsyncIterator[tuple[RunningCommit, ...]]:
        """Keep commits of the tenant from writing packs in the block. Yields the running commits. Each waits to write
        packs, or has written them and is not registered yet.
        """
        async with self._tenant_locks.hold(tenant):
            yield tuple(each for each in self._running if each.tenant == tenant)

    @contextmanager
    def _track_running(self, commit: RunningCommit) -> Iterator[None]:
        """Protect what the commit needs from collections."""
        self._running.append(commit)
        try:
            yield
        finally:
            self._running.remove(commit)

    async def _check_after_failed_restore(
        self, registration: VersionRegistration, digests: tuple[str, ...], fault: str, *, is_resealed: bool
    ) -> None:
        """Read all chunks of a version after a failed restore.

        Raises `Refused(Conflict)` if a chunk is damaged. Also raises it if known answers or an attestation failed and
        this push has not sealed the version again: good chunks don't prove that these are good now.
        """
        object_name, failed = f"version {registration.version[:12]}", f"its last restore failed ({fault})"
        if fault in NON_CHUNK_CODES and not is_resealed:
            hint = f"send one request to MODEL@{registration.version[:12]}, where MODEL is the model that failed"
            rule = f"{failed}, and this push did not seal it again: {hint}"
            raise Refused(Conflict(object_name, rule))
        places = await self._catalog.chunk_places(registration.tenant)

        async def check(digest: str) -> None:
            try:
                place = places[digest]
                data = await read_chunk(self._store, pack_key(registration.tenant, place.pack), place)
            except (KeyError, BlobNotFound, BlobShort):
                data = b""
            if not await has_digest(data, digest):
                rule = f"{failed}, and chunk {digest} is damaged in the store: `kelvin fsck` shows how to repair it"
                raise Refused(Conflict(object_name, rule))

        await bounded_gather(check, dict.fromkeys(digests), _MAX_CACHED_CHUNKS)

    async def _write_pack(self, record: PlanRecord, chunks: tuple[tuple[str, int], ...], report: Report) -> None:
        report(CommitStep.PACKING)
        entries = assign_offsets(chunks)
        footer = encode_footer(entries)
        pack = await self._digest_of_pack(record, entries, footer)
        key = pack_key(record.tenant, pack)
        for attempt in (1, 2):
            await self._store.put_if_absent(key, self._pieces(record, entries, footer))
            report(CommitStep.VERIFYING)
            found = await verify_pack(self._store, record.tenant, pack)
            if found.is_intact and found.entries == entries:
                break
            # Written wrongly, or damaged after an earlier attempt. Nothing refers to it yet.
            await self._store.delete(key)
            if attempt == 2:
                raise Refused(ChunkCorrupt(min(found.damaged_chunks, default=pack), "store"))
        await self._ensure_object(index_key(record.tenant, pack), encode_table(entries))

    async def _keep_file(self, record: PlanRecord, kept: KeptFile, digests: tuple[str, ...], report: Report) -> None:
        """Store the file unchanged, then the index by which readers find chunks in it."""
        report(CommitStep.PACKING)
        index = record.file_index(digests)
        key = pack_key(record.tenant, kept.pack)
        for attempt in (1, 2):
            await self._store.put_if_absent(key, KeptFileReader(self._staging, record, digests).blocks())
            report(CommitStep.VERIFYING)
            # Verify the chunks, too: an existing file may hold other chunks at these places.
            found = await verify_file(self._store, record.tenant, kept.pack, index)
            if found.is_intact:
                break
            if found.digest_matches:
                rule = f"chunk {min(found.damaged_chunks)} is not at the place in it that the push states"
                raise Refused(ArtifactRejected(kept.path, rule))
            await self._store.delete(key)
            if attempt == 2:
                raise Refused(ChunkCorrupt(kept.digest, "store"))
        await self._check_no_other_index(record.tenant, kept.pack, index)
        await self._ensure_object(index_key(record.tenant, kept.pack), encode_file_index(index))

    async def _check_no_other_index(self, tenant: str, pack: str, index: FileIndex) -> None:
        """Raise `Refused(Unavailable)` if the file has a good index with other chunks. That index could not be read
        when this commit began, and versions find their chunks by it. The next attempt packs the chunks that it lacks.
        """
        existing = await try_file_index(self._store, tenant, pack)
        if existing is not None and existing != index:
            raise Refused(Unavailable("the object store"))

    async def _write_pack_list(self, tenant: str, version: str, digests: tuple[str, ...]) -> None:
        """Write the list of the version's packs, so that readers need not read all of the tenant's indexes."""
        places = await self._catalog.chunk_places(tenant)
        packs = {places[digest].pack for digest in digests if digest in places}
        await self._ensure_object(pack_list_key(tenant, version), encode_pack_list(packs))

    async def _digest_of_pack(self, record: PlanRecord, entries: tuple[PackEntry, ...], footer: bytes) -> str:
        """Return the digest of the pack to write. Verifies each staged chunk, since a power cut may have lost its
        bytes.
        """
        hasher = blake3()
        for entry in entries:
            data = await self._read_staged(record, entry.digest)
            digest = await asyncio.to_thread(_hash_chunk, hasher, data)
            if digest != entry.digest or len(data) != entry.length:
                raise await _discard_damaged(self._staging, record, entry.digest)
        hasher.update(footer)
        return hasher.hexdigest()

    async def _pieces(self, record: PlanRecord, entries: tuple[PackEntry, ...], footer: bytes) -> AsyncIterator[bytes]:
        for entry in entries:
            yield await self._read_staged(record, entry.digest)
        yield footer

    async def _read_staged(self, record: PlanRecord, digest: str) -> bytes:
        return await asyncio.to_thread(self._staging.read_chunk, record.tenant, record.plan_id, digest)

    async def _ensure_version(
        self, tenant: str, version: str, manifest: Manifest, inputs_name: str, report: Report
    ) -> tuple[bool, bool]:
        """Return whether this call created and whether it sealed the version. A good seal is kept."""
        raw = encode_manifest(manifest)
        draft, published = draft_key(tenant, version), manifest_key(tenant, version)
        sealed = await self._attestations.is_sealed(tenant, version)
        created, is_there = False, sealed and await has_content(self._store, published, raw)
        if not is_there:
            try:
                await self._ensure_object(draft, raw)
                if not sealed:
                    report(CommitStep.SEALING)
                    await self._seal(tenant, version, manifest)
                # Write the manifest last, so that a reader never sees half a version.
                created = await self._ensure_object(published, raw)
            except Refused:
                await self._store.delete(draft)
                raise
        await self._ensure_object(inputs_key(tenant, inputs_name), version.encode())
        await self._store.delete(draft)
        return created, not sealed

    async def _seal(self, tenant: str, version: str, manifest: Manifest) -> None:
        total, distinct = manifest.total_bytes, sum({chunk.digest: chunk.length for chunk in manifest.chunks}.values())
        # An older control plane does not know `distinct_bytes`, so send it only if it differs.
        job = SealJob(
            tenant=tenant, version=version, total_bytes=total, distinct_bytes=distinct if distinct < total else 0
        )
        seal = await self._jobs.seal(job)
        await self._attestations.store_seal(tenant, version, seal)

    async def _ensure_object(self, key: str, raw: bytes) -> bool:
        return await ensure_object(self._store, key, raw, ChunkCorrupt(version_of(raw), "store"))


def _registration(record: PlanRecord, version: str, manifest: Manifest) -> VersionRegistration:
    return VersionRegistration(
        tenant=record.tenant,
        model=record.model,
        version=version,
        limits=record.limits,
        architecture=record.engine.architecture,
        # An ONNX graph contains its weights.
        weight_bytes=manifest.weight_bytes or sum(file.size for file in manifest.files),
        total_bytes=manifest.total_bytes,
        kv_bytes_per_token=record.gate.kv_bytes_per_token,
        max_positions=record.gate.max_positions,
        kind=record.engine.kind,
        signature=record.signature,
        pushed_by=_caller_key_id.get(),
    )


def _hash_chunk(hasher: blake3, data: bytes) -> str:
    hasher.update(data)
    return blake3(data).hexdigest()
