"""What a check finds in a pack and in its index, which only repeats the pack's footer; and in a file that is kept as it
is and its index, of which one cannot be rebuilt from the other.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from blobstore.file_packs import FileIndex, decode_file_index
from blobstore.packs import decode_table
from blobstore.places import Place, place_of
from blobstore.store import BlobNotFound, BlobStore
from contracts.errors import Refused
from contracts.keys import index_key, pack_key
from contracts.push import FsckFinding
from snapshotter.verify import FileReport, PackReport, verify_file, verify_pack

NAMED: Final = 3  # chunks that a finding names; the rest are counted


@dataclass(frozen=True, slots=True)
class PackCheck:
    """`places` are those of chunks that are right. `is_indexed` is False where there is no index at all."""

    size: int
    places: Mapping[str, Place]
    findings: tuple[FsckFinding, ...]
    is_indexed: bool


async def check_pack(store: BlobStore, tenant: str, pack: str, push_again: str) -> PackCheck:
    """Every chunk against its digest, footer and index against each other. Raises `BlobNotFound`, `Refused`."""
    report = await verify_pack(store, tenant, pack)
    good = {entry.digest: place_of(pack, entry) for entry in report.entries if entry.digest not in report.bad}
    findings = _findings(tenant, pack, report, push_again)
    key = index_key(tenant, pack)
    try:
        fault = _index_fault(await store.read(key), pack, report)
    except BlobNotFound:
        return PackCheck(report.size, good, tuple(findings), False)
    if fault is not None:
        findings.append(FsckFinding(key=key, fault=fault, mend=f"delete it, then {push_again}"))
    return PackCheck(report.size, good, tuple(findings), True)


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
    if report.bad:
        some = ", ".join(sorted(report.bad)[:NAMED])
        faults.append(f"{len(report.bad)} of {len(report.entries)} chunks do not match their digests: {some}")
    if not faults and not report.digest_matches:
        faults.append("its bytes do not match its name")
    return [FsckFinding(key=key, fault=fault, mend=mend) for fault in faults]


async def check_file(store: BlobStore, tenant: str, pack: str, push_again: str) -> PackCheck:
    """Every byte of the file against its name, every chunk against the index. Raises `BlobNotFound`, `Refused`."""
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
    good = {digest: place for digest, place in report.places.items() if digest not in report.bad}
    return PackCheck(report.size, good, (*findings, *_file_findings(tenant, pack, report, push_again)), is_indexed)


def _file_findings(tenant: str, pack: str, report: FileReport, push_again: str) -> list[FsckFinding]:
    key, index = pack_key(tenant, pack), index_key(tenant, pack)
    some = ", ".join(sorted(report.bad)[:NAMED])
    told = f"{len(report.bad)} of {len(report.places)} chunks do not match their digests: {some}"
    if not report.digest_matches:
        fault = told if report.bad else "its bytes do not match its name"
        return [FsckFinding(key=key, fault=fault, mend=f"delete it and {index}, then {push_again}")]
    if report.bad:  # the file is what it was: its index is not
        return [FsckFinding(key=index, fault=told, mend=f"delete it, then {push_again}")]
    return []
