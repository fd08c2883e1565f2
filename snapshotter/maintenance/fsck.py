"""Check a tenant's objects: every byte against its digest, every reference against its target. Changes nothing.

Manifests are listed before packs, so a version that is published meanwhile is no fault. Unfinished objects are faults
only while no push of the tenant runs. Leftovers of a killed collection are counted; they are no fault if certainly no
version needs them.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from blake3 import blake3

from kelvin.blobstore.blob_store import BlobNotFound, BlobStore, BlobUnavailable, list_objects
from kelvin.blobstore.bounded_gather import bounded_gather
from kelvin.blobstore.chunk_locations import ChunkLocation, decode_pack_list, read_chunk
from kelvin.blobstore.packs import digest_of_file_pack
from kelvin.contracts.artifacts.attestation import shorten_key_id
from kelvin.contracts.artifacts.manifest import Manifest, decode_manifest
from kelvin.contracts.artifacts.object_keys import (
    ATTESTATIONS,
    CONDEMNED,
    DRAFTS,
    INDEX,
    INPUTS,
    MANIFESTS,
    PACK_LISTS,
    PACKS,
    SEAL_PREFIX,
    attestations_prefix,
    index_key,
    inputs_key,
    is_object_key,
    manifest_key,
    object_name,
    pack_key,
)
from kelvin.contracts.artifacts.push_api import (
    AttestationEntry,
    FsckBroken,
    FsckFinding,
    FsckLine,
    FsckProgress,
    FsckSummary,
)
from kelvin.contracts.errors import Refused
from kelvin.contracts.problem import to_wire
from kelvin.contracts.traffic_errors import Overloaded
from snapshotter.intake.policy.version_inputs import Sealing, inputs_digest
from snapshotter.store.attestation_store import AttestationStore
from snapshotter.store.pack_check import MAX_NAMED_CHUNKS, check_file, check_pack

_KINDS: Final = (ATTESTATIONS, CONDEMNED, DRAFTS, INPUTS, MANIFESTS, PACK_LISTS)  # packs are listed after manifests

MAX_CHECKS: Final = 4  # concurrent checks, one per tenant; each lasts as long as its client reads
MAX_UNREADABLE: Final = 8  # a check fails once more objects than this can't be read
PUSH_AGAIN: Final = "push the model again from its source"
PUSH_OR_DELETE: Final = f"{PUSH_AGAIN}, or delete it, which deletes the version"


@dataclass(slots=True, repr=False)
class Fsck:
    """The checks of tenants' objects: one at a time for each tenant, `MAX_CHECKS` in all."""

    store: BlobStore
    is_running: Callable[[str], bool]  # whether a commit or collection of the tenant runs
    list_named_versions: Callable[[str], Awaitable[tuple[str, ...]]]  # the versions that the tenant's models name
    attestations: AttestationStore
    pending_versions: Callable[[str], set[str]]  # the versions that the tenant's open pushes make
    _checking: set[str] = field(default_factory=set)  # tenants

    def __repr__(self) -> str:
        return f"<Fsck running={len(self._checking)}>"

    async def check(self, tenant: str) -> AsyncIterator[FsckLine]:
        """Yield findings and progress as they occur, then a summary, or `FsckBroken` if the store fails.

        If too many checks run, it yields only `FsckBroken` with `Overloaded`.
        """
        if tenant in self._checking or len(self._checking) >= MAX_CHECKS:
            busy = ("this tenant's checks", 1) if tenant in self._checking else ("the list of checks", MAX_CHECKS)
            yield FsckBroken(failure=to_wire(Overloaded(*busy, 30.0)))
            return
        self._checking.add(tenant)
        check, findings = _Check(self, tenant), 0
        try:
            async for line in check.lines():
                findings += isinstance(line, FsckFinding)
                yield line
            yield check.summary(findings)
        except Refused as refused:
            yield FsckBroken(failure=to_wire(refused.failure))
        finally:
            self._checking.discard(tenant)


class _Check:
    """One check of one tenant, and what it has learned so far."""

    def __init__(self, fsck: Fsck, tenant: str) -> None:
        self._fsck = fsck
        self._store = fsck.store
        self._tenant = tenant
        self._named_versions: frozenset[str] = frozenset()  # versions that a model names
        self._pending_versions: set[str] = set()  # versions that open pushes make; read only if needed
        self._condemned_versions: frozenset[str] = frozenset()  # versions that a collection marked and no model names
        self._manifests: dict[str, Manifest] = {}
        self._unreadable_versions: set[str] = set()  # versions with an unreadable manifest, whose needs are unknown
        self._places: dict[str, ChunkLocation] = {}  # verified chunks only
        self._chunks_by_pack: dict[str, frozenset[str]] = {}  # verified chunks of each pack that was read
        self._unindexed_packs: set[str] = set()  # packs without an index
        self._sealed_versions: set[str] = set()  # versions with a good seal
        self._versions_with_inputs: set[str] = set()  # versions whose inputs are recorded
        self._checked_bytes = 0
        self._leftover_count = 0  # objects left by an unfinished collection; the next one frees them
        self._unreadable_keys: set[str] = set()  # keys of objects that could not be read
        self._was_push_running = False

    async def lines(self) -> AsyncIterator[FsckLine]:
        """Yield findings and progress. Raises `Refused` if the store does not answer."""
        self._note_running_push()
        self._named_versions = frozenset(await self._fsck.list_named_versions(self._tenant))
        keys = {kind: await list_objects(self._store, self._tenant, kind) for kind in _KINDS}
        self._condemned_versions = frozenset(map(object_name, keys[CONDEMNED])) - self._named_versions
        for lines in (
            self._check_each(keys[MANIFESTS], self._check_manifest),
            self._check_named(keys[MANIFESTS]),
            self._check_packs(),
            self._check_each(keys[MANIFESTS], self._check_references),
            self._check_attestations(keys),
            self._check_inputs(keys[INPUTS]),
            self._check_each(keys[PACK_LISTS], self._check_pack_list),
            self._check_unfinished(keys[DRAFTS]),
        ):
            async for line in lines:
                yield line
        async for key in self._store.list(f"{self._tenant}/"):
            if not is_object_key(key):
                yield FsckFinding(key=key, fault="no object of this format has such a name", mend="delete it")

    def summary(self, findings: int) -> FsckSummary:
        """Return the last line, after `findings` findings."""
        used = {chunk.digest for manifest in self._manifests.values() for chunk in manifest.chunks}
        unused = [place.length for digest, place in self._places.items() if digest not in used]
        return FsckSummary(
            versions=len(self._manifests),
            unnamed_versions=len(self._manifests.keys() - self._named_versions),
            packs=len(self._chunks_by_pack),
            chunks=len(self._places),
            checked_bytes=self._checked_bytes,
            unreferenced_chunks=len(unused),
            unreferenced_bytes=sum(unused),
            findings=findings,
            leftovers=self._leftover_count,
            pushes_running=self._was_push_running,
        )

    async def _check_each(
        self, keys: Iterable[str], check: Callable[[str], Awaitable[Iterable[FsckLine]]]
    ) -> AsyncIterator[FsckLine]:
        """Yield the results of `check` for each object. An object that vanished was collected meanwhile; the check of
        its user reports it. An unreadable object is a finding.
        """
        for key in keys:
            try:
                lines = await check(key)
            except BlobNotFound:
                continue
            except BlobUnavailable as error:
                lines = (self._unreadable_finding(key, error),)
            for line in lines:
                yield line

    def _unreadable_finding(self, key: str, error: BlobUnavailable) -> FsckFinding:
        """Return the finding of an unreadable object. Raise `error` instead if there are more than MAX_UNREADABLE."""
        self._unreadable_keys.add(key)
        if len(self._unreadable_keys) > MAX_UNREADABLE:
            raise error
        mend = "repair the disk or the connection to the store; if that does not help, delete it, then"
        fault = "it or an object that belongs to it can't be read now"
        return FsckFinding(key=key, fault=fault, mend=f"{mend} {PUSH_AGAIN}")

    async def _check_manifest(self, key: str) -> Iterable[FsckLine]:
        version = object_name(key)
        try:
            self._manifests[version] = decode_manifest(await self._store.read(key), version)
        except BlobNotFound:
            raise
        except Refused as refused:
            self._unreadable_versions.add(version)
            if isinstance(refused, BlobUnavailable):
                raise
            return (FsckFinding(key=key, fault=refused.failure.message, mend=PUSH_OR_DELETE),)
        return ()

    async def _check_named(self, keys: list[str]) -> AsyncIterator[FsckLine]:
        """Find named versions without a manifest. A version that was deleted meanwhile is no fault."""
        missing = self._named_versions - {object_name(key) for key in keys}
        if missing:
            missing &= frozenset(await self._fsck.list_named_versions(self._tenant))
        for version in sorted(missing):
            fault = "a model names this version, but its manifest is missing"
            mend = f"restore the store from your own copy, {PUSH_AGAIN}, or `kelvin versions delete` it"
            yield FsckFinding(key=manifest_key(self._tenant, version), fault=fault, mend=mend)

    async def _check_packs(self) -> AsyncIterator[FsckLine]:
        packs, indexes = [await list_objects(self._store, self._tenant, kind) for kind in (PACKS, INDEX)]
        found = zip(packs, await bounded_gather(self._size, packs), strict=True)
        sizes = {key: size for key, size in found if size is not None}
        async for line in self._check_each(sizes, partial(self._check_pack, sum(sizes.values()))):
            yield line
        async for finding in self._check_unindexed():
            yield finding
        for key in indexes:
            pack = pack_key(self._tenant, object_name(key))
            if pack not in sizes and not await self._exists(pack) and await self._exists(key):
                yield FsckFinding(key=key, fault="its pack is missing", mend=f"delete it, then {PUSH_AGAIN}")

    async def _check_pack(self, total_bytes: int, key: str) -> Iterable[FsckLine]:
        pack = object_name(key)
        check_object = check_pack if digest_of_file_pack(pack) is None else check_file
        check = await check_object(self._store, self._tenant, pack, PUSH_AGAIN)
        self._checked_bytes += check.size
        self._places.update(check.places)
        self._chunks_by_pack[pack] = frozenset(check.places)
        if not check.is_indexed:
            self._unindexed_packs.add(pack)
        total_bytes = max(total_bytes, self._checked_bytes)
        return (*check.findings, FsckProgress(checked_bytes=self._checked_bytes, total_bytes=total_bytes))

    async def _check_unindexed(self) -> AsyncIterator[FsckFinding]:
        """Yield a finding for each pack without an index.

        It advises deletion only for a pack that no version can need, because the source of a version may be lost.
        """
        if not self._unindexed_packs:
            return
        self._note_running_push()
        if self._was_push_running:  # a push writes a pack shortly before its index
            return
        # If a push has ended since its pack was read, the index exists by now.
        unindexed = {pack for pack in self._unindexed_packs if not await self._exists(index_key(self._tenant, pack))}
        wanted = {chunk.digest for manifest in self._manifests.values() for chunk in manifest.chunks}
        are_chunks_missing = not wanted <= self._places.keys() or not self._named_versions <= self._manifests.keys()
        indexed_packs = self._chunks_by_pack.keys() - unindexed
        indexed = frozenset[str]().union(*(self._chunks_by_pack[pack] for pack in indexed_packs))
        for pack in sorted(unindexed):
            # Only the index names a kept file's chunks, so any kept file without one may hold the missing chunks.
            only_here = wanted & self._chunks_by_pack[pack] - indexed
            has_wanted = not wanted.isdisjoint(self._chunks_by_pack[pack])  # a collection then keeps it
            if not (has_wanted or are_chunks_missing or self._unreadable_versions):
                self._leftover_count += 1  # a collection frees the index of a pack first
                continue
            is_needed = bool(only_here) or (are_chunks_missing and digest_of_file_pack(pack) is not None)
            deletion = f"or delete {pack_key(self._tenant, pack)}"
            mend = f"{PUSH_AGAIN}, {'keep the pack: a version may need it' if is_needed else deletion}"
            fault = "the index of a pack is missing"
            yield FsckFinding(key=index_key(self._tenant, pack), fault=fault, mend=mend)

    async def _check_references(self, key: str) -> Iterable[FsckLine]:
        manifest = self._manifests.get(object_name(key))
        if manifest is None:
            return ()  # it can't be read, which was reported
        wanted = {chunk.digest: chunk.length for chunk in manifest.chunks}
        missing = [
            digest
            for digest, length in wanted.items()
            if digest not in self._places or self._places[digest].length != length
        ]
        if missing and not await self._exists(key):
            return ()  # collected meanwhile, and then its packs
        if missing:
            examples = ", ".join(missing[:MAX_NAMED_CHUNKS])
            fault = f"{len(missing)} of {len(wanted)} chunks are missing or damaged: {examples}"
            mend = f"after the packs above, {PUSH_OR_DELETE}"
            if any(unreadable_key.startswith(pack_key(self._tenant, "")) for unreadable_key in self._unreadable_keys):
                fault = f"{len(missing)} of {len(wanted)} chunks are in none of the packs that can be read: {examples}"
                mend = "make the packs above readable, then check again"
            return (FsckFinding(key=key, fault=fault, mend=mend),)
        fault = "the pinned file {} does not match its digest"
        mend = f"delete it, then {PUSH_AGAIN}"
        damaged = await self._damaged_files(manifest)
        return [FsckFinding(key=key, fault=fault.format(path), mend=mend) for path in damaged]

    async def _damaged_files(self, manifest: Manifest) -> list[str]:
        """Return the pinned files whose bytes differ from the manifest's digest although each chunk matches its own."""
        if not manifest.files:
            return []
        end = max(file.offset + file.size for file in manifest.files)
        space = bytearray()
        for chunk in manifest.chunks:
            if len(space) >= end:
                break
            place = self._places[chunk.digest]
            space += await read_chunk(self._store, pack_key(self._tenant, place.pack), place)
        return [
            file.path
            for file in manifest.files
            if blake3(memoryview(space)[file.offset : file.offset + file.size]).hexdigest() != file.digest
        ]

    async def _check_attestations(self, keys: dict[str, list[str]]) -> AsyncIterator[FsckLine]:
        existing = {object_name(key) for kind in (MANIFESTS, DRAFTS) for key in keys[kind]}
        versions = dict.fromkeys(key.split("/")[2] for key in keys[ATTESTATIONS])
        if not versions.keys() <= existing:
            self._pending_versions = await asyncio.to_thread(self._fsck.pending_versions, self._tenant)
        prefixes = [attestations_prefix(self._tenant, version) for version in versions]
        async for line in self._check_each(prefixes, partial(self._check_attested, existing)):
            yield line
        for version in sorted(self._manifests.keys() - self._sealed_versions):
            key, prefix = manifest_key(self._tenant, version), attestations_prefix(self._tenant, version)
            new = [each async for each in self._store.list(prefix) if each not in keys[ATTESTATIONS]]
            if not new and await self._exists(key):  # otherwise it was collected meanwhile
                yield FsckFinding(key=key, fault="it has no seal", mend=PUSH_AGAIN)

    async def _check_attested(self, existing: set[str], prefix: str) -> Iterable[FsckLine]:
        version = prefix.split("/")[2]
        # A publisher's attestation is stored before the commit of its version.
        is_known = version in existing or version in self._pending_versions
        missing = not is_known and not await self._exists(manifest_key(self._tenant, version))
        try:
            entries = await self._fsck.attestations.list_entries(self._tenant, version)
        except BlobUnavailable:
            self._sealed_versions.add(version)  # whether it is sealed is unknown now, so it is no finding
            raise
        found: list[FsckFinding] = []
        for entry in entries:
            key, fault = prefix + entry.name, entry.fault or _find_distrust(entry)
            if fault is not None:
                mend = f"delete it, then {PUSH_AGAIN}"
                found.append(FsckFinding(key=key, fault=f"an attestation: {fault}", mend=mend))
            elif missing and version in self._condemned_versions:
                self._leftover_count += 1  # a collection deletes the mark of a version last
            elif missing:
                self._note_running_push()
                if not self._was_push_running:
                    mend = f"delete it, or {PUSH_AGAIN}"
                    found.append(FsckFinding(key=key, fault="its version does not exist", mend=mend))
            if fault is None and entry.name.startswith(SEAL_PREFIX):
                self._sealed_versions.add(version)
        return found

    async def _check_inputs(self, keys: list[str]) -> AsyncIterator[FsckLine]:
        async for line in self._check_each(keys, self._check_input):
            yield line
        for version in sorted((self._named_versions & self._manifests.keys()) - self._versions_with_inputs):
            key = inputs_key(self._tenant, _inputs_of(self._manifests[version]))
            if not await self._exists(key):
                fault = f"no record of the inputs that {version} was made from"
                yield FsckFinding(key=key, fault=fault, mend=PUSH_AGAIN)

    async def _check_input(self, key: str) -> Iterable[FsckLine]:
        version = (await self._store.read(key)).decode(errors="replace")
        if version in self._unreadable_versions:
            return ()
        if version not in self._manifests:
            fault = f"it names version {version[:64]!r}, which does not exist"
        elif _inputs_of(self._manifests[version]) != object_name(key):
            fault = f"version {version} was made from other inputs"
        else:
            self._versions_with_inputs.add(version)
            return ()
        return (FsckFinding(key=key, fault=fault, mend="delete it; the next push of the model writes it again"),)

    async def _check_pack_list(self, key: str) -> Iterable[FsckLine]:
        """Check a pack list. Two cases are no fault: a missing list, because lists only save reads and early stores had
        none; and the list of a version that does not exist, because a refused push leaves list and packs to the
        collection.
        """
        listed_packs = decode_pack_list(await self._store.read(key))
        if listed_packs is None:
            fault = "it is damaged"
        elif not self._is_pack_list_of(listed_packs, self._manifests.get(object_name(key))):
            fault = "it names other packs than those that hold its version"
        else:
            return ()
        if not await self._exists(key):
            return ()
        return (FsckFinding(key=key, fault=fault, mend="delete it; the next push of the model writes it again"),)

    def _is_pack_list_of(self, listed_packs: tuple[str, ...], manifest: Manifest | None) -> bool:
        """Return whether the named packs exist and hold each verified chunk of a version. An unreadable pack counts as
        existing. Without a manifest there is nothing to hold.
        """
        if manifest is None:
            return True
        packs_prefix = pack_key(self._tenant, "")
        unreadable_packs = {object_name(key) for key in self._unreadable_keys if key.startswith(packs_prefix)}
        wanted = {chunk.digest for chunk in manifest.chunks} & self._places.keys()
        found = frozenset[str]().union(*(self._chunks_by_pack.get(pack, frozenset()) for pack in listed_packs))
        return set(listed_packs) <= self._chunks_by_pack.keys() | unreadable_packs and wanted <= found

    async def _check_unfinished(self, drafts: list[str]) -> AsyncIterator[FsckLine]:
        for version in self._condemned_versions - self._manifests.keys():
            self._leftover_count += not await self._exists(manifest_key(self._tenant, version))
        self._note_running_push()
        if not self._was_push_running:
            for key in drafts:
                fault = "a draft of a push that did not end"
                yield FsckFinding(key=key, fault=fault, mend=f"delete it, or {PUSH_AGAIN}")

    def _note_running_push(self) -> None:
        self._was_push_running = self._was_push_running or self._fsck.is_running(self._tenant)

    async def _exists(self, key: str) -> bool:
        return await self._size(key) is not None

    async def _size(self, key: str) -> int | None:
        try:
            return (await self._store.stat(key)).size
        except BlobNotFound:
            return None
        except BlobUnavailable:
            return 0  # it counts as existing; a read will report the fault


def _find_distrust(entry: AttestationEntry) -> str | None:
    """Return why a signed seal is not trusted, else None. A publisher's trust is policy, so it is no fault."""
    if entry.name.startswith(SEAL_PREFIX) and entry.trusted_as is None and entry.key_id is not None:
        return f"{shorten_key_id(entry.key_id)} sealed it, and that key is not trusted here"
    return None


def _inputs_of(manifest: Manifest) -> str:
    sealing = Sealing(manifest.format, manifest.chunk_bytes, manifest.engine, manifest.limits, manifest.signature)
    return inputs_digest(sealing, manifest.files, manifest.tensors, [chunk.digest for chunk in manifest.chunks])
