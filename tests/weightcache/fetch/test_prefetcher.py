"""A prefetched version is loaded before its lease, no byte is read twice, and no lease ever waits for a prefetch."""

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
    run_agent,
    settings_of,
)
from weightcache.app.api import State
from weightcache.fetch.prefetcher import MAX_PREFETCHES

VERSION = make_version(seed=1, pages=(40, 20), chunk_pages=8)
LARGE = make_version(seed=2, pages=(200,), chunk_pages=4)
COUNT = len(VERSION.digests)


def wait_until_idle(agent: RunningAgent) -> State:
    return agent.wait_for(
        "no prefetch is running or waiting", lambda state: state.prefetches.running + state.prefetches.waiting == 0
    )


def test_prefetched_version_needs_no_read(tmp_path: Path) -> None:
    """A lease after the prefetch reads nothing. The control: a lease without one reads all chunks."""
    other = make_version(seed=3)
    with run_agent(settings_of(tmp_path)) as agent:
        agent.publish(VERSION)
        agent.publish(other)
        agent.prefetch(VERSION)
        state = wait_until_idle(agent)
        assert (state.prefetches.done, state.host.chunks) == (1, COUNT)
        agent.wait_for("nothing is pinned", lambda state: state.host.slabs_busy == 0)
        with agent.acquire(VERSION) as lease:
            assert lease.view(0, lease.total_bytes) == VERSION.linear
            assert lease.chunks_by_tier["host"] == COUNT
        assert agent.state().chunk_reads == {"store": COUNT}
        agent.acquire(other).close()
        assert agent.state().chunk_reads == {"store": COUNT + len(other.digests)}


def test_prefetch_shares_one_load_with_leases(tmp_path: Path) -> None:
    """However often the version is prefetched and leased meanwhile, each chunk is read once."""
    store = CountingStore(FileStore(tmp_path / "store"))
    with run_agent(settings_of(tmp_path), store) as agent:
        agent.publish(VERSION)
        store.gate.clear()
        for _ in range(5):
            agent.prefetch(VERSION)
        state = agent.wait_for("the prefetch loads", lambda state: state.host.loading > 0)
        assert (state.prefetches.running, state.prefetches.waiting) == (1, 0)
        with ThreadPoolExecutor(1) as threads:
            leasing = threads.submit(agent.acquire, VERSION)
            agent.wait_for("a lease waits", lambda state: state.connections == 1)
            store.gate.set()
            with leasing.result(TIMEOUT_S) as lease:
                assert lease.view(0, lease.total_bytes) == VERSION.linear
        assert wait_until_idle(agent).prefetches.gave_way == 0
        assert len(store.ranges) == len(set(store.ranges)) == COUNT


@pytest.mark.parametrize("urgent", [False, True])
def test_prefetch_yields_to_a_lease(tmp_path: Path, urgent: bool) -> None:
    """Queued reads wait until another version's lease is done. An urgent prefetch does not yield."""
    store = CountingStore(FileStore(tmp_path / "store"))
    with run_agent(settings_of(tmp_path), store) as agent:
        agent.publish(VERSION)
        agent.publish(LARGE)
        store.gate.clear()
        agent.prefetch(LARGE, urgent=urgent)
        agent.wait_for("the prefetch loads", lambda state: state.host.loading == len(LARGE.digests))
        with ThreadPoolExecutor(1) as threads:
            leasing = threads.submit(agent.acquire, VERSION)
            gave_way = 0 if urgent else 1
            want = (1, gave_way)
            agent.wait_for("a lease waits", lambda state: (state.connections, state.prefetches.gave_way) == want)
            store.gate.set()
            leasing.result(TIMEOUT_S).close()
        state = wait_until_idle(agent)
        assert (state.prefetches.gave_way, state.prefetches.done) == (gave_way, 1)
        assert len(store.ranges) == len(set(store.ranges)) == len(LARGE.digests) + COUNT
        with agent.acquire(LARGE) as lease:
            assert lease.view(0, lease.total_bytes) == LARGE.linear


def test_lease_after_an_urgent_prefetch_reports_its_tiers(tmp_path: Path) -> None:
    """The first lease after an urgent prefetch reports the store. All other leases report memory."""
    with run_agent(settings_of(tmp_path)) as agent:
        for version, urgent in ((VERSION, True), (LARGE, False)):
            agent.publish(version)
            asyncio.run(attest(agent.store, version.id))
            agent.prefetch(version, urgent=urgent)
        wait_until_idle(agent)
        with agent.acquire(VERSION) as first, agent.acquire(VERSION) as second, agent.acquire(LARGE) as other:
            assert first.chunks_by_tier["store"] == COUNT
            assert second.chunks_by_tier["host"] == COUNT
            assert other.chunks_by_tier["host"] == len(LARGE.digests)
        assert agent.state().leases_hot == 2


def test_nvme_prefetch_uses_no_memory(tmp_path: Path) -> None:
    """The prefetched chunks are only on NVMe, and a lease reads them from there."""
    with run_agent(settings_of(tmp_path)) as agent:
        agent.publish(VERSION)
        agent.prefetch(VERSION, "nvme")
        state = wait_until_idle(agent)
        assert (state.nvme.chunks, state.host.chunks) == (COUNT, 0)
        with agent.acquire(VERSION) as lease:
            assert lease.chunks_by_tier["nvme"] == COUNT
        agent.prefetch(VERSION, "nvme")
        assert wait_until_idle(agent).chunk_reads == {"store": COUNT, "nvme": COUNT}


def test_two_prefetches_to_nvme_share_their_reads(tmp_path: Path) -> None:
    """Two prefetches and a waiting lease read each chunk once, and all of them finish."""
    store = CountingStore(FileStore(tmp_path / "store"))
    with run_agent(settings_of(tmp_path), store) as agent:
        agent.publish(VERSION)
        store.gate.clear()
        agent.prefetch(VERSION, "nvme")
        agent.wait_for("the prefetch reads", lambda _: len(store.ranges) == 1)
        agent.prefetch(VERSION, "nvme", urgent=True)
        agent.wait_for("both run", lambda state: state.prefetches.running == 2)
        with ThreadPoolExecutor(1) as threads:
            leasing = threads.submit(agent.acquire, VERSION)
            agent.wait_for("a lease waits", lambda state: state.host.loading > 0)
            store.gate.set()
            with leasing.result(TIMEOUT_S) as lease:
                assert lease.view(0, lease.total_bytes) == VERSION.linear
        state = wait_until_idle(agent)
        assert (state.prefetches.done, state.prefetches.failed) == (2, {})
        assert len(store.ranges) == len(set(store.ranges)) == COUNT


def test_version_too_large_for_memory_is_prefetched_to_nvme(tmp_path: Path) -> None:
    """A version of two slabs does not fit an agent with one."""
    huge = make_version(seed=8, pages=(2 * HUGE // PAGE_BYTES,), chunk_pages=128, files=())
    with run_agent(settings_of(tmp_path, slabs=1)) as agent:
        agent.publish(huge)
        agent.prefetch(huge)
        state = wait_until_idle(agent)
        assert (state.prefetches.done, state.nvme.chunks, state.host.chunks) == (1, len(huge.digests), 0)


def test_prefetch_respects_tenant_quotas(tmp_path: Path) -> None:
    """A version over its tenant's quota is refused with the setting's name. Another tenant keeps its slabs."""
    mine, more, theirs = (
        make_version(seed=n, pages=(HUGE // PAGE_BYTES,), chunk_pages=64, files=()) for n in (1, 2, 3)
    )
    huge = make_version(seed=8, pages=(2 * HUGE // PAGE_BYTES,), chunk_pages=64, files=())
    with run_agent(replace(settings_of(tmp_path, slabs=2), host_quota=50)) as agent:
        for version in (mine, more, huge):
            agent.publish(version)
        agent.publish(theirs, tenant="other")
        with pytest.raises(Refused, match=r"one tenant may have \(KELVIN_HOST_QUOTA\): needs 2, has 1"):
            agent.acquire(huge)
        for version, tenant in ((theirs, "other"), (mine, TENANT), (more, TENANT)):
            agent.prefetch(version, tenant=tenant)
            wait_until_idle(agent)
            agent.wait_for("nothing is pinned", lambda state: state.host.slabs_busy == 0)
        state = agent.state()
        assert (state.host.slabs_quota, state.host.slabs_by_tenant) == (1, {TENANT: 1, "other": 1})
        with agent.acquire(theirs, tenant="other") as lease:
            assert lease.chunks_by_tier["host"] == len(theirs.digests)


def full(seed: int) -> Version:
    """Return a version of one slab."""
    return make_version(seed=seed, pages=(HUGE // PAGE_BYTES,), chunk_pages=64, files=())


def test_lease_takes_the_memory_of_a_prefetch(tmp_path: Path) -> None:
    """A start that needs the memory of a running prefetch gets it after the read in progress."""
    store = CountingStore(FileStore(tmp_path / "store"))
    prefetched, started = full(1), full(2)
    with run_agent(settings_of(tmp_path, slabs=1), store) as agent:
        agent.publish(prefetched)
        agent.publish(started)
        store.gate.clear()
        agent.prefetch(prefetched)
        agent.wait_for("the prefetch loads", lambda state: state.reads_running.get("store", 0) > 0)
        with ThreadPoolExecutor(1) as threads:
            leasing = threads.submit(agent.acquire, started)
            agent.wait_for("the prefetch gives way", lambda state: state.prefetches.gave_way == 1)
            store.gate.set()
            with leasing.result(TIMEOUT_S) as lease:
                assert lease.view(0, lease.total_bytes) == started.linear
                assert wait_until_idle(agent).prefetches.failed == {}


def test_failed_prefetch_is_counted_by_code(tmp_path: Path) -> None:
    """A failed prefetch is only counted, because no client waits for it."""
    with run_agent(settings_of(tmp_path)) as agent:
        agent.prefetch("0" * 64)
        agent.prefetch("0" * 64, "nvme")
        assert wait_until_idle(agent).prefetches.failed == {"manifest_missing": 2}


def test_prefetches_are_bounded(tmp_path: Path) -> None:
    """A prefetch over the bound is refused as retryable. Waiting prefetches end with the agent."""
    store = CountingStore(FileStore(tmp_path / "store"))
    with run_agent(settings_of(tmp_path), store) as agent:
        agent.publish(VERSION)
        store.gate.clear()
        agent.prefetch(VERSION)
        for number in range(1, MAX_PREFETCHES):
            agent.prefetch(f"{number:064x}")
        with pytest.raises(Refused, match="the queue of prefetches is full") as refused:
            agent.prefetch(f"{MAX_PREFETCHES:064x}")
        assert isinstance(refused.value.failure, RemoteFailure)
        assert refused.value.failure.remote_status == 503
        state = agent.state()
        assert (state.prefetches.running, state.prefetches.waiting) == (1, MAX_PREFETCHES - 1)
        store.gate.set()


@pytest.mark.parametrize(
    "body",
    [
        pytest.param({"tenant": "acme"}, id="no version"),
        pytest.param({"tenant": "acme", "version": "12"}, id="a short version"),
        pytest.param({"tenant": "../x", "version": VERSION.id}, id="a path"),
        pytest.param({"tenant": "acme", "version": VERSION.id, "tier": "device"}, id="no such tier"),
        pytest.param({"tenant": "acme", "version": VERSION.id, "soon": True}, id="an unknown field"),
    ],
)
def test_invalid_prefetch_is_refused(tmp_path: Path, body: dict[str, object]) -> None:
    with run_agent(settings_of(tmp_path)) as agent:
        with pytest.raises(Refused) as refused:
            agent.ask("POST", "/v1/prefetch", NoneType, body)
        assert isinstance(refused.value.failure, RemoteFailure)
        assert refused.value.failure.remote_status == 400


@pytest.mark.parametrize("why", ["larger than the tier", "what others keep", "the disk is full"])
def test_chunks_that_nvme_cannot_keep_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    """However often a version is prefetched, the store is not read for chunks that NVMe would refuse."""
    nvme_bytes = {"larger than the tier": len(LARGE.linear) - 1, "what others keep": 3 * len(LARGE.linear) // 2}
    settings = replace(settings_of(tmp_path, nvme_bytes=nvme_bytes.get(why, 1 << 30)), nvme_quota=50)
    with run_agent(settings) as agent:
        if why == "what others keep":
            agent.publish(LARGE, "umbrella")
            agent.prefetch(LARGE, "nvme", tenant="umbrella")
            assert wait_until_idle(agent).prefetches.done == 1
        before = agent.state().chunk_reads.get("store", 0)
        if why == "the disk is full":
            fill(monkeypatch)
        agent.publish(LARGE)
        for _ in range(3):
            agent.prefetch(LARGE, "nvme")
            state = wait_until_idle(agent)
        reads = state.chunk_reads.get("store", 0) - before
        if why == "the disk is full":
            assert reads == 3  # the first chunk of each prefetch shows it
            assert state.prefetches.failed == {"unavailable": 3}
        else:
            assert reads == 0
            assert state.prefetches.failed == {"capacity_exceeded": 3}
