"""The NVMe tier stays within its budget, keeps its order of use across restarts, and no disk fault stops the agent."""

import asyncio
import errno
import mmap
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from kelvin.contracts.artifacts.manifest import PAGE_BYTES
from kelvin.contracts.errors import Refused
from tests.weightcache.disks import fill, make_read_only, refuse_direct, refuse_removal
from tests.weightcache.kit import run_tasks
from weightcache.client import libc
from weightcache.counters import Counters
from weightcache.nvme import nvme_tier
from weightcache.nvme.chunk_files import ChunkFile, ChunkFiles, DocumentKind, ReadPath
from weightcache.nvme.disk_index_policy import DiskIndex
from weightcache.nvme.nvme_tier import NvmeTier
from weightcache.sources import verifier as verifying
from weightcache.sources.policy.healing import ReadOutcome
from weightcache.sources.source import Verify
from weightcache.sources.verifier import Tags, Verifier

WRONG = 99  # the first byte of a page that does not match its digest
NAMES = [f"{n:02x}" * 32 for n in range(1, 9)]


def page(mark: int) -> memoryview:
    into = memoryview(mmap.mmap(-1, PAGE_BYTES))
    into[:] = bytes([mark]) * PAGE_BYTES
    return into


def is_right(data: memoryview, digest: str) -> bool:
    return data[0] != WRONG


@asynccontextmanager
async def open_tier(root: Path, budget: int = 3 * PAGE_BYTES, verify: Verify = is_right) -> AsyncIterator[NvmeTier]:
    """Open the tier over a directory. Its clock ticks at every call, and its index is checked when the block ends."""
    ticks = count(1001.0)
    with ThreadPoolExecutor(2) as threads:
        verifier = Verifier(threads, verify, Counters(), Tags())
        tier = NvmeTier(root, DiskIndex(budget), threads, lambda: next(ticks), verifier, 6)
        await tier.open()
        try:
            yield tier
            tier.index.check_integrity()
        finally:
            tier.close()


async def fetch_page(tier: NvmeTier, digest: str, tenant: str = "a") -> tuple[ReadOutcome, int]:
    into = page(0)
    return await tier.fetch(tenant, digest, into), into[0]


def refuse_listing(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    for name in ("scandir", "listdir"):
        call = getattr(os, name)

        def refusing(path: Path, call: Callable[[Path], Any] = call) -> Any:
            if Path(path) == directory:
                raise OSError(errno.EIO, "refused", str(path))
            return call(path)

        monkeypatch.setattr(os, name, refusing)


def files_of(root: Path) -> set[str]:
    return {path.name for path in root.glob("[!.]*/??/*")}


async def test_admit_and_fetch(tmp_path: Path) -> None:
    """An admitted chunk is fetched. Chunks that were not admitted, or are another tenant's, are absent."""

    async with open_tier(tmp_path) as tier:
        assert await tier.admit("a", NAMES[0], page(7))
        assert not await tier.admit("a", NAMES[0], page(7)), "the chunk is admitted already"
        assert await fetch_page(tier, NAMES[0]) == (ReadOutcome.VERIFIED, 7)
        assert await fetch_page(tier, NAMES[1]) == (ReadOutcome.ABSENT, 0)
        assert await fetch_page(tier, NAMES[0], "b") == (ReadOutcome.ABSENT, 0)


@pytest.mark.parametrize("hot", [True, False], ids=["hot", "cold"])
@pytest.mark.parametrize(
    ("mark", "want"), [(7, ReadOutcome.VERIFIED), (WRONG, ReadOutcome.DIGEST)], ids=["right", "wrong"]
)
async def test_fetched_chunk_is_verified(
    tmp_path: Path, hot: bool, mark: int, want: ReadOutcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes from the page cache and from the disk are verified, and counted by the way they came."""
    monkeypatch.setattr(libc, "missing_pages", lambda fd, length: 0 if hot else 1)

    async with open_tier(tmp_path) as tier:
        await tier.admit("a", NAMES[0], page(mark))
        assert await tier.fetch("a", NAMES[0], page(0)) is want
        assert sum(tier.bytes_by_read_path.values()) == PAGE_BYTES
        assert tier.bytes_by_read_path[ReadPath.CACHED] == (PAGE_BYTES if hot else 0)


@pytest.mark.parametrize("hot", [True, False], ids=["hot", "cold"])
async def test_a_digest_is_computed_once(tmp_path: Path, hot: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Later reads compare a tag instead of the digest, and find changed bytes."""
    monkeypatch.setattr(libc, "missing_pages", lambda fd, length: 0 if hot else 1)
    hashed: list[str] = []

    def verify(data: memoryview, digest: str) -> bool:
        hashed.append(digest)
        return True

    async with open_tier(tmp_path, verify=verify) as tier:
        await tier.admit("a", NAMES[0], page(7))
        for _ in range(3):
            assert await fetch_page(tier, NAMES[0]) == (ReadOutcome.VERIFIED, 7)
        assert hashed == [NAMES[0]]
        (file,) = tmp_path.glob("a/??/*")
        with file.open("r+b") as other:
            other.seek(PAGE_BYTES - 1)
            other.write(b"\x06")
        assert await fetch_page(tier, NAMES[0]) == (ReadOutcome.DIGEST, 7)
        assert hashed == [NAMES[0]]


@pytest.mark.parametrize(("hot", "where"), [(True, "read"), (False, "hash")], ids=["hot", "cold"])
async def test_disk_readers_verify_only_cached_files(
    tmp_path: Path, hot: bool, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads that read the disk leave hashing to others. Cached pages are verified by their reader."""
    monkeypatch.setattr(libc, "missing_pages", lambda fd, length: 0 if hot else 1)
    threads: list[str] = []

    def seen(data: memoryview, digest: str) -> bool:
        threads.append(threading.current_thread().name.split("_")[0])
        return True

    monkeypatch.setattr(Tags, "matches", lambda tags, data, digest, tag: seen(data, digest))

    with ThreadPoolExecutor(1, "hash") as hashes, ThreadPoolExecutor(1, "read") as reads:
        verifier = Verifier(hashes, seen, Counters(), Tags())
        tier = NvmeTier(tmp_path, DiskIndex(PAGE_BYTES), reads, lambda: 1.0, verifier, 6)
        await tier.open()
        await tier.admit("a", NAMES[0], page(7))
        assert [await fetch_page(tier, NAMES[0]) for _ in range(2)] == [(ReadOutcome.VERIFIED, 7)] * 2
        assert tier.recognised_bytes == PAGE_BYTES
        tier.close()
    assert threads == [where, where]


async def test_chunk_too_long_for_a_tag_is_hashed_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library that makes tags has a length limit, and chunks have none."""
    monkeypatch.setattr(verifying, "MAX_BYTES", PAGE_BYTES - 1)

    async with open_tier(tmp_path) as tier:
        await tier.admit("a", NAMES[0], page(7))
        for _ in range(2):
            assert await fetch_page(tier, NAMES[0]) == (ReadOutcome.VERIFIED, 7)
        assert tier.recognised_bytes == 0


async def test_scrub_ignores_tags(tmp_path: Path) -> None:
    """A scrub hashes the file instead of comparing its tag. A chunk that it found right is recognised later."""
    hashed: list[str] = []

    def verify(data: memoryview, digest: str) -> bool:
        hashed.append(digest)
        return is_right(data, digest)

    async with open_tier(tmp_path, verify=verify) as tier:
        await tier.admit("a", NAMES[0], page(7))
        for _ in range(2):
            assert await tier.read_for_scrub("a", NAMES[0], page(0)) is ReadOutcome.VERIFIED
        assert await fetch_page(tier, NAMES[0]) == (ReadOutcome.VERIFIED, 7)
        assert hashed == [NAMES[0]] * 2
        await tier.quarantine("a", NAMES[0])
        await tier.admit("a", NAMES[0], page(8))
        assert await fetch_page(tier, NAMES[0]) == (ReadOutcome.VERIFIED, 8), "the new file is verified again"
        assert hashed == [NAMES[0]] * 3


async def test_missing_o_direct_is_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The log says why the tier is slower than its disk, and the state counts the bytes read this way."""
    monkeypatch.setattr(libc, "missing_pages", lambda fd, length: 1)
    refuse_direct(monkeypatch)

    async with open_tier(tmp_path) as tier:
        await tier.admit("a", NAMES[0], page(7))
        for _ in range(3):
            assert await fetch_page(tier, NAMES[0]) == (ReadOutcome.VERIFIED, 7)
        assert tier.bytes_by_read_path == {ReadPath.BUFFERED: 3 * PAGE_BYTES}
    assert [record.message for record in caplog.records if "O_DIRECT" in record.message] == [
        "the file system refuses O_DIRECT: cold files are read through the page cache"
    ]


async def test_new_files_evict_the_least_recently_read(tmp_path: Path) -> None:
    """New files evict the least recently read ones. A chunk larger than the budget isn't admitted."""

    async with open_tier(tmp_path) as tier:
        for number in range(3):
            await tier.admit("a", NAMES[number], page(number))
        await fetch_page(tier, NAMES[0])
        assert await tier.admit("a", NAMES[3], page(3))
        assert files_of(tmp_path) == {NAMES[0], NAMES[2], NAMES[3]}
        assert not await tier.admit("a", NAMES[4], memoryview(mmap.mmap(-1, 4 * PAGE_BYTES)))


async def test_files_and_their_order_of_use_survive_a_restart(tmp_path: Path) -> None:
    """The next agent knows the files and their order of use, and a smaller budget removes the oldest."""

    async with open_tier(tmp_path) as tier:
        for number in range(3):
            await tier.admit("a", NAMES[number], page(number))
            path = tmp_path / "a" / NAMES[number][:2] / NAMES[number]
            os.utime(path, (number, number))

    async with open_tier(tmp_path, budget=2 * PAGE_BYTES) as tier:
        assert files_of(tmp_path) == {NAMES[1], NAMES[2]}
        assert await fetch_page(tier, NAMES[1]) == (ReadOutcome.VERIFIED, 1)
        assert tier.index.total_bytes == 2 * PAGE_BYTES


async def test_removed_file_is_missing_and_frees_its_bytes(tmp_path: Path) -> None:
    """A file that was removed from outside is missing at the next fetch, then absent, and its bytes are free."""

    async with open_tier(tmp_path) as tier:
        await tier.admit("a", NAMES[0], page(7))
        (tmp_path / "a" / NAMES[0][:2] / NAMES[0]).unlink()
        assert await fetch_page(tier, NAMES[0]) == (ReadOutcome.MISSING, 0)
        assert await fetch_page(tier, NAMES[0]) == (ReadOutcome.ABSENT, 0)
        assert tier.index.total_bytes == 0
        assert await tier.admit("a", NAMES[0], page(7))


async def test_full_disk_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the disk refuses a chunk or a manifest, the call succeeds and nothing is counted as kept."""

    async with open_tier(tmp_path) as tier:
        with monkeypatch.context() as patch:
            fill(patch)
            assert not await tier.admit("a", NAMES[0], page(7))
            await tier.keep_document("a", "version", b"raw", DocumentKind.MANIFESTS)
        assert tier.index.total_bytes == 0
        assert files_of(tmp_path) == set()
        assert await tier.try_read_document("a", "version", DocumentKind.MANIFESTS) is None
        assert await tier.admit("a", NAMES[0], page(7))


async def test_read_only_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a read-only disk a faulty file is neither offered nor replaced. Once writable, the disk takes the good one."""

    async with open_tier(tmp_path) as tier:
        await tier.admit("a", NAMES[0], page(7))
        with monkeypatch.context() as patch:
            make_read_only(patch, tmp_path)
            await tier.quarantine("a", NAMES[0])
            await tier.quarantine_document("a", "version", DocumentKind.MANIFESTS)
            assert await fetch_page(tier, NAMES[0]) == (ReadOutcome.ABSENT, 0)
            assert not await tier.admit("a", NAMES[0], page(8))
            assert files_of(tmp_path) == {NAMES[0]}
        assert tier.index.total_bytes == 0
        assert await tier.admit("a", NAMES[0], page(8))
        assert await fetch_page(tier, NAMES[0]) == (ReadOutcome.VERIFIED, 8)


@pytest.mark.parametrize("fault", ["mounted read-only", "removes nothing", "one bad inode", "one bad directory"])
async def test_readable_files_outlive_a_bad_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """Readable files are served although the disk refuses removal, is read-only, or has one bad inode or directory."""

    async with open_tier(tmp_path) as tier:
        for mark, name in enumerate(NAMES[:3], start=1):
            assert await tier.admit("a", name, page(mark))
            os.utime(tmp_path / "a" / name[:2] / name, (mark, mark))
    (tmp_path / ".staging" / "left").write_bytes(b"half")

    def refuse(path: Path, *_: object, **__: object) -> None:
        raise OSError(errno.EIO, "refused", str(path))

    bad = NAMES[0]
    stat = Path.stat
    if fault == "one bad inode":
        monkeypatch.setattr(Path, "stat", lambda path, **more: refuse(path) if path.name == bad else stat(path, **more))
    elif fault == "one bad directory":
        refuse_listing(monkeypatch, tmp_path / "a" / bad[:2])
    elif fault == "removes nothing":
        monkeypatch.setattr(Path, "unlink", refuse)
    else:
        make_read_only(monkeypatch, tmp_path)

    async with open_tier(tmp_path, budget=2 * PAGE_BYTES) as tier:
        found = [await fetch_page(tier, name) for name in NAMES[:3]]
        first = (ReadOutcome.ABSENT, 0) if fault.startswith("one bad") else (ReadOutcome.VERIFIED, 1)
        assert found == [first, (ReadOutcome.VERIFIED, 2), (ReadOutcome.VERIFIED, 3)]
        assert await tier.unindexed_files() == ()


async def test_cancelled_admission(tmp_path: Path) -> None:
    """A cancelled admission waits for its thread, and leaves neither a file nor reserved bytes."""

    async with open_tier(tmp_path) as tier:
        admission = asyncio.create_task(tier.admit("a", NAMES[0], page(7)))
        await asyncio.sleep(0)
        admission.cancel()
        with pytest.raises(asyncio.CancelledError):
            await admission
        assert files_of(tmp_path) == set()
        assert tier.index.total_bytes == 0


async def test_waiter_waits_for_both_a_fetch_and_a_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a prefetch fetches a chunk, a load may write the same chunk.

    Waiters wait for whichever ends last. Otherwise they would find the chunk neither written nor expected.
    """
    held, go = threading.Event(), threading.Event()
    write = ChunkFiles.write

    def slowly(self: ChunkFiles, path: Path, data: memoryview, *, direct: bool) -> None:
        held.set()
        assert go.wait(30)
        write(self, path, data, direct=direct)

    monkeypatch.setattr(ChunkFiles, "write", slowly)

    async with open_tier(tmp_path) as tier:
        key = ("a", NAMES[0])
        with tier.mark_writing(*key):
            writing = asyncio.create_task(tier.admit(*key, page(7)))
            await asyncio.to_thread(held.wait, 30)
        waiting = asyncio.create_task(tier.wait_until_written(*key))
        becoming_idle = asyncio.create_task(tier.wait_until_idle())
        await run_tasks()
        assert not waiting.done()
        assert not becoming_idle.done()
        go.set()
        assert await writing
        assert await waiting
        await becoming_idle
        with tier.mark_writing("a", NAMES[1]):
            assert await tier.admit("a", NAMES[1], page(8))
            waiting = asyncio.create_task(tier.wait_until_written("a", NAMES[1]))
            await run_tasks()
            assert not waiting.done()
        assert await waiting


async def test_file_removed_during_a_scan_is_not_unindexed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is evicted between listing the disk and reading the index is not reported; a stray file is."""
    scan, stray = ChunkFiles.scan, tmp_path / "a" / NAMES[5][:2] / NAMES[5]

    async with open_tier(tmp_path) as tier:
        loop = asyncio.get_running_loop()

        def slow(files: ChunkFiles) -> Iterator[ChunkFile]:
            found = list(scan(files))
            asyncio.run_coroutine_threadsafe(tier.evict("a", None, frozenset(NAMES[:1])), loop).result(30)
            return iter(found)

        for number in range(2):
            await tier.admit("a", NAMES[number], page(number))
        stray.parent.mkdir()
        stray.write_bytes(b"")
        monkeypatch.setattr(ChunkFiles, "scan", slow)
        assert await tier.unindexed_files() == (("a", NAMES[5]),)


async def test_chunk_is_admitted_after_its_old_file_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until then the chunk is neither admitted, since the new file would be removed, nor reported as unindexed."""
    remove, may_go = ChunkFiles.remove, threading.Event()

    def late(files: ChunkFiles, paths: Iterable[Path]) -> None:
        assert may_go.wait(30)
        remove(files, paths)

    async with open_tier(tmp_path) as tier:
        await tier.admit("a", NAMES[0], page(7))
        monkeypatch.setattr(ChunkFiles, "remove", late)
        evicting = asyncio.create_task(tier.evict("a", None, None))
        await asyncio.sleep(0)
        try:
            assert await tier.unindexed_files() == ()
            assert not await tier.admit("a", NAMES[0], page(7))
        finally:
            may_go.set()
        await evicting
        assert await tier.admit("a", NAMES[0], page(7))
        assert await fetch_page(tier, NAMES[0]) == (ReadOutcome.VERIFIED, 7)


async def test_evict_beside_a_file_that_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other files are removed, and the call is refused. Once the disk allows it, a second call removes the file."""

    async with open_tier(tmp_path) as tier:
        for mark, name in enumerate(NAMES[:3], 1):
            assert await tier.admit("a", name, page(mark))
        with monkeypatch.context() as disk:
            refuse_removal(disk, tmp_path / "a" / NAMES[0][:2] / NAMES[0])
            with pytest.raises(Refused):
                await tier.evict("a", None, None)
        assert files_of(tmp_path) == {NAMES[0]}
        assert await tier.unindexed_files() == ()
        assert await fetch_page(tier, NAMES[0]) == (ReadOutcome.VERIFIED, 1)
        await tier.evict("a", None, None)
        assert files_of(tmp_path) == set()


async def test_admit_beside_a_file_that_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that can't be removed to make room stays counted and indexed. The next admission removes another one."""
    refuse_removal(monkeypatch, tmp_path / "a" / NAMES[0][:2] / NAMES[0])

    async with open_tier(tmp_path) as tier:
        for mark, name in enumerate(NAMES[:3], 1):
            assert await tier.admit("a", name, page(mark))
        assert not await tier.admit("a", NAMES[3], page(4))
        assert await tier.unindexed_files() == ()
        assert await fetch_page(tier, NAMES[0]) == (ReadOutcome.VERIFIED, 1)
        assert await tier.admit("a", NAMES[3], page(4))
        assert files_of(tmp_path) == {NAMES[0], NAMES[2], NAMES[3]}
        assert tier.index.total_bytes == 3 * PAGE_BYTES


async def test_eviction_removes_chunks_and_documents(tmp_path: Path) -> None:
    """Eviction of a version, of a tenant or of all removes their chunks, manifests and attestations."""

    async with open_tier(tmp_path, budget=9 * PAGE_BYTES) as tier:
        for tenant in ("a", "b"):
            for number in range(3):
                await tier.admit(tenant, NAMES[number], page(number))
            await tier.keep_document(tenant, "one", b"1", DocumentKind.MANIFESTS)
            await tier.keep_document(tenant, "one", b"s", DocumentKind.ATTESTATIONS)
            await tier.keep_document(tenant, "two", b"2", DocumentKind.MANIFESTS)
        await tier.evict("a", "one", frozenset(NAMES[:2]))
        assert not tier.index.is_readable(("a", NAMES[0]))
        assert tier.index.is_readable(("a", NAMES[2]))
        assert tier.index.is_readable(("b", NAMES[0]))
        assert await tier.try_read_document("a", "one", DocumentKind.MANIFESTS) is None
        assert await tier.try_read_document("a", "one", DocumentKind.ATTESTATIONS) is None
        assert await tier.try_read_document("a", "two", DocumentKind.MANIFESTS) == b"2"
        await tier.evict("a", None, None)
        assert await tier.try_read_document("a", "two", DocumentKind.MANIFESTS) is None
        assert await tier.try_read_document("b", "one", DocumentKind.MANIFESTS) == b"1"
        assert tier.index.file_count == 3
        await tier.evict(None, None, None)
        assert (tier.index.file_count, files_of(tmp_path)) == (0, set())
        assert await tier.try_read_document("b", "one", DocumentKind.MANIFESTS) is None


async def test_documents_stay_within_their_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The least recently used documents are removed, so manifests of years of versions can't fill the disk."""
    monkeypatch.setattr(nvme_tier, "MIN_DOCUMENT_BYTES", 30)

    async with open_tier(tmp_path, budget=1) as tier:
        for number in range(5):
            await tier.keep_document("a", f"v{number}", bytes(10), DocumentKind.MANIFESTS)
            os.utime(tmp_path / "a" / "manifests" / f"v{number}", (number, number))
            if number == 3:
                # this read makes it recent
                assert await tier.try_read_document("a", "v1", DocumentKind.MANIFESTS) is not None
        kept = [
            name
            for name in map("v{}".format, range(5))
            if await tier.try_read_document("a", name, DocumentKind.MANIFESTS)
        ]
        assert kept == ["v1", "v3", "v4"]
        await tier.keep_document("a", "large", bytes(100), DocumentKind.ATTESTATIONS)
        assert await tier.try_read_document("a", "large", DocumentKind.ATTESTATIONS) == bytes(100)


@pytest.mark.parametrize("fault", ["one bad directory", "one bad inode"])
async def test_unreadable_documents_do_not_exempt_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """Other documents stay within the bound and can be evicted."""
    monkeypatch.setattr(nvme_tier, "MIN_DOCUMENT_BYTES", 10)

    async with open_tier(tmp_path, budget=1) as tier:
        await tier.keep_document("a", "bad", bytes(10), DocumentKind.MANIFESTS)
        if fault == "one bad directory":
            refuse_listing(monkeypatch, tmp_path / "a" / "manifests")
        else:
            stat = Path.stat

            def refusing(path: Path, **more: bool) -> os.stat_result:
                if path.name == "bad":
                    raise OSError(errno.EIO, "refused", str(path))
                return stat(path, **more)

            monkeypatch.setattr(Path, "stat", refusing)
        for name in ("v1", "v2"):
            await tier.keep_document("b", name, bytes(10), DocumentKind.MANIFESTS)
        assert await tier.try_read_document("b", "v1", DocumentKind.MANIFESTS) is None
        await tier.evict(None, None, None)
        assert await tier.try_read_document("b", "v2", DocumentKind.MANIFESTS) is None


async def test_documents_from_the_future_do_not_evict_a_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new document counts as the newest, even if others have times in the future."""
    monkeypatch.setattr(nvme_tier, "MIN_DOCUMENT_BYTES", 30)

    async with open_tier(tmp_path, budget=1) as tier:
        for name in ("v0", "v1", "v2"):
            await tier.keep_document("a", name, bytes(10), DocumentKind.MANIFESTS)
            os.utime(tmp_path / "a" / "manifests" / name, (2**33, 2**33))
        await tier.keep_document("a", "new", bytes(10), DocumentKind.MANIFESTS)
        assert await tier.try_read_document("a", "new", DocumentKind.MANIFESTS) is not None
        assert len(list((tmp_path / "a" / "manifests").iterdir())) == 3


async def test_undeletable_document_does_not_exempt_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A manifest that can't be removed is over the bound, and older ones are removed all the same."""

    async with open_tier(tmp_path, budget=1) as tier:
        for number, name in enumerate(("old", "stuck")):
            await tier.keep_document("a", name, bytes(10), DocumentKind.MANIFESTS)
            os.utime(tmp_path / "a" / "manifests" / name, (number, number))
        refuse_removal(monkeypatch, tmp_path / "a" / "manifests" / "stuck")
        monkeypatch.setattr(nvme_tier, "MIN_DOCUMENT_BYTES", 10)
        await tier.keep_document("a", "new", bytes(10), DocumentKind.MANIFESTS)
        assert await tier.try_read_document("a", "old", DocumentKind.MANIFESTS) is None
        assert await tier.try_read_document("a", "new", DocumentKind.MANIFESTS) is not None


class HeldVerify:
    """A verifier whose first check of wrong bytes waits for `go`."""

    def __init__(self) -> None:
        self.held, self.go = threading.Event(), threading.Event()

    def __call__(self, data: memoryview, digest: str) -> bool:
        wrong = data[0] == WRONG
        if wrong and not self.held.is_set():
            self.held.set()
            assert self.go.wait(30)
        return not wrong


@pytest.mark.parametrize("how", ["fetch", "look"])
@pytest.mark.parametrize("again", [True, False], ids=["replaced", "gone"])
async def test_verdict_on_an_old_file_spares_the_new_one(tmp_path: Path, how: str, again: bool) -> None:
    """Two readers find the same damaged file. The slower one does not blame the file that replaced it."""
    verify = HeldVerify()

    async with open_tier(tmp_path, verify=verify) as tier:
        key = ("a", NAMES[0])
        assert await tier.admit(*key, page(WRONG))
        slow = asyncio.create_task(tier.read_for_scrub(*key, page(0)) if how == "look" else tier.fetch(*key, page(0)))
        await asyncio.to_thread(verify.held.wait, 30)
        assert await tier.read_for_scrub(*key, page(0)) is ReadOutcome.DIGEST
        await tier.quarantine(*key)
        if again:
            assert await tier.admit(*key, page(7))
        verify.go.set()
        assert await slow is ReadOutcome.ABSENT
        assert tier.index.is_readable(key) is again
        if again:
            assert await fetch_page(tier, NAMES[0]) == (ReadOutcome.VERIFIED, 7)


async def test_chunk_is_not_admitted_while_its_file_is_quarantined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new file would be moved to quarantine instead of the faulty one."""
    held, go = threading.Event(), threading.Event()
    quarantine = ChunkFiles.quarantine

    def slowly(self: ChunkFiles, path: Path, name: str) -> None:
        held.set()
        assert go.wait(30)
        quarantine(self, path, name)

    monkeypatch.setattr(ChunkFiles, "quarantine", slowly)

    async with open_tier(tmp_path) as tier:
        assert await tier.admit("a", NAMES[0], page(WRONG))
        quarantining = asyncio.create_task(tier.quarantine("a", NAMES[0]))
        await asyncio.to_thread(held.wait, 30)
        assert not await tier.admit("a", NAMES[0], page(7))
        go.set()
        await quarantining
        assert await tier.admit("a", NAMES[0], page(7))
        assert await fetch_page(tier, NAMES[0]) == (ReadOutcome.VERIFIED, 7)
