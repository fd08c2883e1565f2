"""A lease ends with its connection or process. A slab is reused only when no process can have it mapped."""

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
from tests.weightcache.kit import HUGE, TIMEOUT_S, RunningAgent, make_version, run_agent, settings_of
from tests.weightcache.processes import lease_in_process
from weightcache.app import lease_server
from weightcache.app.lease_server import ACCEPT_PAUSE_S, MAX_CONNECTIONS
from weightcache.client.lease_protocol import SOCKET, LeaseReply

VERSION = make_version(seed=1, pages=(40, 20), chunk_pages=8)


def test_the_end_of_a_process_ends_its_lease(tmp_path: Path) -> None:
    """A killed process has no lease and holds no slab."""
    with run_agent(settings_of(tmp_path)) as agent:
        agent.publish(VERSION)
        with lease_in_process(agent, VERSION) as one:
            state = agent.state()
            assert (state.leases, state.holders, state.host.slabs_busy) == (1, 1, 1)
            one.kill()
            agent.wait_for("its slabs are released", lambda s: (s.leases, s.holders, s.host.slabs_busy) == (0, 0, 0))


def test_closed_connection_ends_the_lease_and_keeps_the_slab(tmp_path: Path) -> None:
    """A process that closed its connection may still have the slab mapped, so the slab stays until the process dies."""
    another = make_version(seed=2, pages=(40, 20), chunk_pages=8)
    with run_agent(settings_of(tmp_path, slabs=1)) as agent:
        agent.publish(VERSION)
        agent.publish(another, tenant="other")
        with lease_in_process(agent, VERSION) as one:
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
            agent.wait_for("its slabs are released", lambda state: state.holders == 0)
        with agent.acquire(another, tenant="other") as lease:
            assert lease.view(0, lease.total_bytes) == another.linear


def test_living_process_without_mappings_holds_no_slab(tmp_path: Path) -> None:
    """By the kernel's report it no longer maps the slab, which is then evicted and filled for another tenant.

    The test above is the control: a process whose lease has ended, and which still maps the slab, keeps it.
    """
    another = make_version(seed=2, pages=(40, 20), chunk_pages=8)
    with run_agent(settings_of(tmp_path, slabs=1)) as agent:
        agent.publish(VERSION)
        agent.publish(another, tenant="other")
        with lease_in_process(agent, VERSION) as one:
            agent.wait_for("all admitted", lambda state: state.nvme.chunks == len(VERSION.digests))
            assert one.ask("close") == "closed"
            state = agent.wait_for("its slabs are released", lambda state: state.holders == 0)
            assert (state.leases, state.host.slabs_busy, state.host.slabs_used) == (0, 0, 1)
            agent.evict("host")
            with agent.acquire(another, tenant="other") as lease:
                assert lease.view(0, lease.total_bytes) == another.linear
            assert one.process.poll() is None


def test_second_lease_holds_slabs_again(tmp_path: Path) -> None:
    """A process that leases again, as a runtime that wakes, gets the same bytes and holds the slab until it dies."""
    with run_agent(settings_of(tmp_path, slabs=1)) as agent:
        agent.publish(VERSION)
        with lease_in_process(agent, VERSION) as one:
            seen = one.ask("digest")
            for _ in range(3):
                assert one.ask("close") == "closed"
                agent.wait_for("its slabs are released", lambda state: state.holders == 0)
                assert one.ask("again") == "leased"
                assert one.ask("digest") == seen
                state = agent.state()
                assert (state.leases, state.holders, state.host.slabs_busy) == (1, 1, 1)
                with pytest.raises(Refused, match="in use by living processes"):
                    agent.evict("host")
            one.kill()
            agent.wait_for("its slabs are released", lambda state: (state.leases, state.holders) == (0, 0))


def test_a_recycled_slab_holds_nothing_of_its_last_tenant(tmp_path: Path) -> None:
    """The next tenant of a slab can map all of it, and finds only its own chunks and zero bytes."""
    big = make_version(seed=2, pages=(HUGE // PAGE_BYTES,), chunk_pages=64, files=())
    small = make_version(seed=3, pages=(1,), files=())
    with run_agent(settings_of(tmp_path, slabs=1)) as agent:
        agent.publish(big)
        agent.publish(small, tenant="other")
        with lease_in_process(agent, big):
            agent.wait_for("all admitted", lambda state: state.nvme.chunks == len(big.digests))
        agent.wait_for("its slabs are released", lambda state: state.holders == 0)
        sock = agent.directory.connect(SOCKET, socket.SOCK_SEQPACKET)
        sock.send(f'{{"tenant":"other","version":"{small.id}"}}'.encode())
        _, descriptors, _, _ = socket.recv_fds(sock, 1 << 16, 8)
        assert os.pread(descriptors[1], HUGE, 0) == small.linear + bytes(HUGE - len(small.linear))
        for fd in descriptors:
            os.close(fd)
        sock.close()


def test_a_runtime_survives_the_agent(tmp_path: Path) -> None:
    """Mapped bytes stay mapped when the agent ends. The next agent starts with empty memory and serves from NVMe."""
    with run_agent(settings_of(tmp_path)) as agent:
        agent.publish(VERSION)
        lease = agent.acquire(VERSION)
        agent.wait_for("all admitted", lambda state: state.nvme.chunks == len(VERSION.digests))
    assert lease.view(0, lease.total_bytes) == VERSION.linear
    with run_agent(settings_of(tmp_path)) as agent:
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
            f'{{"tenant":"acme","version":"{VERSION.id}","x":1}}'.encode(), "invalid_request", id="an unknown field"
        ),
        pytest.param(
            f'{{"tenant":"acme","version":"{VERSION.id}"}}'.encode(), "manifest_missing", id="an unknown version"
        ),
        pytest.param(
            f'{{"tenant":"nobody","version":"{VERSION.id}"}}'.encode(), "manifest_missing", id="an unknown tenant"
        ),
    ],
)
def test_invalid_lease_request_is_refused_with_its_code(tmp_path: Path, raw: bytes, code: str) -> None:
    """A bad request is refused with its code, and the agent keeps serving."""
    with run_agent(settings_of(tmp_path)) as agent:
        reply = ask(agent, raw)
        assert not reply.ok
        assert reply.failure is not None
        assert reply.failure.code == code
        agent.publish(VERSION)
        agent.acquire(VERSION).close()


def test_version_is_missing_for_another_tenant(tmp_path: Path) -> None:
    """A version in memory is missing for every other tenant."""
    with run_agent(settings_of(tmp_path)) as agent:
        agent.publish(VERSION)
        with agent.acquire(VERSION), pytest.raises(Refused, match="is missing in the store"):
            agent.acquire(VERSION, tenant="other")


def test_client_that_sends_more_loses_its_lease(tmp_path: Path) -> None:
    """A client that sends anything after its request loses its lease."""
    with run_agent(settings_of(tmp_path)) as agent:
        agent.publish(VERSION)
        lease = agent.acquire(VERSION)
        agent.wait_for("leased", lambda state: state.leases == 1)
        lease._sock.send(b"more")
        agent.wait_for("ended", lambda state: state.leases == 0)
        lease.close()


def test_connections_are_bounded(tmp_path: Path) -> None:
    """Connections over the limit are closed at once. When other connections end, new ones are accepted."""
    with run_agent(settings_of(tmp_path)) as agent:
        agent.publish(VERSION)
        idle = [agent.directory.connect(SOCKET, socket.SOCK_SEQPACKET) for _ in range(MAX_CONNECTIONS)]
        with pytest.raises(Refused, match="is not available"):
            agent.acquire(VERSION)
        for sock in idle:
            sock.close()
        agent.wait_for("the connections are closed", lambda state: state.connections == 0)
        agent.acquire(VERSION).close()


def test_clients_wait_for_free_descriptors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A client that connects while the agent is out of file descriptors is served once there are some.

    Until then the agent retries with pauses, and logs only every power of two of its failures.
    """
    accept, enough = socket.socket.accept, threading.Event()
    attempts: list[float] = []

    def exhausted(sock: socket.socket) -> object:
        if sock.type != socket.SOCK_SEQPACKET or enough.is_set():
            return accept(sock)
        attempts.append(time.monotonic())
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(socket.socket, "accept", exhausted)
    with run_agent(settings_of(tmp_path)) as agent, ThreadPoolExecutor(1) as threads:
        agent.publish(VERSION)
        leasing = threads.submit(agent.acquire, VERSION)
        agent.wait_for("it tried again", lambda _: len(attempts) > 4)
        enough.set()
        leasing.result(TIMEOUT_S).close()
    assert all(later - earlier > ACCEPT_PAUSE_S / 2 for earlier, later in pairwise(attempts))
    logged = [getattr(each, "failures", 0) for each in caplog.records if each.message == "accept failed"]
    assert logged == [1 << power for power in range(len(attempts).bit_length())]


def test_each_process_holds_its_own_lease(tmp_path: Path) -> None:
    """Two processes hold their leases separately: killing one releases only its own."""
    with run_agent(settings_of(tmp_path)) as agent:
        agent.publish(VERSION)
        with lease_in_process(agent, VERSION) as one, lease_in_process(agent, VERSION) as two:
            assert agent.state().holders == 2
            one.kill()
            state = agent.wait_for("one is forgotten", lambda state: state.holders == 1)
            assert state.host.slabs_busy == 1
            assert len(two.ask("digest")) == 64


# Connects as another user, from inside the directory, because only the owner may traverse its path. Prints the answer.
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


def lease_as(agent: RunningAgent, uid: int | None) -> tuple[int, LeaseReply]:
    """Lease as a user (None: our own). Return the number of descriptors received, and the answer."""
    request = f'{{"tenant":"acme","version":"{VERSION.id}"}}'
    command = [sys.executable, "-c", STRANGER, str(agent.settings.run), request, "" if uid is None else str(uid)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    count, _, answer = done.stdout.partition(" ")
    return int(count), decode(answer.encode(), LeaseReply)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel reports the peer's user. Another user gets no descriptor and is counted; our own user is served.

    Negative control: without the check, another user that reaches the socket gets the weights.
    """
    with run_agent(settings_of(tmp_path)) as agent:
        agent.publish(VERSION)
        agent.settings.run.chmod(0o711)  # as if an operator had loosened the permissions
        (agent.settings.run / SOCKET).chmod(0o777)
        count, reply = lease_as(agent, NOBODY)
        assert count == 0
        assert reply.failure is not None
        assert reply.failure.message == "uid=65534: must be root's, or that of the weight cache's own user"
        state = agent.state()
        assert (state.strangers, state.leases_refused, state.leases_granted) == (1, {"invalid_request": 1}, 0)
        count, reply = lease_as(agent, None)
        assert (count, reply.ok) == (2, True)
        monkeypatch.setattr(lease_server, "may_lease", lambda uid: True)
        count, reply = lease_as(agent, NOBODY)
        assert (count, reply.ok) == (2, True)


@pytest.mark.parametrize(
    ("uid", "want"),
    [
        pytest.param(0, True, id="root"),
        pytest.param(os.geteuid(), True, id="our own"),
        pytest.param(os.geteuid() + 1, False, id="another"),
        pytest.param(-1, False, id="a user unknown to the kernel"),
    ],
)
def test_only_root_and_the_own_user_may_lease(uid: int, want: bool) -> None:
    assert lease_server.may_lease(uid) == want
