"""The HTTP API reports what the cache holds, evicts it, and refuses bad or impossible requests."""

from pathlib import Path
from types import NoneType

import pytest

from controlplane.dependencies import EVICTION
from kelvin.contracts.errors import Refused, RemoteFailure
from kelvin.contracts.serving.start_forecast import TierPlacement
from tests.weightcache.disks import forget, needs_a_disk
from tests.weightcache.kit import HUGE, RunningAgent, make_version, run_agent, settings_of
from weightcache.app.cache import EVICT_WAIT_S

VERSION = make_version(seed=1)
OTHER = make_version(seed=2)
COUNT = len(VERSION.digests)


def test_running_agent_is_healthy_and_ready(tmp_path: Path) -> None:
    with run_agent(settings_of(tmp_path)) as agent:
        agent.ask("GET", "/healthz", NoneType)
        agent.ask("GET", "/readyz", NoneType)


def test_state_counts_reads_chunks_and_leases(tmp_path: Path) -> None:
    """The state counts reads by tier, chunks and bytes held, and leases and holders."""
    with run_agent(settings_of(tmp_path, slabs=3)) as agent:
        agent.publish(VERSION)
        with agent.acquire(VERSION):
            state = agent.wait_for("all admitted", lambda state: state.nvme.chunks == COUNT)
            assert (state.host.chunks, state.host.bytes) == (COUNT, len(VERSION.linear))
            assert state.host.budget_bytes == 3 * HUGE
            assert state.nvme.bytes == len(VERSION.linear)
            assert (state.leases, state.holders, state.leases_granted) == (1, 1, 1)
            assert (state.chunk_reads, state.bytes_read) == ({"store": COUNT}, {"store": len(VERSION.linear)})
            assert state.admitted_chunks == COUNT


def whereabouts(agent: RunningAgent, tenant: str, version: str) -> TierPlacement:
    return agent.ask("GET", f"/v1/whereabouts?tenant={tenant}&version={version}", TierPlacement)


def test_chunks_are_listed_by_tier(tmp_path: Path) -> None:
    """Each byte counts in the tier from which a lease would read it, and the report itself reads nothing."""
    total = len(VERSION.linear)
    with run_agent(settings_of(tmp_path)) as agent:
        agent.publish(VERSION)
        assert whereabouts(agent, "acme", VERSION.id).bytes_by_tier == {"host": 0, "nvme": 0, "peer": 0, "store": total}
        assert agent.state().chunk_reads == {}
        agent.keep(VERSION)
        found = whereabouts(agent, "acme", VERSION.id)
        assert (found.bytes_by_tier, found.bytes_s) == ({"host": total, "nvme": 0, "peer": 0, "store": 0}, 0.0)
        assert found.rates["store"].loads == 1
        assert found.rates["nvme"].loads == 0
    with run_agent(settings_of(tmp_path)) as agent:
        found = whereabouts(agent, "acme", VERSION.id)
        assert found.chunks_by_tier == {"host": 0, "nvme": COUNT, "peer": 0, "store": 0}
        assert found.bytes_s > 0


@pytest.mark.parametrize(
    ("tenant", "version", "status"),
    [
        pytest.param("nobody", VERSION.id, 500, id="another tenant's"),
        pytest.param("acme", "0" * 64, 500, id="an unknown version"),
        pytest.param("acme", "..%2Fx", 400, id="not a version"),
        pytest.param("..%2Fx", VERSION.id, 400, id="no tenant's name"),
    ],
)
def test_listing_an_unknown_version_is_refused(tmp_path: Path, tenant: str, version: str, status: int) -> None:
    with run_agent(settings_of(tmp_path)) as agent:
        agent.publish(VERSION)
        with pytest.raises(Refused) as refused:
            whereabouts(agent, tenant, version)
        assert isinstance(refused.value.failure, RemoteFailure)
        assert refused.value.failure.remote_status == status


def test_state_tells_how_nvme_was_read(tmp_path: Path) -> None:
    """The state counts bytes read from NVMe as direct or, if they were in the page cache, as cached."""
    needs_a_disk(tmp_path)
    total = len(VERSION.linear)
    with run_agent(settings_of(tmp_path)) as agent:
        assert agent.keep(VERSION).nvme.bytes_by_way == {}
    for chunk in VERSION.digests:
        forget(agent.chunk_file(chunk))
    with run_agent(settings_of(tmp_path)) as agent, agent.acquire(VERSION):
        assert agent.state().nvme.bytes_by_way == {"direct": total}
    for chunk in VERSION.digests:
        agent.chunk_file(chunk).read_bytes()
    with run_agent(settings_of(tmp_path)) as agent, agent.acquire(VERSION) as lease:
        assert agent.state().nvme.bytes_by_way == {"cached": total}
        assert lease.view(0, lease.total_bytes) == VERSION.linear


def test_evict_nvme(tmp_path: Path) -> None:
    """Eviction from NVMe works for leased versions, too, and the next agent reads the version from the store."""
    with run_agent(settings_of(tmp_path)) as agent:
        agent.publish(VERSION)
        agent.publish(OTHER)
        agent.acquire(VERSION).close()
        with agent.acquire(OTHER):
            agent.evict("nvme", "acme", OTHER.id)
            assert agent.state().nvme.chunks == COUNT
    with run_agent(settings_of(tmp_path)) as agent, agent.acquire(VERSION) as one, agent.acquire(OTHER) as two:
        assert one.chunks_by_tier["nvme"] == COUNT
        assert two.chunks_by_tier["store"] == len(OTHER.digests)


def test_eviction_ends_before_its_caller_gives_up() -> None:
    """The control plane's timeout is longer than the longest eviction, so it always gets the answer."""
    assert EVICTION.timeout_s > EVICT_WAIT_S


def test_evict_host_in_use(tmp_path: Path) -> None:
    """Chunks that a live process holds stay, and the answer is 409. Evicting another tenant's chunks succeeds."""
    with run_agent(settings_of(tmp_path)) as agent:
        agent.publish(VERSION)
        with agent.acquire(VERSION) as lease:
            for tenant, version in ((None, None), ("acme", None), ("acme", VERSION.id)):
                with pytest.raises(Refused) as refused:
                    agent.evict("host", tenant, version)
                assert isinstance(refused.value.failure, RemoteFailure)
                assert refused.value.failure.remote_status == 409
            agent.evict("host", "nobody")
            assert lease.view(0, lease.total_bytes) == VERSION.linear


@pytest.mark.parametrize(
    ("body", "status"),
    [
        pytest.param({"tier": "device"}, 400, id="no such tier"),
        pytest.param({}, 400, id="no tier"),
        pytest.param({"tier": "host", "tenant": "../x"}, 400, id="no tenant's name"),
        pytest.param({"tier": "host", "version": "0" * 64}, 400, id="a version without its tenant"),
        pytest.param({"tier": "host", "tenant": "acme", "version": "0" * 64}, 500, id="an unknown version"),
        pytest.param({"tier": "host", "tenant": "acme", "version": "latest"}, 400, id="not a version"),
    ],
)
def test_invalid_eviction_is_refused(tmp_path: Path, body: dict[str, str], status: int) -> None:
    with run_agent(settings_of(tmp_path)) as agent:
        with pytest.raises(Refused) as refused:
            agent.ask("POST", "/v1/evict", NoneType, body)
        assert isinstance(refused.value.failure, RemoteFailure)
        assert refused.value.failure.remote_status == status
