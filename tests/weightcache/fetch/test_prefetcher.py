"""A version that is asked for ahead is there before its lease, costs no byte twice, and never keeps a lease waiting."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import NoneType

import pytest

from kelvin.blobstore.file_store import FileStore
from kelvin.contracts.artifacts.manifest import PAGE_BYTES
from kelvin.contracts.errors import Refused, RemoteFailure
from tests.weightcache.disks import fill
from tests.weightcache.kit import (
    HUGE,
    TENANT,
    TIMEOUT_S,
    CountingStore,
    RunningAgent,
    Version,
    attest,
    make_version,
    running,
    settings_of,
)
from weightcache.app.api import State
from weightcache.fetch.prefetcher import MAX_UNDER_WAY

VERSION = make_version(seed=1, pages=(40, 20), chunk_pages=8)
LARGE = make_version(seed=2, pages=(200,), chunk_pages=4)
COUNT = len(VERSION.digests)


def settled(agent: RunningAgent) -> State:
    return agent.wait_for(
        "no prefetch is under way", lambda state: state.prefetches.running + state.prefetches.waiting == 0
    )


def test_prefetched_version_needs_no_read(tmp_path: Path) -> None:
    """A lease after it reads nothing; one without it does (the control)."""
    other = make_version(seed=3)
    with running(settings_of(tmp_path)) as agent:
        agent.publish(VERSION)
        agent.publish(other)
        agent.prefetch(VERSION)
        state = settled(agent)
        assert (state.prefetches.done, state.host.chunks) == (1, COUNT)
        agent.wait_for("nothing is pinned", lambda state: state.host.slabs_busy == 0)
        with agent.acquire(VERSION) as lease:
            assert lease.view(0, lease.total_bytes) == VERSION.linear
            assert lease.chunks_by_tier["host"] == COUNT
        assert agent.state().chunk_reads == {"store": COUNT}
        agent.acquire(other).close()
        assert agent.state().chunk_reads == {"store": COUNT + len(other.digests)}


def test_prefetch_shares_one_load_with_leases(tmp_path: Path) -> None:
    """However often it is asked for, and leased meanwhile: each chunk is read once."""
    store = CountingStore(FileStore(tmp_path / "store"))
    with running(settings_of(tmp_path), store) as agent:
        agent.publish(VERSION)
        store.gate.clear()
        for _ in range(5):
            agent.prefetch(VERSION)
        state = agent.wait_for("it loads", lambda state: state.host.loading > 0)
        assert (state.prefetches.running, state.prefetches.waiting) == (1, 0)
        with ThreadPoolExecutor(1) as threads:
            leasing = threads.submit(agent.acquire, VERSION)
            agent.wait_for("it is leased", lambda state: state.connections == 1)
            store.gate.set()
            with leasing.result(TIMEOUT_S) as lease:
                assert lease.view(0, lease.total_bytes) == VERSION.linear
        assert settled(agent).prefetches.gave_way == 0
        assert len(store.ranges) == len(set(store.ranges)) == COUNT


@pytest.mark.parametrize("urgent", [False, True])
def test_prefetch_yields_to_a_lease(tmp_path: Path, urgent: bool) -> None:
    """What is queued of it is put back for another version's lease, and brought after it; not where a start waits."""
    store = CountingStore(FileStore(tmp_path / "store"))
    with running(settings_of(tmp_path), store) as agent:
        agent.publish(VERSION)
        agent.publish(LARGE)
        store.gate.clear()
        agent.prefetch(LARGE, urgent=urgent)
        agent.wait_for("it loads", lambda state: state.host.loading == len(LARGE.digests))
        with ThreadPoolExecutor(1) as threads:
            leasing = threads.submit(agent.acquire, VERSION)
            gave_way = 0 if urgent else 1
            want = (1, gave_way)
            agent.wait_for("it is leased", lambda state: (state.connections, state.prefetches.gave_way) == want)
            store.gate.set()
            leasing.result(TIMEOUT_S).close()
        state = settled(agent)
        assert (state.prefetches.gave_way, state.prefetches.done) == (gave_way, 1)
        assert len(store.ranges) == len(set(store.ranges)) == len(LARGE.digests) + COUNT
        with agent.acquire(LARGE) as lease:
            assert lease.view(0, lease.total_bytes) == LARGE.linear


def test_the_lease_of_an_urgent_one_is_told_where_its_bytes_came_from(tmp_path: Path) -> None:
    """A start that prefetched is a start from the store, once; a version brought long before is in memory."""
    with running(settings_of(tmp_path)) as agent:
        for version, urgent in ((VERSION, True), (LARGE, False)):
            agent.publish(version)
            asyncio.run(attest(agent.store, version.id))
            agent.prefetch(version, urgent=urgent)
        settled(agent)
        with agent.acquire(VERSION) as first, agent.acquire(VERSION) as second, agent.acquire(LARGE) as other:
            assert first.chunks_by_tier["store"] == COUNT
            assert second.chunks_by_tier["host"] == COUNT
            assert other.chunks_by_tier["host"] == len(LARGE.digests)
        assert agent.state().leases_hot == 2


def test_nvme_prefetch_uses_no_memory(tmp_path: Path) -> None:
    """Its chunks are files, and none is in memory; a lease finds them there."""
    with running(settings_of(tmp_path)) as agent:
        agent.publish(VERSION)
        agent.prefetch(VERSION, "nvme")
        state = settled(agent)
        assert (state.nvme.chunks, state.host.chunks) == (COUNT, 0)
        with agent.acquire(VERSION) as lease:
            assert lease.chunks_by_tier["nvme"] == COUNT
        agent.prefetch(VERSION, "nvme")
        assert settled(agent).chunk_reads == {"store": COUNT, "nvme": COUNT}


def test_two_that_bring_the_same_to_nvme(tmp_path: Path) -> None:
    """A deploy's and a start's: each chunk is read once, both come to their end, and so does a lease that waits."""
    store = CountingStore(FileStore(tmp_path / "store"))
    with running(settings_of(tmp_path), store) as agent:
        agent.publish(VERSION)
        store.gate.clear()
        agent.prefetch(VERSION, "nvme")
        agent.wait_for("it is being read", lambda _: len(store.ranges) == 1)
        agent.prefetch(VERSION, "nvme", urgent=True)
        agent.wait_for("both run", lambda state: state.prefetches.running == 2)
        with ThreadPoolExecutor(1) as threads:
            leasing = threads.submit(agent.acquire, VERSION)
            agent.wait_for("it is leased", lambda state: state.host.loading > 0)
            store.gate.set()
            with leasing.result(TIMEOUT_S) as lease:
                assert lease.view(0, lease.total_bytes) == VERSION.linear
        state = settled(agent)
        assert (state.prefetches.done, state.prefetches.failed) == (2, {})
        assert len(store.ranges) == len(set(store.ranges)) == COUNT


def test_what_does_not_fit_the_host_tier_comes_to_nvme(tmp_path: Path) -> None:
    """A version of two slabs, where there is one."""
    huge = make_version(seed=8, pages=(2 * HUGE // PAGE_BYTES,), chunk_pages=128, files=())
    with running(settings_of(tmp_path, slabs=1)) as agent:
        agent.publish(huge)
        agent.prefetch(huge)
        state = settled(agent)
        assert (state.prefetches.done, state.nvme.chunks, state.host.chunks) == (1, len(huge.digests), 0)


def test_a_tenants_quota(tmp_path: Path) -> None:
    """A version larger than one tenant's share is refused by that name; what another tenant has within its share is
    not taken for one that has more.
    """
    mine, more, theirs = (
        make_version(seed=n, pages=(HUGE // PAGE_BYTES,), chunk_pages=64, files=()) for n in (1, 2, 3)
    )
    huge = make_version(seed=8, pages=(2 * HUGE // PAGE_BYTES,), chunk_pages=64, files=())
    with running(replace(settings_of(tmp_path, slabs=2), host_quota=50)) as agent:
        for version in (mine, more, huge):
            agent.publish(version)
        agent.publish(theirs, tenant="other")
        with pytest.raises(Refused, match=r"one tenant may have \(KELVIN_HOST_QUOTA\): needs 2, has 1"):
            agent.acquire(huge)
        for version, tenant in ((theirs, "other"), (mine, TENANT), (more, TENANT)):
            agent.prefetch(version, tenant=tenant)
            settled(agent)
            agent.wait_for("nothing is pinned", lambda state: state.host.slabs_busy == 0)
        state = agent.state()
        assert (state.host.slabs_quota, state.host.slabs_by_tenant) == (1, {TENANT: 1, "other": 1})
        with agent.acquire(theirs, tenant="other") as lease:
            assert lease.chunks_by_tier["host"] == len(theirs.digests)


def full(seed: int) -> Version:
    """As large as a slab."""
    return make_version(seed=seed, pages=(HUGE // PAGE_BYTES,), chunk_pages=64, files=())


def test_demand_elsewhere_gets_the_place(tmp_path: Path) -> None:
    """A start of another version, for which there is room only where one is being brought ahead: that is given up,
    what it was just reading is waited for, and the start is not refused.
    """
    store = CountingStore(FileStore(tmp_path / "store"))
    ahead, wanted = full(1), full(2)
    with running(settings_of(tmp_path, slabs=1), store) as agent:
        agent.publish(ahead)
        agent.publish(wanted)
        store.gate.clear()
        agent.prefetch(ahead)
        agent.wait_for("it loads", lambda state: state.reads_running.get("store", 0) > 0)
        with ThreadPoolExecutor(1) as threads:
            leasing = threads.submit(agent.acquire, wanted)
            agent.wait_for("it gives way", lambda state: state.prefetches.gave_way == 1)
            store.gate.set()
            with leasing.result(TIMEOUT_S) as lease:
                assert lease.view(0, lease.total_bytes) == wanted.linear
                assert settled(agent).prefetches.failed == {}


def test_a_failure_is_counted_by_its_code(tmp_path: Path) -> None:
    """Nobody waits for it, so nobody is told."""
    with running(settings_of(tmp_path)) as agent:
        agent.prefetch("0" * 64)
        agent.prefetch("0" * 64, "nvme")
        assert settled(agent).prefetches.failed == {"manifest_missing": 2}


def test_prefetches_are_bounded(tmp_path: Path) -> None:
    """One more than there may be is told to come again; those that wait end with the agent."""
    store = CountingStore(FileStore(tmp_path / "store"))
    with running(settings_of(tmp_path), store) as agent:
        agent.publish(VERSION)
        store.gate.clear()
        agent.prefetch(VERSION)
        for number in range(1, MAX_UNDER_WAY):
            agent.prefetch(f"{number:064x}")
        with pytest.raises(Refused, match="the queue of prefetches is full") as refused:
            agent.prefetch(f"{MAX_UNDER_WAY:064x}")
        assert isinstance(refused.value.failure, RemoteFailure)
        assert refused.value.failure.remote_status == 503
        state = agent.state()
        assert (state.prefetches.running, state.prefetches.waiting) == (1, MAX_UNDER_WAY - 1)
        store.gate.set()


@pytest.mark.parametrize(
    "body",
    [
        pytest.param({"tenant": "acme"}, id="no version"),
        pytest.param({"tenant": "acme", "version": "12"}, id="a short version"),
        pytest.param({"tenant": "../x", "version": VERSION.id}, id="a path"),
        pytest.param({"tenant": "acme", "version": VERSION.id, "tier": "device"}, id="no such tier"),
        pytest.param({"tenant": "acme", "version": VERSION.id, "soon": True}, id="a stranger"),
    ],
)
def test_bad_wishes(tmp_path: Path, body: dict[str, object]) -> None:
    """A wish that makes no sense is refused with its reason."""
    with running(settings_of(tmp_path)) as agent:
        with pytest.raises(Refused) as refused:
            agent.ask("POST", "/v1/prefetch", NoneType, body)
        assert isinstance(refused.value.failure, RemoteFailure)
        assert refused.value.failure.remote_status == 400


@pytest.mark.parametrize("why", ["larger than the tier", "what others keep", "the disk is full"])
def test_what_nvme_cannot_keep_is_not_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    """However often a version is prefetched, the store is not read for chunks that would not be kept."""
    nvme_bytes = {"larger than the tier": len(LARGE.linear) - 1, "what others keep": 3 * len(LARGE.linear) // 2}
    settings = replace(settings_of(tmp_path, nvme_bytes=nvme_bytes.get(why, 1 << 30)), nvme_quota=50)
    with running(settings) as agent:
        if why == "what others keep":
            agent.publish(LARGE, "umbrella")
            agent.prefetch(LARGE, "nvme", tenant="umbrella")
            assert settled(agent).prefetches.done == 1
        before = agent.state().chunk_reads.get("store", 0)
        if why == "the disk is full":
            fill(monkeypatch)
        agent.publish(LARGE)
        for _ in range(3):
            agent.prefetch(LARGE, "nvme")
            state = settled(agent)
        reads = state.chunk_reads.get("store", 0) - before
        if why == "the disk is full":
            assert reads == 3  # each prefetch learns it from its first chunk
            assert state.prefetches.failed == {"unavailable": 3}
        else:
            assert reads == 0
            assert state.prefetches.failed == {"capacity_exceeded": 3}
