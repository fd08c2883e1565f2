"""A lease is lent while its version is being filled: what was verified may be read, and nothing else; whoever goes away
in the middle, and whatever can't be had, leaves nothing behind.
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
from tests.weightcache.kit import TIMEOUT_S, HeldStore, RunningAgent, make_version, running, settings_of
from weightcache.client.device_copy import Lane, copy_to_device
from weightcache.client.lease import Lease
from weightcache.client.spans_policy import Spans, spans_of
from weightcache.nvme.scrubber import ScrubReport
from weightcache.sources.source import is_digest_of

VERSION = make_version(seed=1, pages=(700, 7, 90), chunk_pages=64)
TOTAL = VERSION.manifest.total_bytes
PLACES = spans_of((chunk.digest, chunk.length) for chunk in VERSION.manifest.chunks)
LATE = VERSION.digests[-1]
HALF = PLACES[VERSION.digests[9]][0][0]  # a little over two blocks of three


class Checks:
    """The agent's verification, held at one chunk, and wrong about some: `lies` are taken one at each look."""

    def __init__(self, late: str, lies: dict[str, list[bool]] | None = None) -> None:
        self.late = late
        self.lies = lies or {}
        self.release = threading.Event()

    def __call__(self, data: memoryview, digest: str) -> bool:
        if digest == self.late:
            assert self.release.wait(TIMEOUT_S)
        said = self.lies.get(digest)
        return said.pop(0) if said else is_digest_of(data, digest)


@contextmanager
def checking(tmp_path: Path, checks: Checks) -> Iterator[RunningAgent]:
    """An agent whose store has the version; the last chunk's check is held until the block ends, at the latest."""
    with running(settings_of(tmp_path), verify=checks) as agent:
        agent.publish(VERSION)
        try:
            yield agent
        finally:
            checks.release.set()


def all_but(late: str, lease: Lease) -> Spans:
    """Take in what is told until nothing but this chunk is missing."""
    told = Spans(TOTAL)
    for span in lease.ready_parts():
        told.add(*span)
        assert lease.view(span[0], span[1] - span[0]) == VERSION.linear[slice(*span)]
        if told.gaps() == PLACES[late]:
            break
    return told


def test_what_is_verified_may_be_read_while_the_rest_is_not(tmp_path: Path) -> None:
    """A chunk whose bytes are there and whose digest is being looked at is told only when it was right."""
    checks = Checks(LATE)
    with checking(tmp_path, checks) as agent, agent.acquire(VERSION, progressive=True) as lease:
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


def test_what_is_there_is_whole_at_once(tmp_path: Path) -> None:
    """A progressive lease of a version in memory is one like any other."""
    with running(settings_of(tmp_path)) as agent:
        agent.publish(VERSION)
        agent.acquire(VERSION).close()
        with agent.acquire(VERSION, progressive=True) as lease:
            lease.wait_until_whole()
            assert lease.is_whole
            assert list(lease.ready_parts()) == [(0, TOTAL)]
            assert lease.view(0, TOTAL) == VERSION.linear


def test_what_can_not_be_healed(tmp_path: Path) -> None:
    """Whoever has the lease already is refused as whoever waits for it; the lease is over then."""
    checks = Checks(LATE, {LATE: [False, False]})  # of the store's copy: it is read twice
    with checking(tmp_path, checks) as agent, agent.acquire(VERSION, progressive=True) as lease:
        all_but(LATE, lease)
        with ThreadPoolExecutor(1) as threads:
            plain = threads.submit(agent.acquire, VERSION)
            agent.wait_for("both are there", lambda state: state.connections == 2)
            checks.release.set()
            with pytest.raises(Refused) as refused:
                lease.wait_until_whole()
            with pytest.raises(Refused) as waited:
                plain.result(TIMEOUT_S)
        assert refused.value.failure.code == "chunk_corrupt"
        assert refused.value.failure == waited.value.failure
        state = agent.wait_for("it is over", lambda state: state.leases == 0 and state.host.loading == 0)
        assert state.leases_refused == {"chunk_corrupt": 2}
        lease.close()
        checks.lies.clear()
        with agent.acquire(VERSION) as again:
            assert again.view(0, TOTAL) == VERSION.linear


def test_what_is_healed_is_told_late_and_right(tmp_path: Path) -> None:
    """A copy that is wrong once is taken again, while all others are lent."""
    checks = Checks(LATE, {LATE: [False]})
    with checking(tmp_path, checks) as agent, agent.acquire(VERSION, progressive=True) as lease:
        all_but(LATE, lease)
        checks.release.set()
        assert lease.view(0, TOTAL) == VERSION.linear
        assert agent.state().chunk_faults == {"store": {"digest": 1}}


def test_what_was_told_and_is_found_wrong_is_brought_elsewhere(tmp_path: Path) -> None:
    """The lease moves to where all of it is right: views and tensors stay where they are."""
    first = VERSION.digests[1]
    checks = Checks(LATE, {first: [True, False]})
    with checking(tmp_path, checks) as agent, agent.acquire(VERSION, progressive=True) as lease:
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
    """A client that has not read yet what it was told before gets the new place behind that."""
    accept = socket.socket.accept

    def accept_narrow(sock: socket.socket) -> tuple[socket.socket, object]:
        accepted, address = accept(sock)
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # a few messages, as the kernel has it
        return accepted, address

    monkeypatch.setattr(socket.socket, "accept", accept_narrow)
    first = VERSION.digests[1]
    checks = Checks(LATE, {first: [True, False]})
    with checking(tmp_path, checks) as agent, agent.acquire(VERSION, progressive=True) as lease:
        agent.wait_for("all but one are there", lambda state: state.host.loading == 1)
        assert [fault.chunk for fault in agent.ask("POST", "/v1/check", ScrubReport).faults] == [first]
        checks.release.set()
        agent.wait_for("all of it is elsewhere", lambda state: state.host.versions == 1)
        lease.wait_until_whole()
        assert lease.view(0, TOTAL) == VERSION.linear


def _place(digest: str) -> tuple[int, int]:
    begin, end = PLACES[digest][0]
    return begin, end - begin


def test_whoever_hangs_up_in_the_middle(tmp_path: Path) -> None:
    """What is still queued is given up, and the lease is over; another one begins anew."""
    store = HeldStore(FileStore(tmp_path / "store"), HALF)
    with running(settings_of(tmp_path), store) as agent:
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


def test_whoever_hangs_up_does_not_take_others_along(tmp_path: Path) -> None:
    """One read of each chunk, for those who come later too: they are told first what is ready by then."""
    store = HeldStore(FileStore(tmp_path / "store"), HALF)
    with running(settings_of(tmp_path), store) as agent, ThreadPoolExecutor(1) as threads:
        agent.publish(VERSION)
        first = agent.acquire(VERSION, progressive=True)
        first.view(0, HALF)
        second = agent.acquire(VERSION, progressive=True)
        plain = threads.submit(agent.acquire, VERSION)
        agent.wait_for("all are there", lambda state: state.connections == 3)
        first.close()
        assert second.view(0, HALF) == VERSION.linear[:HALF]
        store.gate.set()
        for lease in (second, plain.result(TIMEOUT_S)):
            assert lease.view(0, TOTAL) == VERSION.linear
            lease.close()
        assert agent.state().chunk_reads == {"store": len(VERSION.digests)}


def _until_whole(agent: RunningAgent, timeout_s: float) -> None:
    with agent.acquire(VERSION, timeout_s=timeout_s, progressive=True) as lease:
        lease.wait_until_whole()


def test_deadline(tmp_path: Path) -> None:
    """It counts from the request, and holds for what is told later."""
    store = HeldStore(FileStore(tmp_path / "store"), HALF)
    with running(settings_of(tmp_path), store) as agent:
        agent.publish(VERSION)
        with pytest.raises(Refused) as refused:
            _until_whole(agent, 0.3)
        assert refused.value.failure == DeadlineExceeded(0.3, "restoring weights")
        store.gate.set()


def test_an_agent_that_ends_in_the_middle(tmp_path: Path) -> None:
    """The version is not to be had from it."""
    store = HeldStore(FileStore(tmp_path / "store"), HALF)
    with ThreadPoolExecutor(1) as threads:
        with running(settings_of(tmp_path), store) as agent:
            agent.publish(VERSION)
            lease = agent.acquire(VERSION, progressive=True)
            lease.view(0, HALF)
            waiting = threads.submit(lease.wait_until_whole)
            waiting.add_done_callback(lambda _: store.gate.set())
        with lease, pytest.raises(Refused) as refused:
            waiting.result(TIMEOUT_S)
    assert refused.value.failure == Unavailable("the weight cache")


class Watched:
    """A lane, and word of what was taken from the host."""

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
    """All that is ready is on its way to the device while the last bytes have not left the store. Negative control: of
    a lease that is lent whole, nothing is.
    """
    store = HeldStore(FileStore(tmp_path / "store"), HALF)
    with running(settings_of(tmp_path), store) as agent, ThreadPoolExecutor(2) as threads:
        agent.publish(VERSION)
        early, late = Watched(make()), Watched(make())
        both = [
            threads.submit(_copied, agent, early, progressive=True),
            threads.submit(_copied, agent, late, progressive=False),
        ]
        agent.wait_for("both are there", lambda state: state.connections == 2)
        assert early.enough.wait(TIMEOUT_S)
        assert early.staged < TOTAL
        assert late.staged == 0
        store.gate.set()
        for each in both:
            assert each.result(TIMEOUT_S) == VERSION.linear


def test_a_copy_whose_bytes_never_come(tmp_path: Path) -> None:
    """It ends as its lease does, after the last copy that had begun."""
    store = HeldStore(FileStore(tmp_path / "store"), HALF)
    with running(settings_of(tmp_path), store, verify=Checks("", {LATE: [False, False]})) as agent:
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


def test_arriving_is_for_everybody(tmp_path: Path) -> None:
    """Who asks later is given all of it again."""
    with running(settings_of(tmp_path)) as agent:
        agent.publish(VERSION)
        with agent.acquire(VERSION, progressive=True) as lease:
            for _ in range(2):
                told = Spans(TOTAL)
                for span in lease.ready_parts():
                    told.add(*span)
                assert told.is_whole
