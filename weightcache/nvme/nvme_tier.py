"""The NVMe tier: chunk files within a budget, with manifests and attestations.

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
from weightcache.nvme.disk_index_policy import DiskIndex
from weightcache.sources.policy.fair_read_queue import ChunkCountLimit, ChunkKey
from weightcache.sources.policy.healing import FAULTS, ReadOutcome
from weightcache.sources.source import UNLIMITED_READ_SLOT, ReadSlot
from weightcache.sources.verifier import Verdict, Verifier

log = logging.getLogger(__name__)

MIN_DOCUMENT_BYTES: Final = 64 << 20  # for documents (manifests and attestations), in addition to the budget of chunks
DOCUMENT_SHARE: Final = 64  # or 1/DOCUMENT_SHARE of that budget, if it is more


class NvmeTier:
    """A `Source` that verifies the chunks that it fetches. `wall_s` is the wall clock, because file times store
    recency.

    At its first read a file is compared with its digest, later with the tag that was taken then, if any. A thread that
    copied a file from the page cache compares it at once. A thread that read the disk passes the bytes to the
    verifier's threads, so that the disk never waits for a comparison.
    """

    tier = "nvme"
    attempts = 1  # the next source has the chunk too

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
        self.bytes_by_read_path: Counter[ReadPath] = Counter()
        self.recognised_bytes = 0
        self._threads = threads
        self._wall_s = wall_s
        self._verifier = verifier
        self._writing: dict[ChunkKey, asyncio.Event] = {}
        self._removing: set[ChunkKey] = set()  # no longer in the index, but perhaps still on the disk
        self.read_limit = ChunkCountLimit(chunks_at_once)

    def __repr__(self) -> str:
        return f"<NvmeTier {self.index!r}>"

    async def open(self) -> None:
        """Lock the directory and index its files. Raises BlockingIOError if another process has it."""
        await run_uncancellable(self._threads, self._files.open)
        for found in await run_uncancellable(self._threads, lambda: list(self._files.scan())):
            self.index.add_existing((found.tenant, found.digest), found.size, found.used_at)
        try:
            await self._remove(self.index.trim())
        except OSError as error:
            log.warning("files beyond the budget were not removed", extra={"error": str(error)})

    def close(self) -> None:
        """Unlock the directory, so that another process may use it."""
        self._files.close()

    def may_have(self, tenant: str, digest: str) -> bool:
        """Return whether the chunk's file is readable or being written."""
        return self.index.is_readable((tenant, digest)) or (tenant, digest) in self._writing

    async def fetch(
        self, tenant: str, digest: str, into: memoryview, slot: ReadSlot = UNLIMITED_READ_SLOT
    ) -> ReadOutcome:
        """Fetch as `Source.fetch` does. If another call is writing the chunk here, wait for that and read its file."""
        key = (tenant, digest)
        if (write_end := self._writing.get(key)) is not None:
            await write_end.wait()
        file_identity = self.index.file_identity(key)
        if file_identity is None:
            return ReadOutcome.ABSENT
        path, tag = self._files.chunk_path(*key), self.index.tag(key)
        reading, verdict = await run_uncancellable(self._threads, self._read, path, digest, into, tag)
        self._count_read(reading, into.nbytes)
        if verdict is None and reading.outcome is ReadOutcome.WHOLE:
            verdict = await self._verifier.compare_in_thread(into, digest, tag)
        outcome = reading.outcome if verdict is None else verdict.outcome
        if outcome in FAULTS and self.index.file_identity(key) is not file_identity:
            return ReadOutcome.ABSENT  # evicted or quarantined meanwhile: the current file is another one
        if outcome is ReadOutcome.MISSING:
            self.index.drop(key)
        else:
            self.index.touch(key, self._wall_s())
            self._remember_tag(key, verdict)
            self.recognised_bytes += into.nbytes * (verdict is not None and verdict.is_recognised)
        return outcome

    def _read(self, path: Path, digest: str, into: memoryview, tag: bytes | None) -> tuple[FileRead, Verdict | None]:
        """Read the file. If it came from the page cache, compare it as well. Blocking."""
        reading = self._files.read(path, into)
        if reading.outcome is not ReadOutcome.WHOLE:
            return reading, None
        return reading, self._verifier.compare(into, digest, tag) if reading.read_path is ReadPath.CACHED else None

    def _remember_tag(self, key: ChunkKey, verdict: Verdict | None) -> None:
        """Store the tag of correct bytes, so that they are recognised when they are read again."""
        if verdict is not None and verdict.tag is not None:
            self.index.mark_verified(key, verdict.tag)

    def _count_read(self, reading: FileRead, length: int) -> None:
        if reading.read_path is None:
            return
        if reading.read_path is ReadPath.BUFFERED and not self.bytes_by_read_path[ReadPath.BUFFERED]:
            log.warning("the file system refuses O_DIRECT: cold files are read through the page cache")
        self.bytes_by_read_path[reading.read_path] += length

    async def read_for_scrub(self, tenant: str, digest: str, into: memoryview) -> ReadOutcome:
        """Read the chunk past the page cache, where the file system can, and compare its digest, not its tag. This does
        not count as a use. Raises `Refused(Unavailable)`.
        """
        key = (tenant, digest)
        file_identity = self.index.file_identity(key)
        if file_identity is None:
            return ReadOutcome.ABSENT
        read = partial(self._files.read, touch=False)
        reading = await run_uncancellable(self._threads, read, self._files.chunk_path(*key), into)
        verdict = await self._verifier.compare_in_thread(into, digest) if reading.outcome is ReadOutcome.WHOLE else None
        outcome = reading.outcome if verdict is None else verdict.outcome
        if outcome in FAULTS and self.index.file_identity(key) is not file_identity:
            return ReadOutcome.ABSENT  # as in `fetch`
        self._remember_tag(key, verdict)
        return outcome

    async def unindexed_files(self) -> tuple[ChunkKey, ...]:
        """Return files with names of chunks that are not in the index, except those being written or removed."""
        found = await run_uncancellable(self._threads, lambda: list(self._files.scan()))
        unknown = self._without_known((each.tenant, each.digest) for each in found)
        return self._without_known(await self._sizes(unknown))

    def _without_known(self, keys: Iterable[ChunkKey]) -> tuple[ChunkKey, ...]:
        return tuple(key for key in keys if not self.index.is_known(key) and key not in self._removing)

    async def _sizes(self, keys: Iterable[ChunkKey]) -> dict[ChunkKey, int]:
        """Return the sizes of those files that exist, as far as the disk reports them."""
        sizes = await run_uncancellable(self._threads, lambda: {key: self._files.size(*key) for key in keys})
        return {key: size for key, size in sizes.items() if size is not None}

    @contextmanager
    def mark_writing(self, tenant: str, digest: str) -> Iterator[None]:
        """Mark the chunk as being fetched or written while the block runs. Other calls for it wait meanwhile. Blocks
        may nest: one call writes the chunk that another one is fetching. Waiters then wait for both.
        """
        key, write_end = (tenant, digest), asyncio.Event()
        outer = self._writing.get(key)
        self._writing[key] = write_end
        try:
            yield
        finally:
            write_end.set()
            if self._writing.get(key) is write_end:
                del self._writing[key]
                if outer is not None and not outer.is_set():
                    self._writing[key] = outer

    async def wait_until_written(self, tenant: str, digest: str) -> bool:
        """Wait until no other call fetches or writes the chunk. Return whether its file can be read then."""
        while (write_end := self._writing.get((tenant, digest))) is not None:
            await write_end.wait()
        return self.index.is_readable((tenant, digest))

    async def wait_until_idle(self) -> None:
        """Wait for the chunks that calls are fetching or writing now, but not for later ones."""
        for write_end in tuple(self._writing.values()):
            await write_end.wait()

    async def quarantine(self, tenant: str, digest: str) -> None:
        """Move the chunk's faulty file to the quarantine. Until then, no new file is written in its place."""
        key = (tenant, digest)
        self.index.drop(key)
        self._removing.add(key)
        try:
            await self._quarantine_file(self._files.chunk_path(*key), f"{tenant}.{digest}")
        finally:
            self._removing.discard(key)

    async def admit(self, tenant: str, digest: str, data: memoryview) -> bool:
        """Write a verified chunk, whose `data` must not change meanwhile. Return whether it was written. False if there
        is no room, the disk refuses, its old file is being removed, or another call writes it or has written it.
        """
        key = (tenant, digest)
        if key in self._removing:  # the removal would delete the new file
            return False
        victims = self.index.admit(key, data.nbytes, self._wall_s())
        if victims is None:
            return False
        with self.mark_writing(tenant, digest):
            return await self._write(key, data, victims)

    async def _write(self, key: ChunkKey, data: memoryview, victims: tuple[ChunkKey, ...]) -> bool:
        """Write the chunk's file after removing `victims` to make room."""
        try:
            await self._remove(victims)
            await run_uncancellable(self._threads, self._files.write, self._files.chunk_path(*key), data, direct=True)
        except BaseException as error:
            self.index.drop(key)
            with suppress(OSError):  # a file that stays is verified like any other
                self._files.remove([self._files.chunk_path(*key)])  # a cancelled write may have finished
            if not isinstance(error, OSError):
                raise
            log.warning("a chunk was not admitted", extra={"chunk": key[1], "error": str(error)})
            return False
        self.index.mark_written(key)
        return True

    async def evict(self, tenant: str | None, version: str | None, digests: frozenset[str] | None) -> None:
        """Remove chunks of the tenant (None: all) among `digests` (None: any), and documents of the version (None:
        all). Raises `Refused(Unavailable)` if the disk refuses. Files that stay can be evicted again.
        """
        keys = self.index.select(tenant, digests)
        for key in keys:
            self.index.drop(key)
        try:
            await self._remove(keys)
            await run_uncancellable(self._threads, lambda: self._files.remove(self._files.documents(tenant, version)))
        except OSError as error:
            raise Refused(Unavailable("the NVMe tier of the weight cache")) from error

    async def try_read_document(self, tenant: str, version: str, kind: DocumentKind) -> bytes | None:
        """Return the kept bytes, unverified, or None if there are none. Raises OSError."""
        path = self._files.document_path(tenant, version, kind)

        def read() -> bytes:
            raw = path.read_bytes()
            with suppress(OSError):  # a read-only disk can still be read
                os.utime(path)  # mark as recently used
            return raw

        try:
            return await run_uncancellable(self._threads, read)
        except FileNotFoundError:
            return None

    async def keep_document(self, tenant: str, version: str, data: bytes, kind: DocumentKind) -> None:
        """Write a manifest or attestations. Errors of the disk are only logged. Old documents may be removed."""
        path = self._files.document_path(tenant, version, kind)
        limit_bytes = max(MIN_DOCUMENT_BYTES, self.index.budget_bytes // DOCUMENT_SHARE)
        try:
            await run_uncancellable(self._threads, self._files.write, path, data, direct=False)
            await run_uncancellable(self._threads, self._files.trim_documents, path, limit_bytes)
        except OSError as error:
            log.warning("a document was not kept", extra={"version": version, "kind": kind, "error": str(error)})

    async def quarantine_document(self, tenant: str, version: str, kind: DocumentKind) -> None:
        """Move a faulty manifest or faulty attestations to the quarantine."""
        await self._quarantine_file(self._files.document_path(tenant, version, kind), f"{tenant}.{kind}.{version}")

    async def _quarantine_file(self, path: Path, name: str) -> None:
        """Quarantine the file. If the disk refuses, the file stays: it is found faulty again, and never served."""
        try:
            await run_uncancellable(self._threads, self._files.quarantine, path, name)
        except OSError as error:
            log.warning("a faulty file was not set aside", extra={"file": name, "error": str(error)})

    async def _remove(self, keys: tuple[ChunkKey, ...]) -> None:
        """Remove files that the index has dropped. Raises OSError if one stays. The index then has it again as just
        used, so that admissions try other files first.
        """
        if not keys:
            return
        self._removing.update(keys)
        try:
            await run_uncancellable(self._threads, self._files.remove, [self._files.chunk_path(*key) for key in keys])
        except OSError:
            for key, size in (await self._sizes(keys)).items():
                self.index.add_existing(key, size, self._wall_s())
            raise
        finally:
            self._removing.difference_update(keys)
