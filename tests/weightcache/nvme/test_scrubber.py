"""A chunk that changes after its verification is found, dropped and loaded again, in memory and on NVMe."""

import asyncio
import json
import os
import threading
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

from kelvin.blobstore.file_store import FileStore
from kelvin.contracts.errors import Refused, Unavailable
from tests.weightcache.flips import flip_bit_of_process
from tests.weightcache.kit import (
    TENANT,
    TIMEOUT_S,
    CountingStore,
    Version,
    make_version,
    open_test_cache,
    run_agent,
    settings_of,
)
from tests.weightcache.processes import lease_in_process
from weightcache.app.cache import Cache
from weightcache.nvme.scrubber import BUSY_PAUSE_S, BYTES_PER_S, Fault, Scrubber, ScrubReport
from weightcache.sources.policy.healing import ReadOutcome
from weightcache.sources.source import is_digest_of

VERSION = make_version(seed=1, pages=(40, 20), chunk_pages=8)
OTHER = make_version(seed=2, pages=(8,), chunk_pages=8)
COUNT = len(VERSION.digests)


def open_loaded_cache(root: Path) -> AbstractAsyncContextManager[Cache]:
    """Open a cache that has both versions in memory and on NVMe."""
    return open_test_cache(settings_of(root), VERSION, OTHER)


async def flip(cache: Cache, digest: str) -> None:
    """Flip one bit of the chunk in memory."""
    place = cache.arena.index.try_place(TENANT, digest)
    assert place is not None
    view = await cache.arena.view(place)
    view[7] ^= 1


def damage(path: Path) -> None:
    """Flip one bit of the file."""
    with path.open("r+b") as file:
        byte = file.read(1)[0]
        file.seek(0)
        file.write(bytes([byte ^ 1]))


async def read_leased(cache: Cache, version: Version) -> bytes:
    """Return the version's bytes as a lease would map them now."""
    async with cache.version_loader.pin_version(TENANT, version.id, TIMEOUT_S) as arrival:
        raw = os.pread(arrival.resident.documents.fd, 1 << 20, arrival.resident.manifest_bytes)
        slabs = [cache.arena.slab(number) for number in arrival.resident.slabs]
        extents = json.loads(raw)["extents"]
        return b"".join(bytes(slabs[slab].view(offset, length)) for _, slab, offset, length in extents)


async def scrub_once(cache: Cache) -> list[float]:
    """Scrub once. Return the requested sleeps."""
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        await asyncio.sleep(0)

    await Scrubber(cache.examiner, 1.0, lambda: False, cache.counters, sleep).run_pass()
    return slept


async def test_a_flip_in_memory(tmp_path: Path) -> None:
    """The chunk is dropped and loaded again from its file into another place. Other versions' chunks stay."""

    async with open_loaded_cache(tmp_path) as cache:
        bad = VERSION.digests[3]
        before = cache.arena.index.try_place(TENANT, bad)
        await flip(cache, bad)
        await scrub_once(cache)
        assert cache.counters.chunk_faults == {"host": {ReadOutcome.DIGEST: 1}}
        assert cache.arena.index.try_place(TENANT, bad) is None
        reads = cache.counters.chunk_reads["nvme"]
        assert await read_leased(cache, VERSION) == VERSION.linear
        assert await read_leased(cache, OTHER) == OTHER.linear
        assert cache.counters.chunk_reads["nvme"] == reads + 1
        assert cache.arena.index.try_place(TENANT, bad) != before
        cache.arena.index.check_integrity()
        assert (await scrub_once(cache), cache.counters.chunk_faults["host"][ReadOutcome.DIGEST])[1] == 1
        assert cache.counters.scrub_passes == 2


async def test_two_looks_at_one_wrong_chunk_in_memory(tmp_path: Path) -> None:
    """Two checks find the same wrong chunk. The slower one does not drop the copy that is being loaded."""
    bad = VERSION.digests[3]
    slow, go, looks = threading.Event(), threading.Event(), count()

    def verify(data: memoryview, digest: str) -> bool:
        right = is_digest_of(data, digest)
        if not right and next(looks) == 0:
            slow.set()
            assert go.wait(TIMEOUT_S)
        return right

    store = CountingStore(FileStore(tmp_path / "store"))
    async with open_test_cache(settings_of(tmp_path), VERSION, store=store, verify=verify) as cache:
        await cache.evict("nvme", None, None)
        await flip(cache, bad)
        scrub = asyncio.create_task(cache.examiner.examine("host", TENANT, bad))
        await asyncio.to_thread(slow.wait, TIMEOUT_S)
        assert await cache.examiner.examine("host", TENANT, bad) is ReadOutcome.DIGEST
        store.gate.clear()
        lease = asyncio.create_task(read_leased(cache, VERSION))
        while not cache.arena.index.is_loading(TENANT, bad):
            await asyncio.sleep(0)
        go.set()
        assert await scrub is ReadOutcome.ABSENT
        store.gate.set()
        async with asyncio.timeout(TIMEOUT_S):
            assert await lease == VERSION.linear
        assert cache.counters.chunk_faults["host"] == {ReadOutcome.DIGEST: 1}
        await cache.loader.wait_until_idle()
        assert cache.arena.index.busy_count == 0
        cache.arena.index.check_integrity()


async def test_control_without_a_scrub_serves_changed_bytes(tmp_path: Path) -> None:
    """Negative control: without a scrub, the changed bytes are leased."""

    async with open_loaded_cache(tmp_path) as cache:
        await flip(cache, VERSION.digests[3])
        assert await read_leased(cache, VERSION) != VERSION.linear


@pytest.mark.parametrize("kind", [ReadOutcome.DIGEST, ReadOutcome.LENGTH, ReadOutcome.MISSING])
async def test_scrub_replaces_a_damaged_file(tmp_path: Path, kind: ReadOutcome) -> None:
    """The file is quarantined and written again from memory. Files that are right keep their times of use."""

    async with open_loaded_cache(tmp_path) as cache:
        root = tmp_path / "cache" / TENANT
        path, whole = (root / digest[:2] / digest for digest in VERSION.digests[:2])
        os.utime(whole, (1.0, 1.0))
        match kind:
            case ReadOutcome.DIGEST:
                damage(path)
            case ReadOutcome.LENGTH:
                path.write_bytes(b"")
            case _:
                path.unlink()
        await scrub_once(cache)
        assert cache.counters.chunk_faults == {"nvme": {kind: 1}}
        assert path.read_bytes() == VERSION.chunks[0]
        assert cache.counters.healed_chunks == {"host": 1}
        assert len(list((tmp_path / "cache").glob(".quarantine/*"))) == (kind is not ReadOutcome.MISSING)
        assert whole.stat().st_mtime == 1.0
        assert await read_leased(cache, VERSION) == VERSION.linear


@pytest.mark.parametrize("kind", [ReadOutcome.DIGEST, ReadOutcome.LENGTH])
async def test_a_wrong_file_that_memory_has_no_right_copy_of(tmp_path: Path, kind: ReadOutcome) -> None:
    """The file is written again from the store, even if memory's copy is wrong. Without the store, it is set aside."""

    async with open_loaded_cache(tmp_path) as cache:
        paths = [tmp_path / "cache" / TENANT / digest[:2] / digest for digest in VERSION.digests[:2]]
        for path in paths:
            if kind is ReadOutcome.DIGEST:
                damage(path)
            else:
                path.write_bytes(b"x" * 8192)
        await flip(cache, VERSION.digests[0])
        await cache.examiner.examine("nvme", TENANT, VERSION.digests[0])
        assert cache.counters.chunk_faults == {"nvme": {kind: 1}, "host": {ReadOutcome.DIGEST: 1}}
        assert paths[0].read_bytes() == VERSION.chunks[0]
        cache.arena.evict(None, None)
        (tmp_path / "store").rename(tmp_path / "away")
        await cache.examiner.examine("nvme", TENANT, VERSION.digests[1])
        assert not paths[1].exists()
        assert cache.counters.healed_chunks == {"store": 1}
        (tmp_path / "away").rename(tmp_path / "store")
        assert await read_leased(cache, VERSION) == VERSION.linear


async def test_scrub_is_paced_and_pauses_during_loads(tmp_path: Path) -> None:
    """Scrubbing sleeps as long as its bytes take at `BYTES_PER_S`, and pauses during loads."""

    async with open_loaded_cache(tmp_path) as cache:
        total_bytes = 2 * (len(VERSION.linear) + len(OTHER.linear))
        assert sum(await scrub_once(cache)) == pytest.approx(total_bytes / BYTES_PER_S)
        assert sum(cache.counters.examined_chunks.values()) == 2 * (COUNT + len(OTHER.digests))
        waits: list[float] = []

        async def sleep(seconds: float) -> None:
            waits.append(seconds)
            await asyncio.sleep(0)

        scrubber = Scrubber(cache.examiner, 1.0, lambda: len(waits) < 5, cache.counters, sleep)
        await scrubber.run_pass()
        assert waits[:5] == [BUSY_PAUSE_S] * 5


async def test_defect_over_one_chunk_stops_no_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The chunks after it are checked."""

    async with open_loaded_cache(tmp_path) as cache:
        examine, examined = cache.examiner.examine, list[str]()

        async def fail_first(tier: str, tenant: str, digest: str) -> ReadOutcome:
            examined.append(digest)
            if len(examined) == 1:
                raise ZeroDivisionError
            return await examine(tier, tenant, digest)

        monkeypatch.setattr(cache.examiner, "examine", fail_first)
        await scrub_once(cache)
        assert len(examined) == 2 * (COUNT + len(OTHER.digests))


async def test_a_silent_disk_is_not_reported_as_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A check counts only chunks that it hashed, and says that the disk did not answer. No chunk is dropped for it."""

    async def refuse(tenant: str, digest: str, into: memoryview) -> ReadOutcome:
        raise Refused(Unavailable("the disk"))

    async with open_loaded_cache(tmp_path) as cache:
        chunks = COUNT + len(OTHER.digests)
        monkeypatch.setattr(cache.nvme, "read_for_scrub", refuse)
        report = await cache.examiner.examine_all()
        assert (report.chunks, report.bytes["nvme"]) == ({"host": chunks, "nvme": 0}, 0)
        assert cache.counters.examined_chunks == {"host": chunks, "nvme": 0}
        assert report.faults == ()
        assert report.contradictions == (f"the tier nvme: its disk did not answer for {chunks} chunks",)
        monkeypatch.undo()
        assert (await cache.examiner.examine_all()).chunks == {"host": chunks, "nvme": chunks}


def test_check_on_demand_finds_faulty_and_stray_files(tmp_path: Path) -> None:
    """A check on demand names and drops a faulty chunk, names a stray file, and finds nothing the next time."""
    with run_agent(settings_of(tmp_path)) as agent:
        agent.keep(VERSION)
        whole = {"host": COUNT, "nvme": COUNT}
        size = {"host": len(VERSION.linear), "nvme": len(VERSION.linear)}
        assert agent.ask("POST", "/v1/check", ScrubReport) == ScrubReport(whole, size, (), ())
        damage(agent.chunk_file(VERSION.digests[0]))
        stray = tmp_path / "cache" / TENANT / "00" / ("0" * 64)
        stray.parent.mkdir(exist_ok=True)
        stray.write_bytes(b"")
        found = agent.ask("POST", "/v1/check", ScrubReport)
        assert found.faults == (Fault("nvme", TENANT, VERSION.digests[0], "digest"),)
        assert found.contradictions == (f"{TENANT}/{'0' * 64}: a file that is in no index",)
        stray.unlink()
        assert agent.ask("POST", "/v1/check", ScrubReport).faults == ()
        assert agent.state().damaged == ()


def test_process_with_damaged_memory_is_named(tmp_path: Path) -> None:
    """The process is named as long as it lives. Processes with the healed version or another one are not."""
    with run_agent(settings_of(tmp_path)) as agent:
        agent.publish(VERSION)
        agent.publish(OTHER)
        with lease_in_process(agent, VERSION) as first, lease_in_process(agent, OTHER):
            flip_bit_of_process(os.getpid(), VERSION.chunks[3], 100)
            (fault,) = agent.ask("POST", "/v1/check", ScrubReport).faults
            assert (fault.tier, fault.chunk) == ("host", VERSION.digests[3])
            with agent.acquire(VERSION) as lease:
                assert lease.view(0, lease.total_bytes) == VERSION.linear
                (found,) = agent.state().damaged
                assert (found.tenant, found.chunk, found.pids) == (TENANT, VERSION.digests[3], (first.process.pid,))
        agent.wait_for("the process is dead", lambda state: state.damaged == ())


def test_an_agent_scrubs_by_itself(tmp_path: Path) -> None:
    """With `KELVIN_SCRUB_S`, the agent finds a wrong file without a request."""
    with run_agent(replace(settings_of(tmp_path), scrub_s=0.05)) as agent:
        agent.keep(VERSION)
        damage(agent.chunk_file(VERSION.digests[0]))
        state = agent.wait_for("it was found", lambda state: "nvme" in state.chunk_faults)
        assert state.chunk_faults == {"nvme": {"digest": 1}}
        agent.wait_for("a pass came to its end", lambda state: state.sweeps > 0)
