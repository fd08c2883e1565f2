"""One load per version and one read per chunk for all clients. Every wait ends, and giving up leaks nothing."""

import asyncio
import errno
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kelvin.blobstore.file_store import FileStore
from kelvin.blobstore.memory_store import MemoryStore
from kelvin.contracts.artifacts.manifest import PAGE_BYTES
from kelvin.contracts.errors import CapacityExceeded, Internal, Refused
from kelvin.contracts.traffic_errors import DeadlineExceeded
from kelvin.contracts.wire import encode
from tests.weightcache.kit import (
    HUGE,
    TENANT,
    TIMEOUT_S,
    CountingStore,
    attest,
    make_version,
    make_version_of,
    open_test_cache,
    publish,
    run_agent,
    settings_of,
)
from weightcache.client.lease import Lease
from weightcache.client.lease_protocol import SOCKET, LeaseRequest
from weightcache.fetch import version_loader
from weightcache.host.resident_version import LoadProgress, ResidentVersion

VERSION = make_version(seed=1, pages=(40, 20), chunk_pages=8)


def at_once(call: Callable[[int], Lease], count: int) -> list[Lease]:
    """Run `count` calls that begin together."""
    start = threading.Barrier(count)

    def waiter(number: int) -> Lease:
        start.wait(30)
        return call(number)

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(waiter, range(count)))


def test_two_hundred_leases_read_each_chunk_once(tmp_path: Path) -> None:
    """200 concurrent leases of one version read each chunk once, and all see its bytes."""
    store = CountingStore(FileStore(tmp_path / "store"))
    with run_agent(settings_of(tmp_path), store) as agent:
        agent.publish(VERSION)
        leases = at_once(lambda _: agent.acquire(VERSION), 200)
        assert all(lease.view(0, lease.total_bytes) == VERSION.linear for lease in leases)
        state = agent.state()
        assert (state.leases, state.leases_granted, state.holders) == (200, 200, 1)
        assert state.chunk_reads == {"store": len(VERSION.digests)}
        assert len(store.ranges) == len(set(store.ranges)) == len(VERSION.digests)
        for lease in leases:
            lease.close()
        agent.wait_for("all leases ended", lambda state: state.leases == 0)


def test_shared_chunks_are_read_once(tmp_path: Path) -> None:
    """Two versions that are leased at once read their shared chunks once."""
    base = make_version(seed=1, pages=(40,), files=())
    longer = make_version_of([*base.chunks, b"x" * PAGE_BYTES], 4 * PAGE_BYTES)
    store = CountingStore(FileStore(tmp_path / "store"))
    with run_agent(settings_of(tmp_path), store) as agent:
        for version in (base, longer):
            agent.publish(version)
        leases = at_once(lambda number: agent.acquire((base, longer)[number % 2]), 16)
        for number, lease in enumerate(leases):
            assert lease.view(0, lease.total_bytes) == (base, longer)[number % 2].linear
            lease.close()
        assert agent.state().chunk_reads == {"store": len(longer.digests)}


def test_failure_reaches_every_waiting_client(tmp_path: Path) -> None:
    """A corrupt chunk is read once and refused by name to every waiting client."""
    store = CountingStore(MemoryStore())
    with run_agent(settings_of(tmp_path), store) as agent:
        broken = make_version_of([b"a" * PAGE_BYTES], PAGE_BYTES)
        pack = agent.publish(broken)
        body = bytearray(asyncio.run(store.read(f"{TENANT}/packs/{pack}")))
        body[7] ^= 1
        asyncio.run(store.delete(f"{TENANT}/packs/{pack}"))
        asyncio.run(store.put_if_absent(f"{TENANT}/packs/{pack}", bytes(body)))
        store.gate.clear()
        with ThreadPoolExecutor(20) as threads:
            waiting = [threads.submit(agent.acquire, broken) for _ in range(20)]
            agent.wait_for("the chunk is being read", lambda state: state.host.loading == 1)
            store.gate.set()
            for waiter in waiting:
                with pytest.raises(Refused, match=broken.digests[0]):
                    waiter.result(30)
        assert agent.state().leases_refused == {"chunk_corrupt": 20}


def test_load_ends_with_its_last_client(tmp_path: Path) -> None:
    """Clients that disconnect leave their load. Without clients, queued reads are dropped and no slab is kept."""
    store = CountingStore(FileStore(tmp_path / "store"))
    version = make_version(seed=2, pages=(200,), chunk_pages=4)
    with run_agent(settings_of(tmp_path), store) as agent:
        agent.publish(version)
        store.gate.clear()
        clients = [agent.directory.connect(SOCKET, socket.SOCK_SEQPACKET) for _ in range(3)]
        for client in clients:
            client.send(encode(LeaseRequest(tenant=TENANT, version=version.id)))
        agent.wait_for("loads have begun", lambda state: state.host.loading == len(version.digests))
        for client in clients:
            client.close()
        store.gate.set()
        state = agent.wait_for("nothing is left", lambda state: state.host.loading == 0 and state.host.slabs_busy == 0)
        assert len(store.ranges) < len(version.digests)
        assert state.leases == 0
        with agent.acquire(version) as lease:
            assert lease.view(0, lease.total_bytes) == version.linear


def test_cancelled_lease_leaves_the_shared_load(tmp_path: Path) -> None:
    """The client that began a load may leave, and the others get their leases from it."""
    store = CountingStore(FileStore(tmp_path / "store"))
    with run_agent(settings_of(tmp_path), store) as agent:
        agent.publish(VERSION)
        store.gate.clear()
        first = agent.directory.connect(SOCKET, socket.SOCK_SEQPACKET)
        first.send(encode(LeaseRequest(tenant=TENANT, version=VERSION.id)))
        agent.wait_for("loads have begun", lambda state: state.host.loading > 0)
        with ThreadPoolExecutor(1) as threads:
            second = threads.submit(agent.acquire, VERSION)
            first.close()
            store.gate.set()
            lease = second.result(30)
        assert lease.view(0, lease.total_bytes) == VERSION.linear
        assert agent.state().chunk_reads == {"store": len(VERSION.digests)}
        lease.close()


async def test_lease_during_the_last_clients_exit_is_granted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease that comes just as the last client of a finished load leaves is pinned once, and released."""

    async with open_test_cache(settings_of(tmp_path), VERSION) as cache:
        index = cache.arena.index
        later: list[asyncio.Task[None]] = []

        async def lease() -> None:
            async with cache.version_loader.pin_version(TENANT, VERSION.id, TIMEOUT_S) as arrival:
                assert index.busy_count == len(arrival.resident.slabs)

        def arrived(*_: object) -> None:
            if not later:
                first.cancel()
                later.append(asyncio.create_task(lease()))

        monkeypatch.setattr(cache.version_loader.tier_model, "observe", arrived)
        first = asyncio.create_task(lease())
        with pytest.raises(asyncio.CancelledError):
            await first
        await later[0]
        assert index.busy_count == 0


async def test_timeout_beside_a_load_is_not_its_deadline(tmp_path: Path) -> None:
    """A client that does not read its messages is dropped with a TimeoutError, not refused for its deadline."""

    async def tell(_: LoadProgress) -> None:
        raise TimeoutError

    await publish(FileStore(tmp_path / "store"), VERSION)
    async with open_test_cache(settings_of(tmp_path)) as cache:
        with pytest.raises(TimeoutError):
            await cache.version_loader.pin_version(TENANT, VERSION.id, TIMEOUT_S, on_loading=tell).__aenter__()
        await cache.loader.wait_until_idle()
        assert cache.arena.index.busy_count == 0


def test_waiting_lease_times_out(tmp_path: Path) -> None:
    store = CountingStore(FileStore(tmp_path / "store"))
    with run_agent(settings_of(tmp_path), store) as agent:
        agent.publish(VERSION)
        store.gate.clear()
        with pytest.raises(Refused) as refused:
            agent.acquire(VERSION, timeout_s=0.05)
        assert isinstance(refused.value.failure, DeadlineExceeded)
        store.gate.set()


def test_version_in_memory_needs_no_read(tmp_path: Path) -> None:
    """An attested version in memory is leased without reading disk or store."""
    with run_agent(settings_of(tmp_path)) as agent:
        asyncio.run(attest(agent.store, VERSION.id))
        agent.keep(VERSION)
        for kind in ("manifests", "attestations", "packs", "index"):
            (agent.settings.data / "store" / TENANT / kind).rename(tmp_path / f"gone-{kind}")
        (agent.settings.cache / TENANT).rename(tmp_path / "gone-cache")
        with agent.acquire(VERSION) as lease:
            assert lease.view(0, lease.total_bytes) == VERSION.linear
            assert lease.chunks_by_tier == {"host": len(VERSION.digests), "nvme": 0, "peer": 0, "store": 0}
            assert [found.version for found in lease.attestations] == [VERSION.id]
            assert agent.state().leases_hot == 1


def test_leased_versions_are_not_evicted(tmp_path: Path) -> None:
    """Leased memory stays. A version that needs it is refused as retryable, and one too large for the tier for good."""
    big = make_version(seed=6, pages=(HUGE // PAGE_BYTES,), chunk_pages=64, files=())
    another = make_version(seed=7, pages=(HUGE // PAGE_BYTES,), chunk_pages=64, files=())
    huge = make_version(seed=8, pages=(2 * HUGE // PAGE_BYTES,), chunk_pages=64, files=())
    with run_agent(settings_of(tmp_path, slabs=1)) as agent:
        for version in (big, another, huge):
            agent.publish(version)
        with agent.acquire(big) as lease:
            with pytest.raises(Refused, match="the host tier of the weight cache is full"):
                agent.acquire(another)
            with pytest.raises(Refused, match="slabs of the weight cache: needs 2, has 1"):
                agent.acquire(huge)
            assert lease.view(0, lease.total_bytes) == big.linear


async def test_version_too_large_for_a_lease_evicts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A version that needs more slabs than a lease can hold is refused, and other tenants' versions stay in memory."""
    monkeypatch.setattr(version_loader, "MAX_SLABS", 2)
    kept = [make_version_of([bytes([mark]) * HUGE, bytes([mark + 1]) * HUGE], HUGE) for mark in (1, 3)]
    wide = make_version_of([bytes([mark]) * HUGE for mark in (5, 6, 7)], HUGE)

    await publish(FileStore(tmp_path / "store"), wide, "other")
    async with open_test_cache(settings_of(tmp_path, slabs=4), *kept) as cache:
        with pytest.raises(Refused, match="slabs of a lease: needs 3, has 2"):
            await cache.version_loader.load("other", wide.id, TIMEOUT_S, urgent=True)
        assert all(cache.version_loader.try_hot_tally(TENANT, version.id) for version in kept)


@pytest.mark.parametrize("why", ["too many slabs", "no descriptor left"])
async def test_refused_reservation_leaves_nothing_on_its_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """The refusal comes after places were reserved. Versions that share its chunks load, and later so does it."""
    base = make_version(seed=1, pages=(40,), files=())
    wide = make_version_of([*base.chunks, *(bytes([mark]) * HUGE for mark in (1, 2))], HUGE)

    def refuse(*_: object) -> ResidentVersion:
        raise OSError(errno.EMFILE, "too many open files")

    for version in (base, wide):
        await publish(FileStore(tmp_path / "store"), version)
    async with open_test_cache(settings_of(tmp_path)) as cache:
        with monkeypatch.context() as patch:
            if why == "too many slabs":
                patch.setattr(version_loader, "MAX_SLABS", 2)
                patch.setattr(cache.arena.index, "count_slabs_needed", lambda _: 2)  # as if its chunks were scattered
            else:
                patch.setattr(version_loader, "build_resident", refuse)
            with pytest.raises(Refused) as refused:
                await cache.version_loader.load(TENANT, wide.id, TIMEOUT_S, urgent=True)
            assert isinstance(refused.value.failure, CapacityExceeded if why == "too many slabs" else Internal)
        cache.arena.index.check_integrity()
        assert cache.arena.index.slab_count == 0
        for version in (base, wide):
            async with asyncio.timeout(TIMEOUT_S):
                await cache.version_loader.load(TENANT, version.id, TIMEOUT_S, urgent=True)
        cache.arena.index.check_integrity()
