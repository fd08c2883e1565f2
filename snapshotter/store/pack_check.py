"""Read a pack or a kept file back and report what is wrong. Used before anything refers to it, and by fsck.

A pack's index only repeats its footer. A kept file has no footer, so neither the file nor its index can be rebuilt from
the other.
"""

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from blake3 import blake3

from kelvin.blobstore.blob_store import BlobCorrupt, BlobNotFound, BlobShort, BlobStore
from kelvin.blobstore.chunk_locations import ChunkLocation, kept_file_locations, location_of, read_chunk, read_footer
from kelvin.blobstore.packs import FileIndex, PackEntry, decode_file_index, decode_table, digest_of_file_pack
from kelvin.contracts.artifact_errors import PackCorrupt
from kelvin.contracts.artifacts.object_keys import index_key, pack_key
from kelvin.contracts.artifacts.push_api import FsckFinding
from kelvin.contracts.errors import Failure, Refused

_BLOCK: Final = 8 << 20
MAX_NAMED_CHUNKS: Final = 3  # how many chunks a finding names; the others are counted


@dataclass(frozen=True, slots=True)
class PackReport:
    """The result of reading a whole pack. Without a footer fault, `entries` are all chunks that it should hold."""

    size: int
    entries: tuple[PackEntry, ...]
    footer_fault: str | None
    damaged_chunks: frozenset[str]  # digests of chunks whose bytes don't match
    digest_matches: bool  # of the whole object

    @property
    def is_intact(self) -> bool:
        """Return whether every byte matches its digest."""
        return self.footer_fault is None and not self.damaged_chunks and self.digest_matches


@dataclass(frozen=True, slots=True)
class FileReport:
    """The result of reading a whole kept file, and its chunks at `places`."""

    size: int
    places: Mapping[str, ChunkLocation]
    damaged_chunks: frozenset[str]  # digests of chunks whose bytes don't match
    digest_matches: bool

    @property
    def is_intact(self) -> bool:
        """Return whether every byte matches its digest."""
        return not self.damaged_chunks and self.digest_matches


async def verify_pack(store: BlobStore, tenant: str, pack: str) -> PackReport:
    """Read every byte of a pack. Damage is reported, not raised. Raises `BlobNotFound` and `BlobUnavailable`."""
    key = pack_key(tenant, pack)
    size = (await store.stat(key)).size
    entries: tuple[PackEntry, ...] = ()
    footer_fault = None
    try:
        entries = await read_footer(store, key, size, pack)
    except Refused as refused:
        if not isinstance(refused.failure, PackCorrupt):
            raise
        footer_fault = refused.failure.reason
    hasher = blake3()
    damaged_chunks: set[str] = set()
    for offset, length, digest in _spans(entries, size):
        data = await store.read(key, offset, length)
        if not await asyncio.to_thread(_hash_part, hasher, data, digest) and digest is not None:
            damaged_chunks.add(digest)
    return PackReport(size, entries, footer_fault, frozenset(damaged_chunks), hasher.hexdigest() == pack)


async def verify_file(store: BlobStore, tenant: str, pack: str, index: FileIndex | None) -> FileReport:
    """Read every byte of a kept file, and the chunks that its index (None: unknown) finds in it. Raises as
    `verify_pack` does. Reads the whole file first, then each chunk, because a chunk's tensors may lie anywhere.
    """
    key = pack_key(tenant, pack)
    size = (await store.stat(key)).size
    hasher = blake3()
    for offset, length, _ in _blocks(0, size):
        await asyncio.to_thread(_hash_part, hasher, await store.read(key, offset, length), None)
    places = {} if index is None else kept_file_locations(pack, index)
    damaged_chunks = set()
    for digest, place in places.items():
        try:
            data = await read_chunk(store, key, place)
        except BlobShort:
            damaged_chunks.add(digest)
            continue
        if not await has_digest(data, digest):
            damaged_chunks.add(digest)
    return FileReport(size, places, frozenset(damaged_chunks), hasher.hexdigest() == digest_of_file_pack(pack))


async def try_file_index(store: BlobStore, tenant: str, pack: str) -> FileIndex | None:
    """Return the index of a kept file; None if it is missing or damaged. Raises `BlobUnavailable`."""
    try:
        return decode_file_index(await store.read(index_key(tenant, pack)), pack)
    except BlobNotFound:
        return None
    except Refused as refused:
        if isinstance(refused.failure, PackCorrupt):
            return None
        raise


async def ensure_object(store: BlobStore, key: str, raw: bytes, failure: Failure) -> bool:
    """Ensure that `key` holds exactly `raw`, by reading it back. Return whether this call wrote it. Raises
    `Refused(failure)` if the store returns other bytes than it got.
    """
    if await has_content(store, key, raw):
        return False
    await store.delete(key)
    await store.put_if_absent(key, raw)
    if not await has_content(store, key, raw):
        raise Refused(failure)
    return True


async def has_content(store: BlobStore, key: str, raw: bytes) -> bool:
    """Return whether the object exists and is exactly `raw`."""
    try:
        return await store.read(key) == raw
    except (BlobNotFound, BlobCorrupt):
        return False


def _spans(entries: tuple[PackEntry, ...], size: int) -> Iterator[tuple[int, int, str | None]]:
    """Yield the whole object in order: chunks with their digests, and blocks for the bytes between and after them."""
    end = 0
    for entry in entries:
        yield from _blocks(end, entry.offset)
        yield entry.offset, entry.length, entry.digest
        end = entry.offset + entry.length
    yield from _blocks(end, size)


def _blocks(start: int, end: int) -> Iterator[tuple[int, int, None]]:
    for offset in range(start, end, _BLOCK):
        yield offset, min(_BLOCK, end - offset), None


def _hash_part(hasher: blake3, data: bytes, digest: str | None) -> bool:
    hasher.update(data)
    return digest is None or blake3(data).hexdigest() == digest


async def has_digest(data: bytes, digest: str) -> bool:
    """Return whether the bytes have that BLAKE3 digest. It is computed in a thread."""
    return await asyncio.to_thread(lambda: blake3(data).hexdigest()) == digest


@dataclass(frozen=True, slots=True)
class PackCheck:
    """The result of one check. `places` has the intact chunks. `is_indexed` is False if there is no index."""

    size: int
    places: Mapping[str, ChunkLocation]
    findings: tuple[FsckFinding, ...]
    is_indexed: bool


async def check_pack(store: BlobStore, tenant: str, pack: str, push_again: str) -> PackCheck:
    """Check chunks against digests, and footer and index against each other. Raises `BlobNotFound`, `Refused`."""
    report = await verify_pack(store, tenant, pack)
    intact_places = {
        entry.digest: location_of(pack, entry) for entry in report.entries if entry.digest not in report.damaged_chunks
    }
    findings = _findings(tenant, pack, report, push_again)
    key = index_key(tenant, pack)
    try:
        fault = _index_fault(await store.read(key), pack, report)
    except BlobNotFound:
        return PackCheck(report.size, intact_places, tuple(findings), False)
    if fault is not None:
        findings.append(FsckFinding(key=key, fault=fault, mend=f"delete it, then {push_again}"))
    return PackCheck(report.size, intact_places, tuple(findings), True)


def _index_fault(raw: bytes, pack: str, report: PackReport) -> str | None:
    try:
        table = decode_table(raw, pack)
    except Refused as refused:
        return refused.failure.message
    if report.footer_fault is None and table != report.entries:
        return "it differs from the footer of its pack"
    return None


def _findings(tenant: str, pack: str, report: PackReport, push_again: str) -> list[FsckFinding]:
    key = pack_key(tenant, pack)
    mend = f"delete it and {index_key(tenant, pack)}, then {push_again}: only its chunks will be sent"
    faults = []
    if report.footer_fault is not None:
        faults.append(f"its footer: {report.footer_fault}")
    if report.damaged_chunks:
        examples = ", ".join(sorted(report.damaged_chunks)[:MAX_NAMED_CHUNKS])
        faults.append(
            f"{len(report.damaged_chunks)} of {len(report.entries)} chunks do not match their digests: {examples}"
        )
    if not faults and not report.digest_matches:
        faults.append("its bytes do not match its name")
    return [FsckFinding(key=key, fault=fault, mend=mend) for fault in faults]


async def check_file(store: BlobStore, tenant: str, pack: str, push_again: str) -> PackCheck:
    """Check the bytes against the file's name and the chunks against its index. Raises `BlobNotFound`, `Refused`."""
    key = index_key(tenant, pack)
    index: FileIndex | None = None
    findings: list[FsckFinding] = []
    is_indexed = True
    try:
        index = decode_file_index(await store.read(key), pack)
    except BlobNotFound:
        is_indexed = False
    except Refused as refused:
        if refused.failure.retryable:
            raise
        findings.append(FsckFinding(key=key, fault=refused.failure.message, mend=f"delete it, then {push_again}"))
    report = await verify_file(store, tenant, pack, index)
    intact_places = {digest: place for digest, place in report.places.items() if digest not in report.damaged_chunks}
    findings += _file_findings(tenant, pack, report, push_again)
    return PackCheck(report.size, intact_places, tuple(findings), is_indexed)


def _file_findings(tenant: str, pack: str, report: FileReport, push_again: str) -> list[FsckFinding]:
    key, index = pack_key(tenant, pack), index_key(tenant, pack)
    examples = ", ".join(sorted(report.damaged_chunks)[:MAX_NAMED_CHUNKS])
    mismatch = f"{len(report.damaged_chunks)} of {len(report.places)} chunks do not match their digests: {examples}"
    if not report.digest_matches:
        fault = mismatch if report.damaged_chunks else "its bytes do not match its name"
        return [FsckFinding(key=key, fault=fault, mend=f"delete it and {index}, then {push_again}")]
    if report.damaged_chunks:  # the file is intact, so its index is wrong
        return [FsckFinding(key=index, fault=mismatch, mend=f"delete it, then {push_again}")]
    return []
