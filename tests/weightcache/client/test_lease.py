"""The client checks an agent's reply before it maps anything. A contradictory reply is refused and leaks nothing."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kelvin.contracts.artifacts.manifest import PAGE_BYTES
from kelvin.contracts.artifacts.runtime_control import SealAttestation
from kelvin.contracts.errors import Refused, RemoteFailure, Unavailable
from kelvin.contracts.problem import WireFailure
from kelvin.contracts.traffic_errors import DeadlineExceeded
from kelvin.contracts.wire import encode
from kelvin.ipc.socket_directory import SocketDirectory
from tests.weightcache.kit import HUGE, TENANT, attestation_of, make_version, run_agent, settings_of
from weightcache.client.lease import Lease, acquire
from weightcache.client.lease_protocol import MAX_MESSAGE_BYTES, SOCKET, Layout, LeaseReply, SlabFact
from weightcache.host.resident_version import SealedFile
from weightcache.host.slab_pool import Slab

VERSION = make_version(seed=1, pages=(4, 2), chunk_pages=2)
TOTAL = len(VERSION.linear)


@dataclass(frozen=True)
class Answer:
    """The reply of the fake agent. By default all of it is true."""

    manifest: bytes = VERSION.raw
    total_bytes: int = TOTAL
    extents: tuple[tuple[int, int, int, int], ...] = ((0, 0, 0, TOTAL),)
    attestations: tuple[SealAttestation, ...] = field(default_factory=lambda: (attestation_of(VERSION.id),))
    layout: bytes | None = None
    slab_bytes: int = HUGE
    slabs: int = 1
    descriptors: int = 2
    sealed: bool = True
    papers_sealed: bool = True
    raw: bytes | None = None
    whole: bool = True
    ready: tuple[tuple[int, int], ...] = ()
    later: tuple["Answer | LeaseReply", ...] = ()

    def send(self, sock: socket.socket) -> None:
        layout = self.layout or msgspec.json.encode(
            Layout(total_bytes=self.total_bytes, extents=self.extents, attestations=self.attestations)
        )
        reply = LeaseReply(
            ok=True,
            whole=self.whole,
            ready=self.ready,
            manifest_bytes=len(self.manifest),
            layout_bytes=len(layout),
            slabs=tuple(SlabFact(id=n, bytes=self.slab_bytes) for n in range(self.slabs)),
            chunks_by_tier={"host": 1},
            bytes_by_tier={"host": 1},
        )
        slab = Slab(HUGE)
        slab.view(0, TOTAL)[:] = VERSION.linear
        papers = SealedFile((self.manifest, layout))
        bare = [os.memfd_create("bare") for _ in range(2)]
        for fd, body in zip(bare, (self.manifest + layout, bytes(HUGE)), strict=True):
            os.pwrite(fd, body, 0)
        fds = [papers.fd if self.papers_sealed else bare[0], slab.fd if self.sealed else bare[1]]
        passed = array("i", (fds * 2)[: self.descriptors])
        raw = encode(reply) if self.raw is None else self.raw
        sock.sendmsg([raw], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, passed)] if passed else [])
        for fd in bare:
            os.close(fd)
        slab.close()
        for each in self.later:
            if isinstance(each, Answer):
                each.send(sock)
            else:
                sock.send(encode(each))


def _descriptors() -> Counter[str]:
    """Return the targets of this process's open descriptors."""
    found: Counter[str] = Counter()
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the descriptor of the listing itself
            found[os.readlink(f"/proc/self/fd/{fd}")] += 1
    return found


class FakeAgent:
    """An agent that answers one request, and keeps the connection open until it is closed."""

    def __init__(self, run: Path, answer: Callable[[socket.socket], None]) -> None:
        self.directory = SocketDirectory(run)
        self._listener = self.directory.listen(SOCKET, socket.SOCK_SEQPACKET)
        self._answer = answer
        self._answered, self._over = threading.Event(), threading.Event()
        self._others = _descriptors()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def acquire(self, timeout_s: float = 10.0, *, progressive: bool = False) -> Lease:
        return acquire(self.directory, TENANT, VERSION.id, timeout_s, progressive=progressive)

    def open_things(self) -> tuple[int, int]:
        """Return how many descriptors were opened since the fake began, without its own, and how many slabs are mapped.

        Older descriptors may be closed meanwhile.
        """
        assert self._answered.wait(10)
        mappings = Path("/proc/self/maps").read_text().count("kelvin-slab")
        return (_descriptors() - self._others).total(), mappings

    def close(self) -> None:
        self._over.set()
        self._thread.join(10)
        assert not self._thread.is_alive()
        self._listener.close()
        self.directory.close()

    def _serve(self) -> None:
        sock, _ = self._listener.accept()
        with sock:
            self._others[os.readlink(f"/proc/self/fd/{sock.fileno()}")] += 1
            if sock.recv(MAX_MESSAGE_BYTES):
                self._answer(sock)
            self._answered.set()
            assert self._over.wait(10)


@contextmanager
def run_fake_agent(run: Path, answer: Callable[[socket.socket], None]) -> Iterator[FakeAgent]:
    with closing(FakeAgent(run, answer)) as fake:
        yield fake


def test_true_reply_is_accepted(tmp_path: Path) -> None:
    """The fake agent's true reply is accepted, so the refusals below are due to the lies."""
    with run_fake_agent(tmp_path, Answer().send) as fake, fake.acquire() as lease:
        assert lease.view(0, TOTAL) == VERSION.linear
        assert lease.attestations == (attestation_of(VERSION.id),)
        assert lease.address % HUGE == 0
        descriptors, mappings = fake.open_things()
        lease.close()
        assert fake.open_things() == (descriptors - 1, mappings - 1), "the lease holds something else"
        assert mappings == 1


LIES: list[Any] = [
    pytest.param({"manifest": VERSION.raw[:-1] + b" "}, "do not match the version's digest", id="another manifest"),
    pytest.param({"manifest": b""}, "do not match the version's digest", id="no manifest"),
    pytest.param(
        {"total_bytes": TOTAL + PAGE_BYTES}, "bytes where the manifest has", id="more bytes than the manifest"
    ),
    pytest.param({"extents": ((0, 0, 0, TOTAL - PAGE_BYTES),)}, "extents of", id="extents that end early"),
    pytest.param({"extents": ()}, "extents of 0", id="no extents"),
    pytest.param({"extents": ((PAGE_BYTES, 0, 0, TOTAL),)}, "an extent at", id="a gap"),
    pytest.param({"extents": ((0, 0, 1, TOTAL),)}, "an extent at", id="an offset off the page"),
    pytest.param({"extents": ((0, 0, 0, 100),)}, "an extent at", id="a length off the page"),
    pytest.param({"extents": ((0, 0, 0, 0), (0, 0, 0, TOTAL))}, "an extent at", id="an empty extent"),
    pytest.param({"extents": ((0, 0, HUGE, TOTAL),)}, "beyond slab", id="an extent beyond its slab"),
    pytest.param({"extents": ((0, 1, 0, TOTAL),)}, "beyond slab", id="an extent in no slab"),
    pytest.param({"extents": ((0, -1, 0, TOTAL),)}, "its lease is wrong", id="a negative slab"),
    pytest.param({"layout": b"{}"}, "its lease is wrong", id="an empty layout"),
    pytest.param({"slab_bytes": HUGE // 2}, "has not", id="a slab of another size"),
    pytest.param({"sealed": False}, "slab 0 is not sealed", id="a slab that its sender can take back"),
    pytest.param({"papers_sealed": False}, "documents are not sealed", id="documents that can change"),
    pytest.param({"descriptors": 1}, "1 descriptors for 1 slabs", id="a descriptor too few"),
    pytest.param({"descriptors": 3}, "3 descriptors for 1 slabs", id="a descriptor too many"),
    pytest.param({"descriptors": 0}, "0 descriptors", id="no descriptors"),
    pytest.param({"raw": b"{"}, "its lease is wrong", id="invalid JSON"),
    pytest.param({"raw": b'{"ok":false}'}, "without a reason", id="a refusal without a reason"),
    pytest.param({"raw": b" " * (MAX_MESSAGE_BYTES + 1)}, "was cut", id="a message that is too long"),
    pytest.param({"attestations": (attestation_of("0" * 64),)}, "another version", id="another version's attestation"),
    pytest.param({"whole": False}, "it is not whole", id="parts, although the whole was asked for"),
]  # fmt: skip


@pytest.mark.parametrize(("lie", "reason"), LIES)
def test_contradictory_reply_is_refused(tmp_path: Path, lie: dict[str, Any], reason: str) -> None:
    """Each contradiction is refused, and neither a descriptor nor a mapping is left."""
    with run_fake_agent(tmp_path, Answer().send) as fake, fake.acquire():
        with_lease, _ = fake.open_things()
    with run_fake_agent(tmp_path, replace(Answer(), **lie).send) as fake:
        with pytest.raises(Refused, match=reason) as refused:
            fake.acquire()
        assert refused.value.failure.code == "manifest_corrupt"
        assert fake.open_things() == (with_lease - 1, 0)


def update(*ready: tuple[int, int], whole: bool = False) -> LeaseReply:
    return LeaseReply(ok=True, whole=whole, ready=ready)


def test_ready_parts_arrive_in_order(tmp_path: Path) -> None:
    """Parts are reported in the order in which they became ready. The last message completes the rest."""
    later = (
        update((2 * PAGE_BYTES, 3 * PAGE_BYTES)),
        update((0, PAGE_BYTES), (PAGE_BYTES, 2 * PAGE_BYTES)),
        update(whole=True),
    )
    answer = Answer(whole=False, ready=((4 * PAGE_BYTES, 5 * PAGE_BYTES),), later=later)
    with run_fake_agent(tmp_path, answer.send) as fake, fake.acquire(progressive=True) as lease:
        assert "being filled" in repr(lease)
        before = lease.is_whole
        assert lease.view(4 * PAGE_BYTES, PAGE_BYTES) == VERSION.linear[4 * PAGE_BYTES : 5 * PAGE_BYTES]
        parts = [
            (4 * PAGE_BYTES, 5 * PAGE_BYTES),
            (2 * PAGE_BYTES, 3 * PAGE_BYTES),
            (0, PAGE_BYTES),
            (PAGE_BYTES, 2 * PAGE_BYTES),
        ]
        assert list(lease.ready_parts()) == [*parts, (3 * PAGE_BYTES, 4 * PAGE_BYTES), (5 * PAGE_BYTES, TOTAL)]
        assert (before, lease.is_whole) == (False, True)
        assert lease.view(0, TOTAL) == VERSION.linear


LATER_LIES: list[Any] = [
    pytest.param((update((0, PAGE_BYTES)), update((0, PAGE_BYTES))), "already", id="a part twice"),
    pytest.param((update((0, 2 * PAGE_BYTES), (PAGE_BYTES, 3 * PAGE_BYTES)),), "already", id="parts that overlap"),
    pytest.param((update((0, TOTAL + PAGE_BYTES)),), "no part of", id="a part beyond the end"),
    pytest.param((update((PAGE_BYTES, PAGE_BYTES)),), "no part of", id="an empty part"),
    pytest.param((update((0, 100)),), "no pages", id="a part off the page"),
    pytest.param((LeaseReply(ok=False),), "without a reason", id="a refusal without a reason"),
    pytest.param((Answer(whole=False),), "it moved before", id="another place that is not whole"),
    pytest.param((Answer(extents=((0, 0, HUGE, TOTAL),)),), "beyond slab", id="another place beyond its slab"),
    pytest.param((Answer(sealed=False),), "is not sealed", id="another place that its sender can take back"),
]


@pytest.mark.parametrize(("later", "reason"), LATER_LIES)
def test_later_contradictory_reply_is_refused(
    tmp_path: Path, later: tuple[Answer | LeaseReply, ...], reason: str
) -> None:
    """A contradiction in a later message is refused. Closing the lease leaves neither a descriptor nor a mapping."""
    answer = Answer(whole=False, later=later)
    with run_fake_agent(tmp_path, answer.send) as fake:
        lease = fake.acquire(progressive=True)
        with_lease, mappings = fake.open_things()
        assert mappings >= 1
        with pytest.raises(Refused, match=reason) as refused:
            lease.wait_until_whole()
        assert refused.value.failure.code == "manifest_corrupt"
        lease.close()
        assert fake.open_things() == (with_lease - 1, 0)


def test_failure_during_a_progressive_lease_is_raised(tmp_path: Path) -> None:
    """The caller gets the agent's failure with all its fields, also after the first parts."""
    wire = WireFailure(code="chunk_corrupt", status=502, message="chunk", retryable=False)
    answer = Answer(whole=False, later=(update((0, PAGE_BYTES)), LeaseReply(ok=False, failure=wire)))
    with run_fake_agent(tmp_path, answer.send) as fake, fake.acquire(progressive=True) as lease:
        assert next(lease.ready_parts()) == (0, PAGE_BYTES)
        with pytest.raises(Refused) as refused:
            lease.wait_until_whole()
        assert refused.value.failure == RemoteFailure("chunk_corrupt", 502, "chunk", None, False, None)


def test_agents_failure_is_raised(tmp_path: Path) -> None:
    """The caller gets the agent's failure with all its fields."""
    wire = WireFailure(code="overloaded", status=503, message="full", retryable=True, retry_after_s=2.0)
    reply = encode(LeaseReply(ok=False, failure=wire))
    with run_fake_agent(tmp_path, replace(Answer(), raw=reply, descriptors=0).send) as fake:
        with pytest.raises(Refused) as refused:
            fake.acquire()
        assert refused.value.failure == RemoteFailure("overloaded", 503, "full", None, True, 2.0)


def test_lease_waits_for_an_agent_that_restarts(tmp_path: Path) -> None:
    """The agent is down when the lease is requested, and listens a moment later. The lease is granted then."""
    with ThreadPoolExecutor(1) as threads, closing(SocketDirectory(tmp_path)) as directory:
        waiting = threads.submit(acquire, directory, TENANT, VERSION.id, 10.0)
        assert not wait([waiting], timeout=0.2).done
        with run_fake_agent(tmp_path, Answer().send):
            waiting.result(10).close()


def test_lease_is_retried_after_the_agent_died(tmp_path: Path) -> None:
    """The agent dies during the request, and the next agent grants the lease."""
    next_agents: list[FakeAgent] = []

    def die(sock: socket.socket) -> None:
        (tmp_path / SOCKET).unlink()
        next_agents.append(FakeAgent(tmp_path, Answer().send))
        sock.shutdown(socket.SHUT_RDWR)

    with run_fake_agent(tmp_path, die) as fake:
        fake.acquire().close()
    next_agents[0].close()


def test_missing_agent_is_unavailable(tmp_path: Path) -> None:
    """A missing agent and one that dies during the request are unavailable. A silent one exceeds the deadline."""
    directory = SocketDirectory(tmp_path)
    with pytest.raises(Refused) as refused:
        acquire(directory, TENANT, VERSION.id, 0.02)
    assert refused.value.failure == Unavailable("the weight cache")
    directory.close()

    def die(sock: socket.socket) -> None:
        (tmp_path / SOCKET).unlink()
        sock.shutdown(socket.SHUT_RDWR)

    with run_fake_agent(tmp_path, die) as fake:
        with pytest.raises(Refused) as refused:
            fake.acquire(timeout_s=0.5)
        assert refused.value.failure == Unavailable("the weight cache")
    with run_fake_agent(tmp_path, lambda _: None) as fake:
        with pytest.raises(Refused) as refused:
            fake.acquire(timeout_s=0.02)
        assert refused.value.failure == DeadlineExceeded(0.02, "restoring weights")


def test_views_are_read_only_and_bounded(tmp_path: Path) -> None:
    """Views are read-only and within bounds, and a closed lease gives none."""
    with run_agent(settings_of(tmp_path)) as agent:
        agent.publish(VERSION)
        lease = agent.acquire(VERSION)
        tensor = VERSION.manifest.tensors[1]
        assert lease.view(tensor.offset, tensor.nbytes) == VERSION.linear[tensor.offset :][: tensor.nbytes]
        assert lease.view(TOTAL, 0).nbytes == 0
        view = lease.view(0, 10)
        assert view.readonly
        with pytest.raises(TypeError):
            view[0] = 1
        for offset, length in ((-1, 2), (0, TOTAL + 1), (TOTAL, 1), (4, -1)):
            with pytest.raises(ValueError, match="not within"):
                lease.view(offset, length)
        assert f"{TOTAL} bytes" in repr(lease)
        lease.close()
        lease.close()
        assert "closed" in repr(lease)
        with pytest.raises(ValueError, match="closed"):
            lease.view(0, 1)


def test_one_deadline_bounds_answer_and_parts(tmp_path: Path) -> None:
    """An agent that answers late and then falls silent delays the caller by no more than the timeout."""

    def late(sock: socket.socket) -> None:
        time.sleep(2.0)
        Answer(whole=False).send(sock)

    with run_fake_agent(tmp_path, late) as fake:
        began_s = time.monotonic()
        with fake.acquire(timeout_s=3.0, progressive=True) as lease, pytest.raises(Refused) as refused:
            lease.wait_until_whole()
        assert time.monotonic() - began_s < 4.5
    assert refused.value.failure == DeadlineExceeded(3.0, "restoring weights")


def huge_mapped() -> int:
    """Return the KiB of slabs that this process maps by huge pages."""
    smaps = Path("/proc/self/smaps").read_text().split("kelvin-slab")[1:]
    return sum(int(entry.split("ShmemPmdMapped:")[1].split()[0]) for entry in smaps)


def test_huge_pages(tmp_path: Path) -> None:
    """If slabs have huge pages, so has the mapping, even of a version that begins in the middle of a slab."""
    first = make_version(seed=2, pages=(77,), chunk_pages=64)
    second = make_version(seed=3, pages=(5, 1500), chunk_pages=128)
    with run_agent(settings_of(tmp_path, slabs=2, slab_bytes=8 * HUGE)) as agent:
        agent.publish(first)
        agent.publish(second)
        agent.acquire(first).close()
        with agent.acquire(second) as lease:
            assert lease.extents[0][2] != 0, "it does not share the slab"
            state = agent.wait_for("the spare is made", lambda state: state.host.slabs_free == 1)
            if state.host.slabs_huge < 2:
                pytest.skip("this kernel grants no huge pages to shared memory")
            before = huge_mapped()  # the agent's mappings, in this process
            bytes(lease.view(0, lease.total_bytes)[::PAGE_BYTES])
            assert huge_mapped() - before >= (lease.total_bytes // HUGE - 1) * HUGE // 1024


WRITER = """
import ctypes, sys
from pathlib import Path
from kelvin.ipc.socket_directory import SocketDirectory
from weightcache.client.lease import acquire

lease = acquire(SocketDirectory(Path(sys.argv[1])), "acme", sys.argv[2], 30.0)
print(ctypes.string_at(lease.address, 1) == lease.view(0, 1), flush=True)
ctypes.memset(lease.address, 0, 1)
print("written", flush=True)
"""


def test_a_write_is_fatal(tmp_path: Path) -> None:
    """A process that writes to the mapping dies of SIGSEGV, and the bytes stay as they were."""
    with run_agent(settings_of(tmp_path)) as agent:
        agent.publish(VERSION)
        command = [sys.executable, "-c", WRITER, str(agent.settings.run), VERSION.id]
        died = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert (died.returncode, died.stdout) == (-signal.SIGSEGV, "True\n")
        with agent.acquire(VERSION) as lease:
            assert lease.view(0, TOTAL) == VERSION.linear
