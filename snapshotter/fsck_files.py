"""What a check finds in a file that is kept as it is, and in its index: one cannot be rebuilt from the other."""

from blobstore.file_packs import FileIndex, decode_file_index
from blobstore.store import BlobNotFound, BlobStore
from contracts.errors import Refused
from contracts.keys import index_key, pack_key
from contracts.push import FsckFinding
from snapshotter.fsck_packs import NAMED, PackCheck
from snapshotter.verify import FileReport, verify_file


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
    return PackCheck(report.size, good, (*findings, *_findings(tenant, pack, report, push_again)), is_indexed)


def _findings(tenant: str, pack: str, report: FileReport, push_again: str) -> list[FsckFinding]:
    key, index = pack_key(tenant, pack), index_key(tenant, pack)
    some = ", ".join(sorted(report.bad)[:NAMED])
    told = f"{len(report.bad)} of {len(report.places)} chunks do not match their digests: {some}"
    if not report.digest_matches:
        fault = told if report.bad else "its bytes do not match its name"
        return [FsckFinding(key=key, fault=fault, mend=f"delete it and {index}, then {push_again}")]
    if report.bad:  # the file is what it was: its index is not
        return [FsckFinding(key=index, fault=told, mend=f"delete it, then {push_again}")]
    return []
