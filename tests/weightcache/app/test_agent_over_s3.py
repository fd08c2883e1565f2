"""The agent as a process over S3 behind a proxy. Its settings limit concurrent reads and hedged reads."""

import asyncio
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kelvin.blobstore.store_factory import open_checked_store
from kelvin.contracts.wire import encode
from tests.faults.fault_proxy import FaultProxy
from tests.faults.http_faults import DelayedAnswer
from tests.faults.s3_buckets import ENVIRONMENT, Buckets
from tests.weightcache.kit import TENANT, make_version, publish
from tests.weightcache.processes import start_agent
from weightcache.client.lease_protocol import SOCKET, LeaseRequest

pytestmark = pytest.mark.deep

FIRST = make_version(seed=1, pages=(40,), chunk_pages=1, files=())
SECOND = make_version(seed=2, pages=(6,), chunk_pages=1, files=())


@pytest.fixture
def proxy(buckets: Buckets) -> Iterator[FaultProxy]:
    with FaultProxy(buckets.host, buckets.port) as proxy:
        yield proxy


@pytest.fixture
def url(buckets: Buckets, proxy: FaultProxy) -> str:
    """The URL of a bucket with both versions, read through the proxy with a long read timeout."""
    bucket = buckets.make()

    async def main() -> None:
        async with open_checked_store(buckets.url(bucket, "p"), writes=True) as store:
            for version in (FIRST, SECOND):
                await publish(store, version)

    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        asyncio.run(main())
    return buckets.url(bucket, "p", port=proxy.port, read_s=60)


@pytest.mark.parametrize("reads", [1, 5])
def test_store_reads_setting_bounds_concurrent_reads(tmp_path: Path, proxy: FaultProxy, url: str, reads: int) -> None:
    """The agent has `KELVIN_STORE_READS` range reads in flight, and the others queue."""
    with start_agent(tmp_path, slabs=8, KELVIN_STORE=url, KELVIN_STORE_READS=str(reads), **ENVIRONMENT) as agent:
        agent.wait_up()
        proxy.inject(DelayedAnswer(), method="GET", holding="/packs/", times=None)
        with closing(agent.directory.connect(SOCKET, socket.SOCK_SEQPACKET)) as client:
            client.send(encode(LeaseRequest(tenant=TENANT, version=SECOND.id)))
            proxy.wait_until_seen(reads, "GET", "/packs/")
            state = agent.state()
            assert state.reads_running == {"nvme": 0, "store": reads}
            assert state.chunks_queued == {"nvme": 0, "store": len(SECOND.digests) - reads}
            assert proxy.count("GET", "/packs/") == reads
            proxy.lift()
            with agent.acquire(SECOND) as lease:
                assert lease.view(0, lease.total_bytes) == SECOND.linear


@pytest.mark.parametrize("percent", [0, 50])
def test_late_read_is_hedged_if_allowed(tmp_path: Path, proxy: FaultProxy, url: str, percent: int) -> None:
    """With `KELVIN_HEDGE_PERCENT` a hedged read replaces the late one; at 0 the lease waits for the late one."""
    with start_agent(tmp_path, slabs=8, KELVIN_STORE=url, KELVIN_HEDGE_PERCENT=str(percent), **ENVIRONMENT) as agent:
        agent.wait_up()
        agent.acquire(FIRST).close()  # measures how long reads take
        proxy.inject(DelayedAnswer(), method="GET", holding="/packs/")
        with closing(agent.directory.connect(SOCKET, socket.SOCK_SEQPACKET)) as client:
            client.send(encode(LeaseRequest(tenant=TENANT, version=SECOND.id)))
            count = len(SECOND.digests)
            if not percent:
                agent.wait_for("one is missing", lambda state: state.reads_running["store"] == 1)
                proxy.lift()
            state = agent.wait_for("all came", lambda state: state.chunk_reads.get("store", 0) == 40 + count)
            assert (state.hedges_won > 0) == (percent > 0)
            assert (state.hedges > 0) == (percent > 0)
