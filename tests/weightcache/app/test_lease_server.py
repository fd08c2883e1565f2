"""A lease ends with its connection and with its process; a slab is reused only when each receiver is dead."""

import errno
import os
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest

from kelvin.contracts.artifacts.manifest import PAGE_BYTES
from kelvin.contracts.errors import Refused
from kelvin.contracts.wire import decode
from tests.weightcache.kit import HUGE, TIMEOUT_S, RunningAgent, make_version, running, settings_of
from tests.weightcache.processes import leasing
from weightcache.app import lease_server
from weightcache.app.lease_server import MAX_CONNECTIONS, PAUSE_S
from weightcache.client.lease_protocol import SOCKET, LeaseReply

VERSION = make_version(seed=1, pages=(40, 20), chunk_pages=8)


def test_the_end_of_a_process_ends_its_lease(tmp_path: Path) -> None:
    """A killed process has no lease any more and holds no slab."""
    with running(settings_of(tmp_path)) as agent:
        agent.publish(VERSION)
        with leasing(agent, VERSION) as one:
            state = agent.state()
            assert (state.leases, state.holders, state.host.slabs_busy) == (1, 1, 1)
            one.kill()
            agent.wait_for("it is forgotten", lambda s: (s.leases, s.holders, s.host.slabs_busy) == (0, 0, 0))


def test_the_end_of_a_connection_ends_the_lease_and_keeps_the_slab(tmp_path: Path) -> None:
    """A process that hung up may still have the slab mapped: it is neither evicted nor filled anew until it dies."""
    another = make_version(seed=2, pages=(40, 20), chunk_pages=8)
    with running(settings_of(tmp_path, slabs=1)) as agent:
        agent.publish(VERSION)
        agent.publish(another, tenant="other")
        with leasing(agent, VERSION) as one:
            agent.wait_for("all admitted", lambda state: state.nvme.chunks == len(VERSION.digests))
            seen = one.ask("digest")
            assert one.ask("hang up") == "hung up"
            state = agent.wait_for("the lease ended", lambda state: state.leases == 0)
            assert (state.holders, state.host.slabs_busy) == (1, 1)
            with pytest.raises(Refused, match="in use by living processes"):
                agent.evict("host")
            with pytest.raises(Refused, match="is full"):
                agent.acquire(another, tenant="other")
            assert one.ask("digest") == seen
            one.kill()
            agent.wait_for("it is forgotten", lambda state: state.holders == 0)
        with agent.acquire(another, tenant="other") as lease:
            assert lease.view(0, lease.total_bytes) == another.linear


def test_living_process_without_mappings_holds_no_slab(tmp_path: Path) -> None:
    """By the kernel's word: they may be evicted, and filled for another tenant; its next lease is of other memory.

    The test above is its control: a process that says that its lease is over, and has the slab mapped, keeps it.
    """
    another = make_version(seed=2, pages=(40, 20), chunk_pages=8)
    with running(settings_of(tmp_path, slabs=1)) as agent:
        agent.publish(VERSION)
        agent.publish(another, tenant="other")
        with leasing(agent, VERSION) as one:
            agent.wait_for("all admitted", lambda state: state.nvme.chunks == len(VERSION.digests))
            assert one.ask("close") == "closed"
            state = agent.wait_for("it is forgotten", lambda state: state.holders == 0)
            assert (state.leases, state.host.slabs_busy, state.host.slabs_used) == (0, 0, 1)
            agent.evict("host")
            with agent.acquire(another, tenant="other") as lease:
                assert lease.view(0, lease.total_bytes) == another.linear
            assert one.process.poll() is None


def test_second_lease_holds_slabs_again(tmp_path: Path) -> None:
    """As a runtime that wakes: the same bytes, the same process, held until it dies."""
    with running(settings_of(tmp_path, slabs=1)) as agent:
        agent.publish(VERSION)
        with leasing(agent, VERSION) as one:
            seen = one.ask("digest")
            for _ in range(3):
                assert one.ask("close") == "closed"
                agent.wait_for("it is forgotten", lambda state: state.holders == 0)
                assert one.ask("again") == "leased"
                assert one.ask("digest") == seen
                state = agent.state()
                assert (state.leases, state.holders, state.host.slabs_busy) == (1, 1, 1)
                with pytest.raises(Refused, match="in use by living processes"):
                    agent.evict("host")
            one.kill()
            agent.wait_for("it is forgotten", lambda state: (state.leases, state.holders) == (0, 0))


def test_a_recycled_slab_holds_nothing_of_its_last_tenant(tmp_path: Path) -> None:
    """Whoever gets the slab next can map all of it, and finds only his own chunks and zero bytes."""
    big = make_version(seed=2, pages=(HUGE // PAGE_BYTES,), chunk_pages=64, files=())
    small = make_version(seed=3, pages=(1,), files=())
    with running(settings_of(tmp_path, slabs=1)) as agent:
        agent.publish(big)
        agent.publish(small, tenant="other")
        with leasing(agent, big):
            agent.wait_for("all admitted", lambda state: state.nvme.chunks == len(big.digests))
        agent.wait_for("it is forgotten", lambda state: state.holders == 0)
        sock = agent.directory.connect(SOCKET, socket.SOCK_SEQPACKET)
        sock.send(f'{{"tenant":"other","version":"{small.id}"}}'.encode())
        _, descriptors, _, _ = socket.recv_fds(sock, 1 << 16, 8)
        assert os.pread(descriptors[1], HUGE, 0) == small.linear + bytes(HUGE - len(small.linear))
        for fd in descriptors:
            os.close(fd)
        sock.close()


def test_a_runtime_survives_the_agent(tmp_path: Path) -> None:
    """What is mapped stays mapped when the agent ends; its successor starts empty and serves from NVMe."""
    with running(settings_of(tmp_path)) as agent:
        agent.publish(VERSION)
        lease = agent.acquire(VERSION)
        agent.wait_for("all admitted", lambda state: state.nvme.chunks == len(VERSION.digests))
    assert lease.view(0, lease.total_bytes) == VERSION.linear
    with running(settings_of(tmp_path)) as agent:
        assert agent.state().host.chunks == 0
        with agent.acquire(VERSION) as again:
            assert again.chunks_by_tier == {"host": 0, "nvme": len(VERSION.digests), "peer": 0, "store": 0}
            assert again.view(0, again.total_bytes) == VERSION.linear
        assert lease.view(0, lease.total_bytes) == VERSION.linear
    lease.close()


def ask(agent: RunningAgent, raw: bytes) -> LeaseReply:
    sock = agent.directory.connect(SOCKET, socket.SOCK_SEQPACKET)
    try:
        sock.send(raw)
        return decode(sock.recv(1 << 16), LeaseReply)
    finally:
        sock.close()


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        pytest.param(b"not json", "invalid_request", id="no JSON"),
        pytest.param(b'{"tenant":"acme"}', "invalid_request", id="no version"),
        pytest.param(b'{"tenant":"acme","version":"12"}', "invalid_request", id="a short version"),
        pytest.param(f'{{"tenant":"../x","version":"{VERSION.id}"}}'.encode(), "invalid_request", id="a path"),
        pytest.param(
            f'{{"tenant":"acme","version":"{VERSION.id}","x":1}}'.encode(), "invalid_request", id="a stranger"
        ),
        pytest.param(
            f'{{"tenant":"acme","version":"{VERSION.id}"}}'.encode(), "manifest_missing", id="an unknown version"
        ),
        pytest.param(
            f'{{"tenant":"nobody","version":"{VERSION.id}"}}'.encode(), "manifest_missing", id="an unknown tenant"
        ),
    ],
)
def test_refusals(tmp_path: Path, raw: bytes, code: str) -> None:
    """A request that can't be granted is refused with its reason, and the agent goes on."""
    with running(settings_of(tmp_path)) as agent:
        reply = ask(agent, raw)
        assert not reply.ok
        assert reply.failure is not None
        assert reply.failure.code == code
        agent.publish(VERSION)
        agent.acquire(VERSION).close()


def test_another_tenants_version(tmp_path: Path) -> None:
    """A version is its tenant's alone: another gets the answer for a lost version, though it is in memory."""
    with running(settings_of(tmp_path)) as agent:
        agent.publish(VERSION)
        with agent.acquire(VERSION), pytest.raises(Refused, match="is missing in the store"):
            agent.acquire(VERSION, tenant="other")


def test_silent_and_chatty_clients(tmp_path: Path) -> None:
    """A client that sends something after its request has ended its lease."""
    with running(settings_of(tmp_path)) as agent:
        agent.publish(VERSION)
        lease = agent.acquire(VERSION)
        agent.wait_for("leased", lambda state: state.leases == 1)
        lease._sock.send(b"more")
        agent.wait_for("ended", lambda state: state.leases == 0)
        lease.close()


def test_too_many_connections(tmp_path: Path) -> None:
    """Connections are bounded; one over the limit is hung up on, and there is room again when others end."""
    with running(settings_of(tmp_path)) as agent:
        agent.publish(VERSION)
        idle = [agent.directory.connect(SOCKET, socket.SOCK_SEQPACKET) for _ in range(MAX_CONNECTIONS)]
        with pytest.raises(Refused, match="is not available"):
            agent.acquire(VERSION)
        for sock in idle:
            sock.close()
        agent.wait_for("they are gone", lambda state: state.connections == 0)
        agent.acquire(VERSION).close()


def test_want_of_descriptors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Who connects meanwhile is served once there are some; until then the agent looks now and then, and no more. It
    logs fewer and fewer of these tries.
    """
    accept, enough = socket.socket.accept, threading.Event()
    tried: list[float] = []

    def exhausted(sock: socket.socket) -> object:
        if sock.type != socket.SOCK_SEQPACKET or enough.is_set():
            return accept(sock)
        tried.append(time.monotonic())
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(socket.socket, "accept", exhausted)
    with running(settings_of(tmp_path)) as agent, ThreadPoolExecutor(1) as threads:
        agent.publish(VERSION)
        leasing = threads.submit(agent.acquire, VERSION)
        agent.wait_for("it tried again", lambda _: len(tried) > 4)
        enough.set()
        leasing.result(TIMEOUT_S).close()
    assert all(later - earlier > PAUSE_S / 2 for earlier, later in pairwise(tried))
    told = [getattr(each, "failures", 0) for each in caplog.records if each.message == "accept failed"]
    assert told == [1 << power for power in range(len(tried).bit_length())]


def test_a_forked_child_holds_on_its_own(tmp_path: Path) -> None:
    """The process that connected is the one that counts: a child that leases after its fork holds its own lease."""
    with running(settings_of(tmp_path)) as agent:
        agent.publish(VERSION)
        with leasing(agent, VERSION) as one, leasing(agent, VERSION) as two:
            assert agent.state().holders == 2
            one.kill()
            state = agent.wait_for("one is forgotten", lambda state: state.holders == 1)
            assert state.host.slabs_busy == 1
            assert len(two.ask("digest")) == 64


# Connects as another user, from inside the directory: the way to it is its owner's alone. Prints what it is answered.
STRANGER = """
import os, socket, sys

os.chdir(sys.argv[1])
if sys.argv[3]:
    os.setgroups([])
    os.setgid(int(sys.argv[3]))
    os.setuid(int(sys.argv[3]))
sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
sock.connect("lease.sock")
sock.send(sys.argv[2].encode())
message, descriptors, _, _ = socket.recv_fds(sock, 1 << 16, 8)
print(len(descriptors), message.decode())
"""
NOBODY = 65534


def asked_as(agent: RunningAgent, uid: int | None) -> tuple[int, LeaseReply]:
    """How many descriptors a process of that user (None: our own) is sent, and the answer."""
    wish = f'{{"tenant":"acme","version":"{VERSION.id}"}}'
    command = [sys.executable, "-c", STRANGER, str(agent.settings.run), wish, "" if uid is None else str(uid)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    count, _, answer = done.stdout.partition(" ")
    return int(count), decode(answer.encode(), LeaseReply)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the kernel's word on who connected, with the rule, counted, and without a descriptor; our own user is served.
    Negative control: without the check, a stranger who reaches the socket is sent the weights.
    """
    with running(settings_of(tmp_path)) as agent:
        agent.publish(VERSION)
        agent.settings.run.chmod(0o711)  # as where an operator has loosened it
        (agent.settings.run / SOCKET).chmod(0o777)
        count, reply = asked_as(agent, NOBODY)
        assert count == 0
        assert reply.failure is not None
        assert reply.failure.message == "uid=65534: must be root's, or that of the weight cache's own user"
        state = agent.state()
        assert (state.strangers, state.leases_refused, state.leases_granted) == (1, {"invalid_request": 1}, 0)
        count, reply = asked_as(agent, None)
        assert (count, reply.ok) == (2, True)
        monkeypatch.setattr(lease_server, "may_lease", lambda uid: True)
        count, reply = asked_as(agent, NOBODY)
        assert (count, reply.ok) == (2, True)


@pytest.mark.parametrize(
    ("uid", "want"),
    [
        pytest.param(0, True, id="root"),
        pytest.param(os.geteuid(), True, id="our own"),
        pytest.param(os.geteuid() + 1, False, id="another"),
        pytest.param(-1, False, id="one whom the kernel can't name"),
    ],
)
def test_who_may_lease(uid: int, want: bool) -> None:
    assert lease_server.may_lease(uid) == want
