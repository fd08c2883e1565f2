"""The runtime's side of a lease: request it, check the reply, map the version's bytes read-only. Blocking, without
threads.

A good moment is just after a fork. A progressive lease is mapped while the agent fills it. Page protection makes parts
that are not ready unreadable. So an access to an unverified byte is a SIGSEGV and never a wrong result.
"""

import socket
import time
import weakref
from collections.abc import Iterator, Sequence
from typing import Final

from kelvin.contracts.artifacts.manifest import PAGE_BYTES
from kelvin.contracts.artifacts.runtime_control import SealAttestation
from kelvin.contracts.errors import Refused, Unavailable
from kelvin.contracts.traffic_errors import DeadlineExceeded
from kelvin.contracts.wire import encode
from kelvin.ipc.socket_directory import SocketDirectory
from kelvin.process.request_context import current_request
from weightcache.client import libc
from weightcache.client.lease_protocol import SOCKET, LeaseReply, LeaseRequest
from weightcache.client.lease_reply import ContradictoryReply, LeaseAnswer, receive_reply, validate_reply
from weightcache.client.spans_policy import Span, Spans

RESTART_S: Final = 10.0  # time for an ended agent to listen again; a supervisor restarts it after 5 s at most
_CONNECT_POLL_S: Final = 0.05

Engines = tuple[tuple[str, str], ...]


class Lease:
    """The bytes of a version, mapped from `address`. Views and tensors become invalid with `close`."""

    def __init__(
        self,
        sock: socket.socket,
        tenant: str,
        version: str,
        answer: LeaseAnswer,
        reply: LeaseReply,
        timeout_s: float,
        deadline_s: float,
    ) -> None:
        """Map the bytes. `timeout_s` ends at `deadline_s` (monotonic). Raises `Refused(Unavailable)`,
        `ContradictoryReply`.
        """
        self._sock = sock
        self._timeout_s = timeout_s
        self._deadline_s = deadline_s
        self.tenant = tenant
        self.version = version
        self.manifest = answer.manifest
        self.attestations: tuple[SealAttestation, ...] = answer.layout.attestations
        self.extents = answer.layout.extents
        self.total_bytes = answer.layout.total_bytes
        self.chunks_by_tier: dict[str, int] = {}
        self.bytes_by_tier: dict[str, int] = {}
        self._ready = Spans(self.total_bytes)
        self._ready_spans: list[Span] = []  # in order of readiness
        self._is_complete = False  # the agent reported it as whole
        self._buffers: list[weakref.ref[object]] = []
        self.address = _reserve_address_space(self.total_bytes)
        try:
            self._map(answer)
            if self.total_bytes and not reply.whole:
                libc.protect(self.address, self.total_bytes, libc.PROT_NONE)
            self._apply(reply)
        except OSError as error:
            self._unmap()
            raise Refused(Unavailable("address space for weights")) from error
        except BaseException:
            self._unmap()
            raise

    def __repr__(self) -> str:
        state = "closed" if self._sock.fileno() < 0 else f"{self.total_bytes} bytes at {self.address:#x}"
        return f"<Lease {self.tenant} {self.version[:12]} {state}{'' if self._is_complete else ', being filled'}>"

    @property
    def is_whole(self) -> bool:
        """Return whether all bytes are known to be readable. False only for a progressive lease."""
        return self._is_complete

    def ready_parts(self) -> Iterator[Span]:
        """Yield readable parts, each once: first those that are ready, then the others as they become ready. Blocking.

        Raises `Refused`: the agent's refusal, `Unavailable` if the agent died, or `DeadlineExceeded`. Close the lease
        then.
        """
        yielded_count = 0
        while True:
            while yielded_count < len(self._ready_spans):
                yield self._ready_spans[yielded_count]
                yielded_count += 1
            if self._is_complete:
                return
            self._receive()

    def wait_until_whole(self) -> None:
        """Wait until all bytes are readable. Raises as `ready_parts`."""
        while not self._is_complete:
            self._receive()

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Return read-only bytes of the linear space, once they are readable. Raises ValueError, and as `ready_parts`.
        A write that evades Python's check is a SIGSEGV.
        """
        if self._sock.fileno() < 0:
            raise ValueError("the lease is closed")
        if not 0 <= offset <= offset + nbytes <= self.total_bytes:
            raise ValueError(f"{offset}+{nbytes} is not within {self.total_bytes} bytes")
        if nbytes == 0:
            return memoryview(b"")
        while not self._ready.covers(offset, offset + nbytes):
            self._receive()
        return libc.view(self.address + offset, nbytes).toreadonly()

    def track_buffer(self, buffer: object) -> None:
        """Track a buffer over the mapping. Everything made from the buffer must keep it alive. See `in_use`."""
        self._buffers.append(weakref.ref(buffer))

    @property
    def in_use(self) -> bool:
        """Return whether a tracked buffer over the mapping is still alive. A bare `view` is not tracked."""
        return any(buffer_ref() is not None for buffer_ref in self._buffers)

    def __enter__(self) -> "Lease":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fileno(self) -> int:
        """Return the socket. For a whole lease it becomes readable when the agent is gone; the mapping stays."""
        return self._sock.fileno()

    def close(self) -> None:
        """Unmap, then end the lease. The agent checks whether we have the bytes mapped as soon as the lease ends.
        Access to a view or tensor afterwards is a SIGSEGV.
        """
        if self._sock.fileno() < 0:
            return
        try:
            self._unmap()
        finally:
            self._sock.close()

    def _receive(self) -> None:
        """Receive and apply the agent's next message."""
        if self._sock.fileno() < 0:
            raise ValueError("the lease is closed")
        try:
            self._sock.settimeout(_remaining_s(self._deadline_s))
            with receive_reply(self._sock) as (reply, descriptors):
                if descriptors:
                    self._remap(reply, descriptors)
                self._apply(reply)
        except TimeoutError as error:
            raise Refused(DeadlineExceeded(self._timeout_s, "restoring weights")) from error
        except ContradictoryReply as error:
            raise error.to_refusal(self.version) from error
        except OSError as error:
            raise Refused(Unavailable("address space for weights")) from error

    def _remap(self, reply: LeaseReply, descriptors: Sequence[int]) -> None:
        """Map a replacement: a part was found damaged after it was reported as ready, so the bytes have moved."""
        if not reply.whole:
            raise ContradictoryReply("it moved before it was whole")
        answer = validate_reply(reply, descriptors, self.version)
        self._map(answer)
        self.extents = answer.layout.extents

    def _apply(self, reply: LeaseReply) -> None:
        try:
            for span in reply.ready:
                self._add_ready(span)
        except ValueError as error:
            raise ContradictoryReply(str(error)) from error
        if reply.whole:
            self._complete(reply)

    def _add_ready(self, span: Span) -> None:
        begin, end = span
        if begin % PAGE_BYTES or end % PAGE_BYTES:
            raise ValueError(f"{begin} to {end} are no pages")
        self._ready.add(begin, end)
        libc.protect(self.address + begin, end - begin, libc.PROT_READ)
        self._ready_spans.append(span)

    def _complete(self, reply: LeaseReply) -> None:
        """Make all bytes readable: the lease is whole."""
        for span in self._ready.gaps():
            self._add_ready(span)
        self.chunks_by_tier = reply.chunks_by_tier or {}
        self.bytes_by_tier = reply.bytes_by_tier or {}
        self._is_complete = True
        self._sock.settimeout(None)

    def _map(self, answer: LeaseAnswer) -> None:
        """Map the extents over the reserved range, replacing earlier mappings. Raises OSError."""
        for virtual, slab, offset, length in answer.layout.extents:
            libc.map_shared(self.address + virtual, length, answer.slabs[slab], offset, writable=False)

    def _unmap(self) -> None:
        if self.total_bytes:
            libc.unmap(self.address, self.total_bytes)


def acquire(
    directory: SocketDirectory,
    tenant: str,
    version: str,
    timeout_s: float,
    engines: Engines = (),
    *,
    progressive: bool = False,
) -> Lease:
    """Lease a version from the agent, which loads and verifies the chunks that are not in memory. Blocks.

    Waits up to RESTART_S for an agent that is being restarted. `engines` are pairs of library and device class: if the
    agent has a seal for none of them, it asks the store.

    A `progressive` lease is returned as soon as the places of its bytes are known. `view`, `ready_parts` and
    `wait_until_whole` wait for the bytes, and raise their failures. Any other lease can be read at once.

    All waits together end after `timeout_s`. Raises `Refused`: the agent's refusal, `Unavailable`, `DeadlineExceeded`,
    or `ManifestCorrupt` if the reply contradicts itself.
    """
    cause_request = current_request()
    request = LeaseRequest(
        tenant=tenant,
        version=version,
        request_id=None if cause_request is None else cause_request.request_id,
        engines=engines,
        progressive=progressive,
    )
    until_s = time.monotonic() + timeout_s
    sock = _connect(directory, until_s)
    try:
        return _request_lease(sock, request, timeout_s, until_s)
    except Refused as refused:
        if not isinstance(refused.failure, Unavailable) or time.monotonic() >= until_s:
            raise
    # A killed agent accepts connections until it has ended. A living one sends Unavailable if the store or the disk
    # does not answer. Retry only once: the version itself may be what kills agents.
    return _request_lease(_connect(directory, until_s), request, timeout_s, until_s)


def _connect(directory: SocketDirectory, deadline_s: float) -> socket.socket:
    restarts_s = min(deadline_s, time.monotonic() + RESTART_S)
    while True:
        try:
            return directory.connect(SOCKET, socket.SOCK_SEQPACKET, max(_CONNECT_POLL_S, deadline_s - time.monotonic()))
        except OSError as error:
            is_ended = isinstance(error, FileNotFoundError | ConnectionRefusedError)
            if not is_ended or time.monotonic() >= restarts_s:
                raise Refused(Unavailable("the weight cache")) from error
        time.sleep(_CONNECT_POLL_S)


def _request_lease(sock: socket.socket, request: LeaseRequest, timeout_s: float, deadline_s: float) -> Lease:
    """Send the request and return the lease, which owns the socket. On failure the socket is closed."""
    try:
        sock.settimeout(_remaining_s(deadline_s))
        sock.sendall(encode(request))
        sock.settimeout(_remaining_s(deadline_s))
        with receive_reply(sock) as (reply, descriptors):
            if not (reply.whole or request.progressive):
                raise ContradictoryReply("it is not whole")
            answer = validate_reply(reply, descriptors, request.version)
            return Lease(sock, request.tenant, request.version, answer, reply, timeout_s, deadline_s)
    except BaseException as error:
        sock.close()
        match error:
            case TimeoutError():
                raise Refused(DeadlineExceeded(timeout_s, "restoring weights")) from error
            case ContradictoryReply():
                raise error.to_refusal(request.version) from error
            case OSError():
                raise Refused(Unavailable("the weight cache")) from error
        raise


def _remaining_s(deadline_s: float) -> float:
    """Return the seconds left. Raises TimeoutError if there are none."""
    if (left_s := deadline_s - time.monotonic()) <= 0:
        raise TimeoutError
    return left_s


def _reserve_address_space(nbytes: int) -> int:
    """Reserve address space for `nbytes` bytes; return 0 for none. Raises `Refused(Unavailable)`."""
    try:
        return libc.reserve(nbytes) if nbytes else 0
    except OSError as error:
        raise Refused(Unavailable("address space for weights")) from error
