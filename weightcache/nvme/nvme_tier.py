"""The NVMe tier: chunk files within a budget, and the manifests and attestations beside them.

`nvme_admission.py` decides what is written here, and when. A faulty file is moved to a quarantine.
"""

import asyncio
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Final

from kelvin.contracts.errors import Refused, Unavailable
from kelvin.process.thread_calls import run_uncancellable
from weightcache.nvme.chunk_files import ChunkFiles, DocumentKind, FileRead, ReadPath
from weightcache.nvme.disk_index_policy import DiskIndex, Key
from weightcache.sources.policy.fair_read_queue import ChunkCountLimit
from weightcache.sources.policy.healing import FAULTS, ReadOutcome
from weightcache.sources.source import UNLIMITED_READ_SLOT, ReadSlot
from weightcache.sources.verifier import Verdict, Verifier

log = logging.getLogger(__name__)

MIN_DOCUMENT_BYTES: Final = 64 << 20  # for papers (manifests and attestations), beside the budget of chunks
DOCUMENT_SHARE: Final = 64  # or this part of that budget, if it is more


class NvmeTier:
    """A `Source` that verifies what it fetches. `wall_s` is the wall clock, because files keep recency as their time.

    A file is compared with its digest when it is read first, and afterwards with the tag that was taken then, if one
    was. A thread that copied a file out of the page cache compares it at once, as it has nothing else to do. A thread
    that read the disk hands the bytes to the verifier, so that the disk never waits for a comparison.
    """

    tier = "nvme"
    attempts = 1  # the next source has it too

    def __init__(
        self,
        root: Path,
        index: DiskIndex,
        threads: Executor,
        wall_s: Callable[[], float],
        verifier: Verifier,
        chunks_at_once: int,
    ) -> None:
        self._files = ChunkFiles(root)
        self.index = index
        self.bytes_by_way: Counter[ReadPath] = Counter()
        self.recognised_bytes = 0
        self._threads = threads
        self._wall_s = wall_s
        self._verifier = verifier
        self._writing: dict[Key, asyncio.Event] = {}
        self._removing: set[Key] = set()  # in the index no more, but perhaps still on the disk
        self.room = ChunkCountLimit(chunks_at_once)

    def __repr__(self) -> str:
        return f"<NvmeTier {self.index!r}>"

    async def open(self) -> None:
        """Take the directory and learn what it holds. Raises BlockingIOError where another process has it."""
        await run_uncancellable(self._threads, self._files.open)
        for found in await run_uncancellable(self._threads, lambda: list(self._files.scan())):
            self.index.found((found.tenant, found.digest), found.size, found.used_at)
        try:
            await self._remove(self.index.trim())
        except OSError as error:
            log.warning("files beyond the budget were not removed", extra={"error": str(error)})

    def close(self) -> None:
        """Release the directory, so that another process may take it."""
        self._files.close()

    def may_have(self, tenant: str, digest: str) -> bool:
        """See `Source`."""
        return self.index.holds((tenant, digest)) or (tenant, digest) in self._writing

    async def fetch(
        self, tenant: str, digest: str, into: memoryview, turn: ReadSlot = UNLIMITED_READ_SLOT
    ) -> ReadOutcome:
        """See `Source`. If another call is bringing the chunk here, wait for that rather than fetching it anew."""
        key = (tenant, digest)
        if (coming := self._writing.get(key)) is not None:
            await coming.wait()
        copy = self.index.copy_of(key)
        if copy is None:
            return ReadOutcome.ABSENT
        path, tag = self._files.chunk(*key), self.index.tag(key)
        reading, verdict = await run_uncancellable(self._threads, self._read, path, digest, into, tag)
        self._count(reading, into.nbytes)
        if verdict is None and reading.outcome is ReadOutcome.WHOLE:
            verdict = await self._verifier.compare_in_thread(into, digest, tag)
        outcome = reading.outcome if verdict is None else verdict.outcome
        if outcome in FAULTS and self.index.copy_of(key) is not copy:
            return (
                ReadOutcome.ABSENT
            )  # it was evicted or set aside meanwhile: the fault is not that of what is there now
        if outcome is ReadOutcome.MISSING:
            self.index.drop(key)
        else:
            self.index.touch(key, self._wall_s())
            self._remember_tag(key, verdict)
            self.recognised_bytes += into.nbytes * (verdict is not None and verdict.recognised)
        return outcome

    def _read(self, path: Path, digest: str, into: memoryview, tag: bytes | None) -> tuple[FileRead, Verdict | None]:
        """Read the file. If it came out of the page cache, compare it as well. Blocking."""
        reading = self._files.read(path, into)
        if reading.outcome is not ReadOutcome.WHOLE:
            return reading, None
        return reading, self._verifier.compare(into, digest, tag) if reading.way is ReadPath.CACHED else None

    def _remember_tag(self, key: Key, verdict: Verdict | None) -> None:
        """Note the tag of right bytes, so that they are recognised when they are read again."""
        if verdict is not None and verdict.tag is not None:
            self.index.mark_verified(key, verdict.tag)

    def _count(self, reading: FileRead, length: int) -> None:
        if reading.way is None:
            return
        if reading.way is ReadPath.BUFFERED and not self.bytes_by_way[ReadPath.BUFFERED]:
            log.warning("the file system refuses O_DIRECT: what is cold is read through the page cache")
        self.bytes_by_way[reading.way] += length

    async def read_for_scrub(self, tenant: str, digest: str, into: memoryview) -> ReadOutcome:
        """Read the chunk past the page cache and compare its digest, whatever its tag. This does not count as a use.
        Raises `Refused(Unavailable)`.
        """
        key = (tenant, digest)
        copy = self.index.copy_of(key)
        if copy is None:
            return ReadOutcome.ABSENT
        read = partial(self._files.read, touch=False)
        reading = await run_uncancellable(self._threads, read, self._files.chunk(*key), into)
        verdict = await self._verifier.compare_in_thread(into, digest) if reading.outcome is ReadOutcome.WHOLE else None
        outcome = reading.outcome if verdict is None else verdict.outcome
        if outcome in FAULTS and self.index.copy_of(key) is not copy:
            return ReadOutcome.ABSENT  # as in `fetch`
        self._remember_tag(key, verdict)
        return outcome

    async def unindexed_files(self) -> tuple[Key, ...]:
        """Return files with names of chunks that the index does not know, unless they are being written or removed."""
        found = await run_uncancellable(self._threads, lambda: list(self._files.scan()))
        unknown = self._unknown((each.tenant, each.digest) for each in found)
        return self._unknown(await self._sizes(unknown))

    def _unknown(self, keys: Iterable[Key]) -> tuple[Key, ...]:
        return tuple(key for key in keys if not self.index.knows(key) and key not in self._removing)

    async def _sizes(self, keys: Iterable[Key]) -> dict[Key, int]:
        """Return the sizes of those files that are there, as far as the disk tells."""
        sizes = await run_uncancellable(self._threads, lambda: {key: self._files.size(*key) for key in keys})
        return {key: size for key, size in sizes.items() if size is not None}

    @contextmanager
    def coming(self, tenant: str, digest: str) -> Iterator[None]:
        """A block that brings or writes the chunk here, if it can. Other calls for it wait meanwhile, also where one
        writes what another one is bringing: until both have ended.
        """
        key, event = (tenant, digest), asyncio.Event()
        outer = self._writing.get(key)
        self._writing[key] = event
        try:
            yield
        finally:
            event.set()
            if self._writing.get(key) is event:
                del self._writing[key]
                if outer is not None and not outer.is_set():
                    self._writing[key] = outer

    async def wait_until_written(self, tenant: str, digest: str) -> bool:
        """Wait until no other call brings or writes the chunk. Return whether its file can be read then."""
        while (coming := self._writing.get((tenant, digest))) is not None:
            await coming.wait()
        return self.index.holds((tenant, digest))

    async def wait_until_idle(self) -> None:
        """Wait for the chunks that calls bring or write now. Later ones are not waited for."""
        for coming in tuple(self._writing.values()):
            await coming.wait()

    async def quarantine(self, tenant: str, digest: str) -> None:
        """See `Source`. Until the file is moved away, no new one is written in its place."""
        key = (tenant, digest)
        self.index.drop(key)
        self._removing.add(key)
        try:
            await self._set_aside(self._files.chunk(*key), f"{tenant}.{digest}")
        finally:
            self._removing.discard(key)

    async def admit(self, tenant: str, digest: str, data: memoryview) -> bool:
        """Keep a verified chunk, whose `data` must not change meanwhile. Return False if there is no room, the disk
        refused, its old file is just being removed, or another call has written it or is about to.
        """
        key = (tenant, digest)
        if key in self._removing:  # the file would be removed that is to be written
            return False
        gone = self.index.admit(key, data.nbytes, self._wall_s())
        if gone is None:
            return False
        with self.coming(tenant, digest):
            return await self._write(key, data, gone)

    async def _write(self, key: Key, data: memoryview, gone: tuple[Key, ...]) -> bool:
        """Write the file of a chunk for which there is room once `gone` are removed."""
        try:
            await self._remove(gone)
            await run_uncancellable(self._threads, self._files.write, self._files.chunk(*key), data, direct=True)
        except BaseException as error:
            self.index.drop(key)
            with suppress(OSError):  # what stays there is verified like any other file
                self._files.remove([self._files.chunk(*key)])  # cancelled, it may have been finished all the same
            if not isinstance(error, OSError):
                raise
            log.warning("a chunk was not admitted", extra={"chunk": key[1], "error": str(error)})
            return False
        self.index.mark_written(key)
        return True

    async def evict(self, tenant: str | None, version: str | None, digests: frozenset[str] | None) -> None:
        """Remove chunks of the tenant (None: all) that are among `digests` (None: any), and the version's manifest and
        attestations. Raises `Refused(Unavailable)` if the disk refuses: what stays there can be evicted again.
        """
        keys = self.index.select(tenant, digests)
        for key in keys:
            self.index.drop(key)
        try:
            await self._remove(keys)
            await run_uncancellable(self._threads, lambda: self._files.remove(self._files.papers(tenant, version)))
        except OSError as error:
            raise Refused(Unavailable("the NVMe tier of the weight cache")) from error

    async def try_read_document(self, tenant: str, version: str, kind: DocumentKind) -> bytes | None:
        """Return the kept bytes, unverified; None if there are none. Raises OSError."""
        path = self._files.document_path(tenant, version, kind)

        def read() -> bytes:
            raw = path.read_bytes()
            with suppress(OSError):  # a disk that became read-only can still be read
                os.utime(path)  # it is recent
            return raw

        try:
            return await run_uncancellable(self._threads, read)
        except FileNotFoundError:
            return None

    async def keep_document(self, tenant: str, version: str, data: bytes, kind: DocumentKind) -> None:
        """Keep a manifest or attestation. A disk that refuses is no failure. Old ones may be removed."""
        path = self._files.document_path(tenant, version, kind)
        limit_bytes = max(MIN_DOCUMENT_BYTES, self.index.budget_bytes // DOCUMENT_SHARE)
        try:
            await run_uncancellable(self._threads, self._files.write, path, data, direct=False)
            await run_uncancellable(self._threads, self._files.trim_documents, path, limit_bytes)
        except OSError as error:
            log.warning("a paper was not kept", extra={"version": version, "kind": kind, "error": str(error)})

    async def quarantine_document(self, tenant: str, version: str, kind: DocumentKind) -> None:
        """Move a manifest or attestation with wrong bytes aside."""
        await self._set_aside(self._files.document_path(tenant, version, kind), f"{tenant}.{kind}.{version}")

    async def _set_aside(self, path: Path, name: str) -> None:
        """A disk that refuses keeps the file under its name: it is found faulty again, and never served."""
        try:
            await run_uncancellable(self._threads, self._files.quarantine, path, name)
        except OSError as error:
            log.warning("a faulty file was not set aside", extra={"file": name, "error": str(error)})

    async def _remove(self, keys: tuple[Key, ...]) -> None:
        """Remove files that the index has dropped. Raises OSError if one stays: the index has it again then, as just
        used, so that admissions try to remove others before it.
        """
        if not keys:
            return
        self._removing.update(keys)
        try:
            await run_uncancellable(self._threads, self._files.remove, [self._files.chunk(*key) for key in keys])
        except OSError:
            for key, size in (await self._sizes(keys)).items():
                self.index.found(key, size, self._wall_s())
            raise
        finally:
            self._removing.difference_update(keys)
