"""Check a tenant's objects: every byte against its digest, every reference against what it names. Changes nothing.

Manifests are listed before packs, so that what is published meanwhile is not mistaken for a fault. Objects that look
unfinished are faults only while no push of the tenant runs. What a collection that was killed midway has left is
counted and is no fault, where it is known that no version needs it.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

from blake3 import blake3

from blobstore.abreast import abreast
from blobstore.packs import digest_of_file_pack
from blobstore.places import Place, decode_pack_list, read_place
from blobstore.store import BlobNotFound, BlobStore, BlobUnavailable, list_objects
from contracts.attestation import short
from contracts.errors import Refused
from contracts.keys import (
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
    last_part,
    manifest_key,
    names_object,
    pack_key,
)
from contracts.manifest import Manifest, decode_manifest
from contracts.problem import to_wire
from contracts.push import AttestationEntry, FsckBroken, FsckFinding, FsckLine, FsckProgress, FsckSummary
from contracts.traffic_errors import Overloaded
from snapshotter.attestations import Attestations
from snapshotter.policy.sealing import Sealing, inputs_digest
from snapshotter.verify import NAMED, check_file, check_pack

_KINDS: Final = (ATTESTATIONS, CONDEMNED, DRAFTS, INDEX, INPUTS, MANIFESTS, PACK_LISTS, PACKS)

AT_ONCE: Final = 4  # checks at the same time, one of a tenant: each lasts as long as its client reads
OUT_OF_REACH: Final = 8  # a check ends after more objects than this could not be read
PUSH_AGAIN: Final = "push the model again from its source"
PUSH_OR_DELETE: Final = f"{PUSH_AGAIN}, or delete it: the version is gone then"


@dataclass(slots=True)
class _State:
    """What one check has learnt so far."""

    named: frozenset[str] = frozenset()  # versions that a model names
    condemned: frozenset[str] = frozenset()  # versions that a collection marked and no model names
    manifests: dict[str, Manifest] = field(default_factory=dict)
    places: dict[str, Place] = field(default_factory=dict)  # verified chunks only
    by_pack: dict[str, frozenset[str]] = field(default_factory=dict)  # verified chunks of each pack that was read
    unindexed: set[str] = field(default_factory=set)  # packs without an index
    packs: int = 0
    checked_bytes: int = 0
    findings: int = 0
    leftovers: int = 0  # objects that a collection which did not end has left; the next one frees them
    unread: set[str] = field(default_factory=set)  # versions whose manifest can't be read: what they need is unknown
    out_of_reach: set[str] = field(default_factory=set)  # keys of objects that could not be read
    seen_running: bool = False


class Fsck:
    """Checks the objects of tenants: one check of a tenant at a time, `AT_ONCE` in all.

    `is_running` says whether a push of the tenant is being committed or a collection frees objects. `named` returns
    the versions that the tenant's models name, `coming` those that its open pushes make.
    """

    def __init__(
        self,
        store: BlobStore,
        is_running: Callable[[str], bool],
        named: Callable[[str], Awaitable[tuple[str, ...]]],
        attestations: Attestations,
        coming: Callable[[str], set[str]],
    ) -> None:
        self._store = store
        self._attestations = attestations
        self._is_running = is_running
        self._named = named
        self._coming = coming
        self._checking: set[str] = set()  # tenants

    def __repr__(self) -> str:
        return f"<Fsck running={len(self._checking)}>"

    async def check(self, tenant: str) -> AsyncIterator[FsckLine]:
        """Yield findings and progress as they come, then a summary, or `FsckBroken` if the store fails.

        A check that may not run now yields `FsckBroken` with `Overloaded` alone.
        """
        if tenant in self._checking or len(self._checking) >= AT_ONCE:
            what, limit = ("this tenant's checks", 1) if tenant in self._checking else ("the list of checks", AT_ONCE)
            yield FsckBroken(failure=to_wire(Overloaded(what, limit, 30.0)))
            return
        self._checking.add(tenant)
        try:
            state = _State()
            async for line in self._lines(tenant, state):
                state.findings += isinstance(line, FsckFinding)
                yield line
            yield self._summary(tenant, state)
        except Refused as refused:
            yield FsckBroken(failure=to_wire(refused.failure))
        finally:
            self._checking.discard(tenant)

    async def _lines(self, tenant: str, state: _State) -> AsyncIterator[FsckLine]:
        self._watch(tenant, state)
        state.named = frozenset(await self._named(tenant))
        keys = {kind: await list_objects(self._store, tenant, kind) for kind in _KINDS if kind not in (PACKS, INDEX)}
        state.condemned = frozenset(map(last_part, keys[CONDEMNED])) - state.named
        async for finding in self._check_manifests(tenant, keys[MANIFESTS], state):
            yield finding
        async for finding in self._check_named(tenant, keys[MANIFESTS], state):
            yield finding
        keys |= {kind: await list_objects(self._store, tenant, kind) for kind in (PACKS, INDEX)}
        async for line in self._check_packs(tenant, keys[PACKS], keys[INDEX], state):
            yield line
        async for finding in self._check_references(tenant, state):
            yield finding
        async for finding in self._check_attestations(tenant, keys, state):
            yield finding
        async for finding in self._check_inputs(tenant, keys[INPUTS], state):
            yield finding
        async for finding in self._check_pack_lists(tenant, keys[PACK_LISTS], state):
            yield finding
        for version in state.condemned - state.manifests.keys():
            state.leftovers += not await self._is_there(manifest_key(tenant, version))
        self._watch(tenant, state)
        if not state.seen_running:
            for key in keys[DRAFTS]:
                yield FsckFinding(
                    key=key, fault="a draft of a push that did not end", mend=f"delete it, or {PUSH_AGAIN}"
                )
        async for key in self._store.list(f"{tenant}/"):
            if not names_object(key):
                yield FsckFinding(key=key, fault="no object of this format has such a name", mend="delete it")

    async def _check_manifests(self, tenant: str, keys: list[str], state: _State) -> AsyncIterator[FsckFinding]:
        for key in keys:
            version = last_part(key)
            try:
                state.manifests[version] = decode_manifest(await self._store.read(key), version)
            except BlobNotFound:
                continue
            except BlobUnavailable as error:
                state.unread.add(version)
                yield _out_of_reach(key, error, state)
            except Refused as refused:
                state.unread.add(version)
                yield FsckFinding(key=key, fault=refused.failure.message, mend=PUSH_OR_DELETE)

    async def _check_named(self, tenant: str, keys: list[str], state: _State) -> AsyncIterator[FsckFinding]:
        """What was named before manifests were listed has one, unless it was deleted and collected meanwhile."""
        missing = state.named - {last_part(key) for key in keys}
        if missing:
            missing &= frozenset(await self._named(tenant))
        for version in sorted(missing):
            fault = "a model names this version, but its manifest is missing"
            mend = f"restore the store from your own copy, {PUSH_AGAIN}, or `kelvin versions delete` it"
            yield FsckFinding(key=manifest_key(tenant, version), fault=fault, mend=mend)

    async def _check_packs(
        self, tenant: str, packs: list[str], indexes: list[str], state: _State
    ) -> AsyncIterator[FsckLine]:
        found = zip(packs, await abreast(self._size, packs), strict=True)
        sizes = {key: size for key, size in found if size is not None}
        total = sum(sizes.values())
        for key in sizes:
            pack = last_part(key)
            look = check_pack if digest_of_file_pack(pack) is None else check_file
            try:
                check = await look(self._store, tenant, pack, PUSH_AGAIN)
            except BlobNotFound:
                continue  # collected meanwhile; whoever needed it says so
            except BlobUnavailable as error:
                yield _out_of_reach(key, error, state)
                continue
            state.packs += 1
            state.checked_bytes += check.size
            state.places.update(check.places)
            state.by_pack[pack] = frozenset(check.places)
            if not check.is_indexed:
                state.unindexed.add(pack)
            for finding in check.findings:
                yield finding
            yield FsckProgress(checked_bytes=state.checked_bytes, total_bytes=max(total, state.checked_bytes))
        for finding in self._without_index(tenant, state):
            yield finding
        for key in indexes:
            pack = pack_key(tenant, last_part(key))
            if pack not in sizes and not await self._is_there(pack) and await self._is_there(key):
                yield FsckFinding(key=key, fault="its pack is missing", mend=f"delete it, then {PUSH_AGAIN}")

    def _without_index(self, tenant: str, state: _State) -> Iterator[FsckFinding]:
        """Yield a finding for each pack without an index.

        It advises to delete only a pack that no version can need: the source of a version may be lost.
        """
        if not state.unindexed:
            return
        self._watch(tenant, state)
        if state.seen_running:  # a pack is there for a moment before its index
            return
        wanted = {chunk.digest for manifest in state.manifests.values() for chunk in manifest.chunks}
        is_lacking = not wanted <= state.places.keys() or not state.named <= state.manifests.keys()
        indexed = frozenset[str]().union(*(state.by_pack[pack] for pack in state.by_pack.keys() - state.unindexed))
        for pack in sorted(state.unindexed):
            # Only its index says which chunks a kept file holds, so any of them may hold the chunks that are missing.
            only_here = wanted & state.by_pack[pack] - indexed
            has_wanted = not wanted.isdisjoint(state.by_pack[pack])  # then no collection frees it
            if not (has_wanted or is_lacking or state.unread):
                state.leftovers += 1  # a collection frees the index of a pack first
                continue
            is_needed = bool(only_here) or (is_lacking and digest_of_file_pack(pack) is not None)
            other = "keep the pack: a version may need it" if is_needed else f"or delete {pack_key(tenant, pack)}"
            yield FsckFinding(
                key=index_key(tenant, pack), fault="the index of a pack is missing", mend=f"{PUSH_AGAIN}, {other}"
            )

    async def _check_references(self, tenant: str, state: _State) -> AsyncIterator[FsckFinding]:
        for version, manifest in state.manifests.items():
            key = manifest_key(tenant, version)
            wanted = {chunk.digest: chunk.length for chunk in manifest.chunks}
            missing = [
                digest
                for digest, length in wanted.items()
                if digest not in state.places or state.places[digest].length != length
            ]
            if missing and not await self._is_there(key):
                continue  # collected meanwhile: its packs went after it
            if missing:
                some = ", ".join(missing[:NAMED])
                fault = f"{len(missing)} of {len(wanted)} chunks are missing or damaged: {some}"
                mend = f"after the packs above, {PUSH_OR_DELETE}"
                if any(other.startswith(pack_key(tenant, "")) for other in state.out_of_reach):
                    fault = f"{len(missing)} of {len(wanted)} chunks are in none of the packs that can be read: {some}"
                    mend = "make the packs above readable, then check again"
                yield FsckFinding(key=key, fault=fault, mend=mend)
                continue
            try:
                damaged = await self._damaged_files(tenant, manifest, state)
            except BlobNotFound:
                continue  # collected meanwhile; the next check says so if it was not
            except BlobUnavailable as error:
                yield _out_of_reach(key, error, state)
                continue
            for path in damaged:
                fault = f"the pinned file {path} does not match its digest"
                yield FsckFinding(key=key, fault=fault, mend=f"delete it, then {PUSH_AGAIN}")

    async def _damaged_files(self, tenant: str, manifest: Manifest, state: _State) -> list[str]:
        """Chunks are right by their own digests; this is whether the manifest speaks of them rightly."""
        if not manifest.files:
            return []
        end = max(file.offset + file.size for file in manifest.files)
        space = bytearray()
        for chunk in manifest.chunks:
            if len(space) >= end:
                break
            place = state.places[chunk.digest]
            space += await read_place(self._store, pack_key(tenant, place.pack), place)
        return [
            file.path
            for file in manifest.files
            if blake3(memoryview(space)[file.offset : file.offset + file.size]).hexdigest() != file.digest
        ]

    async def _check_attestations(
        self, tenant: str, keys: dict[str, list[str]], state: _State
    ) -> AsyncIterator[FsckFinding]:
        there = {last_part(key) for kind in (MANIFESTS, DRAFTS) for key in keys[kind]}
        sealed: set[str] = set()
        versions = dict.fromkeys(key.split("/")[2] for key in keys[ATTESTATIONS])
        coming = set[str]() if versions.keys() <= there else await asyncio.to_thread(self._coming, tenant)
        for version in versions:
            prefix = attestations_prefix(tenant, version)
            # What a publisher says of a version comes before its commit.
            is_known = version in there or version in coming
            missing = not is_known and not await self._is_there(manifest_key(tenant, version))
            try:
                entries = await self._attestations.entries(tenant, version)
            except BlobUnavailable as error:
                sealed.add(version)  # whether it is sealed can't be said now, so it is no finding
                yield _out_of_reach(prefix, error, state)
                continue
            for entry in entries:
                fault = entry.fault or _distrust(entry)
                if fault is not None:
                    mend = f"delete it, then {PUSH_AGAIN}"
                    yield FsckFinding(key=prefix + entry.name, fault=f"an attestation: {fault}", mend=mend)
                elif missing and version in state.condemned:
                    state.leftovers += 1  # a collection frees the mark of a version last
                elif missing:
                    self._watch(tenant, state)
                    if not state.seen_running:
                        mend = f"delete it, or {PUSH_AGAIN}"
                        yield FsckFinding(key=prefix + entry.name, fault="its version does not exist", mend=mend)
                if fault is None and entry.name.startswith(SEAL_PREFIX):
                    sealed.add(version)
        for version in sorted(state.manifests.keys() - sealed):
            fault = "no attestation says that it was sealed"
            prefix = attestations_prefix(tenant, version)
            new = [key async for key in self._store.list(prefix) if key not in keys[ATTESTATIONS]]
            if not new and await self._is_there(manifest_key(tenant, version)):  # else collected meanwhile
                yield FsckFinding(key=manifest_key(tenant, version), fault=fault, mend=PUSH_AGAIN)

    async def _check_inputs(self, tenant: str, keys: list[str], state: _State) -> AsyncIterator[FsckFinding]:
        recorded = set()
        known = {version: _inputs_of(manifest) for version, manifest in state.manifests.items()}
        for key in keys:
            try:
                version = (await self._store.read(key)).decode(errors="replace")
            except BlobNotFound:
                continue
            except BlobUnavailable as error:
                yield _out_of_reach(key, error, state)
                continue
            mend = "delete it; the next push of the model writes it anew"
            if version in state.unread:
                continue
            if version not in known:
                yield FsckFinding(key=key, fault=f"it names version {version[:64]!r}, which does not exist", mend=mend)
            elif known[version] != last_part(key):
                yield FsckFinding(key=key, fault=f"version {version} was made of other inputs", mend=mend)
            else:
                recorded.add(version)
        for version in sorted((state.named & known.keys()) - recorded):
            key = inputs_key(tenant, known[version])
            if not await self._is_there(key):
                yield FsckFinding(key=key, fault=f"nothing says of which inputs {version} was made", mend=PUSH_AGAIN)

    async def _check_pack_lists(self, tenant: str, keys: list[str], state: _State) -> AsyncIterator[FsckFinding]:
        """Yield a finding for each pack list that is damaged or wrong.

        A missing list is no fault: lists only save reads, and early stores had none. Nor is the list of a version that
        does not exist: a refused push leaves one, as it leaves packs, and a collection frees both.
        """
        for key in keys:
            try:
                named = decode_pack_list(await self._store.read(key))
            except BlobNotFound:
                continue
            except BlobUnavailable as error:
                yield _out_of_reach(key, error, state)
                continue
            fault = None
            if named is None:
                fault = "it is damaged"
            elif not _is_list_of(tenant, named, state.manifests.get(last_part(key)), state):
                fault = "it names other packs than those that hold its version"
            if fault is not None and await self._is_there(key):
                yield FsckFinding(key=key, fault=fault, mend="delete it; the next push of the model writes it anew")

    def _summary(self, tenant: str, state: _State) -> FsckSummary:
        used = {chunk.digest for manifest in state.manifests.values() for chunk in manifest.chunks}
        unused = [place.length for digest, place in state.places.items() if digest not in used]
        return FsckSummary(
            versions=len(state.manifests),
            unnamed_versions=len(state.manifests.keys() - state.named),
            packs=state.packs,
            chunks=len(state.places),
            checked_bytes=state.checked_bytes,
            unreferenced_chunks=len(unused),
            unreferenced_bytes=sum(unused),
            findings=state.findings,
            leftovers=state.leftovers,
            pushes_running=state.seen_running,
        )

    def _watch(self, tenant: str, state: _State) -> None:
        state.seen_running = state.seen_running or self._is_running(tenant)

    async def _is_there(self, key: str) -> bool:
        return await self._size(key) is not None

    async def _size(self, key: str) -> int | None:
        try:
            return (await self._store.stat(key)).size
        except BlobNotFound:
            return None
        except BlobUnavailable:
            return 0  # it counts as existing; reading it finds what is wrong


def _out_of_reach(key: str, error: BlobUnavailable, state: _State) -> FsckFinding:
    """Return the finding of an object that can't be read. Raises `error` after `OUT_OF_REACH` of them: then the store
    does not answer.
    """
    state.out_of_reach.add(key)
    if len(state.out_of_reach) > OUT_OF_REACH:
        raise error
    mend = f"repair the disk or the connection to the store; only if that does not help delete it, then {PUSH_AGAIN}"
    return FsckFinding(key=key, fault="it, or what belongs to it, can't be read now", mend=mend)


def _is_list_of(tenant: str, named: tuple[str, ...], manifest: Manifest | None, state: _State) -> bool:
    """Return whether the named packs exist and hold each verified chunk of a version. A pack that can't be read now
    exists. Without a manifest there is nothing to hold.
    """
    if manifest is None:
        return True
    existing = {pack for pack in named if pack in state.by_pack or pack_key(tenant, pack) in state.out_of_reach}
    wanted = {chunk.digest for chunk in manifest.chunks} & state.places.keys()
    found = frozenset[str]().union(*(state.by_pack.get(pack, frozenset()) for pack in named))
    return existing == set(named) and wanted <= found


def _distrust(entry: AttestationEntry) -> str | None:
    """A seal that no key of ours made is as good as none; whom a publisher's statement convinces is policy."""
    if entry.name.startswith(SEAL_PREFIX) and entry.trusted_as is None and entry.key_id is not None:
        return f"{short(entry.key_id)} sealed it, which is not trusted here"
    return None


def _inputs_of(manifest: Manifest) -> str:
    sealing = Sealing(manifest.format, manifest.chunk_bytes, manifest.engine, manifest.limits, manifest.signature)
    return inputs_digest(sealing, manifest.files, manifest.tensors, [chunk.digest for chunk in manifest.chunks])
