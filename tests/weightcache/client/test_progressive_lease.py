"""A progressive lease is granted while its version loads: only verified parts can be read.

A client that disconnects in the middle, and a chunk that can't be loaded, leave nothing behind.
"""

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from kelvin.blobstore.file_store import FileStore
from kelvin.contracts.errors import Refused, Unavailable
from kelvin.contracts.traffic_errors import DeadlineExceeded
from tests.weightcache.client.lanes import LANES, LateLane
from tests.weightcache.kit import TIMEOUT_S, HeldStore, RunningAgent, make_version, run_agent, settings_of
from weightcache.client.device_copy import Lane, copy_to_device
from weightcache.client.lease import Lease
from weightcache.client.spans_policy import Spans, spans_of
from weightcache.nvme.scrubber import ScrubReport
from weightcache.sources.source import is_digest_of

VERSION = make_version(seed=1, pages=(700, 7, 90), chunk_pages=64)
TOTAL = VERSION.manifest.total_bytes
PLACES = spans_of((chunk.digest, chunk.length) for chunk in VERSION.manifest.chunks)
LATE = VERSION.digests[-1]
HALF = PLACES[VERSION.digests[9]][0][0]  # a little more than two of three blocks


class Checks:
    """A verifier that waits at the chunk `late`, and gives the answers in `lies` first."""

    def __init__(self, late: str, lies: dict[str, list[bool]] | None = None) -> None:
        self.late = late
        self.lies = lies or {}
        self.release = threading.Event()

    def __call__(self, data: memoryview, digest: str) -> bool:
        if digest == self.late:
            assert self.release.wait(TIMEOUT_S)
        answers = self.lies.get(digest)
        return answers.pop(0) if answers else is_digest_of(data, digest)


@contextmanager
def run_agent_with_checks(tmp_path: Path, checks: Checks) -> Iterator[RunningAgent]:
    """Run an agent with the version in its store. The check of the chunk `late` waits until `release` is set."""
    with run_agent(settings_of(tmp_path), verify=checks) as agent:
        agent.publish(VERSION)
        try:
            yield agent
        finally:
            checks.release.set()


def all_but(late: str, lease: Lease) -> Spans:
    """Read the ready parts until only this chunk is missing."""
    ready = Spans(TOTAL)
    for span in lease.ready_parts():
        ready.add(*span)
        assert lease.view(span[0], span[1] - span[0]) == VERSION.linear[slice(*span)]
        if ready.gaps() == PLACES[late]:
            break
    return ready


def test_verified_parts_are_readable_during_a_load(tmp_path: Path) -> None:
    """A chunk that has arrived, but is not verified yet, is not ready."""
    checks = Checks(LATE)
    with run_agent_with_checks(tmp_path, checks) as agent, agent.acquire(VERSION, progressive=True) as lease:
        assert not all_but(LATE, lease).is_whole
        before = lease.is_whole
        state = agent.state()
        assert (state.host.loading, state.leases, state.leases_granted, state.holders) == (1, 1, 0, 1)
        checks.release.set()
        assert lease.view(0, TOTAL) == VERSION.linear
        lease.wait_until_whole()
        assert (before, lease.is_whole) == (False, True)
        assert list(lease.ready_parts())[-1] == PLACES[LATE][0]
        assert lease.chunks_by_tier == {"host": 0, "nvme": 0, "peer": 0, "store": len(VERSION.digests)}
        assert sum(lease.bytes_by_tier.values()) == TOTAL
        assert agent.state().leases_granted == 1


def test_version_in_memory_is_whole_at_once(tmp_path: Path) -> None:
    """A progressive lease of a version in memory is whole from the start."""
    with run_agent(settings_of(tmp_path)) as agent:
        agent.publish(VERSION)
        agent.acquire(VERSION).close()
        with agent.acquire(VERSION, progressive=True) as lease:
            lease.wait_until_whole()
            assert lease.is_whole
            assert list(lease.ready_parts()) == [(0, TOTAL)]
            assert lease.view(0, TOTAL) == VERSION.linear


def test_unhealable_chunk_refuses_all_leases(tmp_path: Path) -> None:
    """A progressive lease and a waiting one get the same refusal, and the lease ends."""
    checks = Checks(LATE, {LATE: [False, False]})  # for both reads of the store's copy
    with run_agent_with_checks(tmp_path, checks) as agent, agent.acquire(VERSION, progressive=True) as lease:
        all_but(LATE, lease)
        with ThreadPoolExecutor(1) as threads:
            whole_lease = threads.submit(agent.acquire, VERSION)
            agent.wait_for("both are connected", lambda state: state.connections == 2)
            checks.release.set()
            with pytest.raises(Refused) as refused:
                lease.wait_until_whole()
            with pytest.raises(Refused) as waited:
                whole_lease.result(TIMEOUT_S)
        assert refused.value.failure.code == "chunk_corrupt"
        assert refused.value.failure == waited.value.failure
        state = agent.wait_for("the lease is over", lambda state: state.leases == 0 and state.host.loading == 0)
        assert state.leases_refused == {"chunk_corrupt": 2}
        lease.close()
        checks.lies.clear()
        with agent.acquire(VERSION) as again:
            assert again.view(0, TOTAL) == VERSION.linear


def test_healed_chunk_arrives_later(tmp_path: Path) -> None:
    """A copy that is wrong once is read again, while all other chunks are ready."""
    checks = Checks(LATE, {LATE: [False]})
    with run_agent_with_checks(tmp_path, checks) as agent, agent.acquire(VERSION, progressive=True) as lease:
        all_but(LATE, lease)
        checks.release.set()
        assert lease.view(0, TOTAL) == VERSION.linear
        assert agent.state().chunk_faults == {"store": {"digest": 1}}


def test_lease_moves_when_a_ready_chunk_is_found_wrong(tmp_path: Path) -> None:
    """The lease moves to a place where all chunks are right. Views and tensors keep their addresses."""
    first = VERSION.digests[1]
    checks = Checks(LATE, {first: [True, False]})
    with run_agent_with_checks(tmp_path, checks) as agent, agent.acquire(VERSION, progressive=True) as lease:
        all_but(LATE, lease)
        before, view = lease.extents, lease.view(*_place(first))
        found = agent.ask("POST", "/v1/check", ScrubReport).faults
        assert [(fault.tier, fault.chunk) for fault in found] == [("host", first)]
        checks.release.set()
        lease.wait_until_whole()
        assert lease.extents != before
        assert view == VERSION.linear[slice(*PLACES[first][0])]
        assert lease.view(0, TOTAL) == VERSION.linear
        assert agent.state().leases_granted == 1


def test_lease_that_moves_waits_for_its_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client with unread messages gets the new place after them."""
    accept = socket.socket.accept

    def accept_narrow(sock: socket.socket) -> tuple[socket.socket, object]:
        accepted, address = accept(sock)
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # a few messages, the kernel's minimum
        return accepted, address

    monkeypatch.setattr(socket.socket, "accept", accept_narrow)
    first = VERSION.digests[1]
    checks = Checks(LATE, {first: [True, False]})
    with run_agent_with_checks(tmp_path, checks) as agent, agent.acquire(VERSION, progressive=True) as lease:
        agent.wait_for("all chunks but one are loaded", lambda state: state.host.loading == 1)
        assert [fault.chunk for fault in agent.ask("POST", "/v1/check", ScrubReport).faults] == [first]
        checks.release.set()
        agent.wait_for("the version is loaded elsewhere", lambda state: state.host.versions == 1)
        lease.wait_until_whole()
        assert lease.view(0, TOTAL) == VERSION.linear


def _place(digest: str) -> tuple[int, int]:
    begin, end = PLACES[digest][0]
    return begin, end - begin


def test_client_that_hangs_up_ends_its_load(tmp_path: Path) -> None:
    """Queued reads are dropped and the lease is over. The next lease loads the version again."""
    store = HeldStore(FileStore(tmp_path / "store"), HALF)
    with run_agent(settings_of(tmp_path), store) as agent:
        agent.publish(VERSION)
        lease = agent.acquire(VERSION, progressive=True)
        assert lease.view(0, HALF) == VERSION.linear[:HALF]
        lease.close()
        agent.wait_for("the lease is over", lambda state: state.leases == 0 and state.connections == 0)
        with pytest.raises(ValueError, match="closed"):
            lease.wait_until_whole()
        store.gate.set()
        agent.wait_for("nothing is loading", lambda state: state.host.loading == 0)
        with agent.acquire(VERSION, progressive=True) as again:
            assert again.view(0, TOTAL) == VERSION.linear


def test_client_that_hangs_up_does_not_end_shared_loads(tmp_path: Path) -> None:
    """Each chunk is read once for all clients. A later client first gets the parts that are ready already."""
    store = HeldStore(FileStore(tmp_path / "store"), HALF)
    with run_agent(settings_of(tmp_path), store) as agent, ThreadPoolExecutor(1) as threads:
        agent.publish(VERSION)
        first = agent.acquire(VERSION, progressive=True)
        first.view(0, HALF)
        second = agent.acquire(VERSION, progressive=True)
        whole_lease = threads.submit(agent.acquire, VERSION)
        agent.wait_for("all are connected", lambda state: state.connections == 3)
        first.close()
        assert second.view(0, HALF) == VERSION.linear[:HALF]
        store.gate.set()
        for lease in (second, whole_lease.result(TIMEOUT_S)):
            assert lease.view(0, TOTAL) == VERSION.linear
            lease.close()
        assert agent.state().chunk_reads == {"store": len(VERSION.digests)}


def _until_whole(agent: RunningAgent, timeout_s: float) -> None:
    with agent.acquire(VERSION, timeout_s=timeout_s, progressive=True) as lease:
        lease.wait_until_whole()


def test_deadline_covers_the_whole_load(tmp_path: Path) -> None:
    """The deadline counts from the request, and also bounds the wait for later parts."""
    store = HeldStore(FileStore(tmp_path / "store"), HALF)
    with run_agent(settings_of(tmp_path), store) as agent:
        agent.publish(VERSION)
        with pytest.raises(Refused) as refused:
            _until_whole(agent, 0.3)
        assert refused.value.failure == DeadlineExceeded(0.3, "restoring weights")
        store.gate.set()


def test_agent_that_ends_during_a_load_is_unavailable(tmp_path: Path) -> None:
    store = HeldStore(FileStore(tmp_path / "store"), HALF)
    with ThreadPoolExecutor(1) as threads:
        with run_agent(settings_of(tmp_path), store) as agent:
            agent.publish(VERSION)
            lease = agent.acquire(VERSION, progressive=True)
            lease.view(0, HALF)
            waiting = threads.submit(lease.wait_until_whole)
            waiting.add_done_callback(lambda _: store.gate.set())
        with lease, pytest.raises(Refused) as refused:
            waiting.result(TIMEOUT_S)
    assert refused.value.failure == Unavailable("the weight cache")


class Watched:
    """A lane that reports how many bytes it read from the host."""

    def __init__(self, inner: Lane) -> None:
        self._inner = inner
        self.slots = inner.slots
        self.slot_bytes = inner.slot_bytes
        self.begin = inner.begin
        self.wait = inner.wait
        self.send = inner.send
        self.finish = inner.finish
        self.staged = 0
        self.enough = threading.Event()

    def stage(self, slot: int, address: int, nbytes: int) -> None:
        self._inner.stage(slot, address, nbytes)
        self.staged += nbytes
        if self.staged == HALF // self.slot_bytes * self.slot_bytes:
            self.enough.set()


@pytest.mark.parametrize("make", LANES)
def test_copies_run_beside_reads(tmp_path: Path, make: Callable[[], Lane]) -> None:
    """Ready bytes are copied to the device while the rest is still in the store. The control: a whole lease copies
    none.
    """
    store = HeldStore(FileStore(tmp_path / "store"), HALF)
    with run_agent(settings_of(tmp_path), store) as agent, ThreadPoolExecutor(2) as threads:
        agent.publish(VERSION)
        early, late = Watched(make()), Watched(make())
        copies = [
            threads.submit(_copied, agent, early, progressive=True),
            threads.submit(_copied, agent, late, progressive=False),
        ]
        agent.wait_for("both are connected", lambda state: state.connections == 2)
        assert early.enough.wait(TIMEOUT_S)
        assert early.staged < TOTAL
        assert late.staged == 0
        store.gate.set()
        for each in copies:
            assert each.result(TIMEOUT_S) == VERSION.linear


def test_copy_of_a_failed_load_ends(tmp_path: Path) -> None:
    """The copy ends with its lease's refusal, after the last copy that had begun."""
    store = HeldStore(FileStore(tmp_path / "store"), HALF)
    with run_agent(settings_of(tmp_path), store, verify=Checks("", {LATE: [False, False]})) as agent:
        agent.publish(VERSION)
        inner = LateLane()
        lane = Watched(inner)
        with ThreadPoolExecutor(1) as threads:
            copy = threads.submit(_copied, agent, lane, progressive=True)
            assert lane.enough.wait(TIMEOUT_S)
            store.gate.set()
            with pytest.raises(Refused, match=LATE):
                copy.result(TIMEOUT_S)
        assert sum(inner.sent) == lane.staged < TOTAL
        agent.wait_for("the lease is over", lambda state: state.leases == 0)


def _copied(agent: RunningAgent, lane: Watched, *, progressive: bool) -> bytes:
    with agent.acquire(VERSION, progressive=progressive) as lease:
        return bytes(copy_to_device(lease, lane, None).arena.cpu().numpy())


def test_every_reader_gets_all_parts(tmp_path: Path) -> None:
    with run_agent(settings_of(tmp_path)) as agent:
        agent.publish(VERSION)
        with agent.acquire(VERSION, progressive=True) as lease:
            for _ in range(2):
                ready = Spans(TOTAL)
                for span in lease.ready_parts():
                    ready.add(*span)
                assert ready.is_whole
