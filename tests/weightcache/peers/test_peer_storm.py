"""A thousand clients wait at eight agents for one version of a throttled store: each range is read about once.

Each agent is a process with its own directory, as on a node. The store counts the range reads of packs.
"""

import asyncio
from pathlib import Path

import pytest

from kelvin.blobstore.file_store import FileStore
from kelvin.blobstore.memory_store import MemoryStore
from tests.eventually import wait
from tests.weightcache.kit import Version, attest, make_version, publish
from tests.weightcache.peers.throttled_s3 import run_throttled_bucket
from tests.weightcache.processes import PATIENT, WITHOUT_TURNS, Waiters, start_nodes

NODES = 8
WAITERS = 1000
BOUND = 1.1  # reads of a chunk from the store, on average over the version
VERSION = make_version(seed=17, pages=(4096,), chunk_pages=32)
SMALL = make_version(seed=18, pages=(1024,), chunk_pages=32)  # for the exact test, which needs fewer chunks
DISTINCT = len(set(VERSION.digests))
RATE = 12 << 20


def bucket_of(version: Version = VERSION) -> dict[str, bytes]:
    """Return the version's objects in the store."""

    async def main() -> dict[str, bytes]:
        store = MemoryStore()
        await publish(store, version)
        await attest(store, version.id)
        return {f"p/{key}": await store.read(key) async for key in store.list("")}

    return asyncio.run(main())


@pytest.mark.deep
def test_cluster_reads_each_range_once(tmp_path: Path) -> None:
    """All clients get the right bytes, and each range is read about once, however many nodes and clients there are.

    A node that waits too long for another one reads the store itself, as it should. Here the timeouts are long, because
    eight nodes and a thousand clients share one machine.
    """
    with (
        run_throttled_bucket(bucket_of(), RATE) as bucket,
        start_nodes(tmp_path, NODES, bucket.url, before=PATIENT) as started,
    ):
        waiters = Waiters(started, VERSION, WAITERS)
        assert waiters.right().total() == WAITERS
        assert len(bucket.reads) == DISTINCT
        assert bucket.reads.total() <= BOUND * DISTINCT, bucket.reads.total()
        states = [node.state() for node in started]
        from_peers = sum(state.chunk_reads.get("peer", 0) for state in states)
        assert from_peers + bucket.reads.total() >= NODES * DISTINCT
        assert sum(state.peers.sent_chunks for state in states) >= from_peers
        assert all(state.chunk_faults == {} for state in states)
        assert all(len(state.peers.nodes) == NODES - 1 for state in states)


@pytest.mark.long
@pytest.mark.deep
def test_each_node_reads_each_range_without_peers(tmp_path: Path) -> None:
    """Without peers each range is read once per node, although 125 clients wait at each node."""
    with (
        run_throttled_bucket(bucket_of(SMALL), 4 * RATE) as bucket,
        start_nodes(tmp_path, NODES, bucket.url, peers=False) as started,
    ):
        assert Waiters(started, SMALL, WAITERS).right().total() == WAITERS
        assert set(bucket.reads.values()) == {NODES}
        assert len(bucket.reads) == len(set(SMALL.digests))


@pytest.mark.deep
def test_control_without_owners_breaks_the_bound(tmp_path: Path) -> None:
    """Negative control: if nodes read from peers, but chunks have no owners, the bound is broken."""
    with (
        run_throttled_bucket(bucket_of(), 4 * RATE) as bucket,
        start_nodes(tmp_path, 3, bucket.url, before=WITHOUT_TURNS) as started,
    ):
        assert Waiters(started, VERSION, 100).right().total() == 100
        assert bucket.reads.total() > 1.5 * DISTINCT


@pytest.mark.deep
def test_killed_node_is_replaced(tmp_path: Path) -> None:
    """If a node is killed, all clients of the other nodes get their bytes, and at most twice the version is read."""
    with (
        run_throttled_bucket(bucket_of(), RATE / 2) as bucket,
        start_nodes(tmp_path, 5, bucket.url, before=PATIENT) as started,
    ):
        waiters = Waiters(started, VERSION, 5 * 8)
        wait(lambda: bucket.reads.total() >= DISTINCT // 3, "a third is read")
        started[3].process.kill()
        right = waiters.right()
        assert [right[at] for at in (0, 1, 2, 4)] == [8] * 4
        assert bucket.reads.total() <= 2 * DISTINCT, bucket.reads.total()


@pytest.mark.deep
def test_agents_find_peers_from_the_environment(tmp_path: Path) -> None:
    """Two agents that are configured by the environment: the second reads from the first."""
    store = tmp_path / "store"
    with start_nodes(tmp_path, 2, store.as_uri()) as (one, two):
        asyncio.run(publish(FileStore(store), VERSION))
        assert Waiters([one], VERSION, 1).right().total() == 1
        waiters = Waiters([two], VERSION, 1)
        assert waiters.right().total() == 1
        # After a slow beginning it may read some from the store, which is quick here.
        assert waiters.by_tier["peer"] > len(VERSION.linear) // 2
        state = two.state()
        assert state.chunk_reads["peer"] > DISTINCT // 2
        assert [node.bytes_per_s is not None for node in state.peers.nodes] == [True]
