"""A runtime's side of a lease: ask, check the answer, map the version's bytes read-only. Blocking; no thread, no loop.

Just after a fork is a good time for it. A progressive lease is mapped while the agent fills it: what was not told to be
ready can't be read, by the page tables, so that a byte whose digest was not checked is a SIGSEGV and never an answer.
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
from kelvin.process.request_context import cause
from weightcache.client import libc
from weightcache.client.lease_protocol import SOCKET, LeaseReply, LeaseRequest
from weightcache.client.lease_reply import ContradictoryReply, LeaseAnswer, receive_reply, validate_reply
from weightcache.client.spans_policy import Span, Spans

RESTART_S: Final = 10.0  # for an agent that ended to listen again; a supervisor restarts it after 5 s at most
_LOOK_S: Final = 0.05

Engines = tuple[tuple[str, str], ...]


class Lease:
    """The bytes of a version, mapped from `address`. Views and tensors die with `close`."""

    def __init__(
        self,
        sock: socket.socket,
        tenant: str,
        version: str,
        answer: LeaseAnswer,
        reply: LeaseReply,
        timeout_s: float,
        until_s: float,
    ) -> None:
        """Maps it. `timeout_s` ends at `until_s` (monotonic). Raises `Refused(Unavailable)` and Contradiction."""
        self._sock = sock
        self._timeout_s = timeout_s
        self._until_s = until_s
        self.tenant = tenant
        self.version = version
        self.manifest = answer.manifest
        self.attestations: tuple[SealAttestation, ...] = answer.layout.attestations
        self.extents = answer.layout.extents
        self.total_bytes = answer.layout.total_bytes
        self.chunks_by_tier: dict[str, int] = {}
        self.bytes_by_tier: dict[str, int] = {}
        self._ready = Spans(self.total_bytes)
        self._ready_spans: list[Span] = []  # in the order in which they became ready
        self._is_complete = False  # the agent said that it is whole
        self._buffers: list[weakref.ref[object]] = []
        self.address = _reserved(self.total_bytes)
        try:
            self._map(answer)
            if self.total_bytes and not reply.whole:
                libc.protect(self.address, self.total_bytes, libc.PROT_NONE)
            self._take(reply)
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
        """Whether it is known here that all of it may be read. Only a progressive lease ever is not."""
        return self._is_complete

    def ready_parts(self) -> Iterator[Span]:
        """Parts that may be read, each once: those that may already, then the others as they become ready, until that
        is all of it. Blocking. Raises `Refused`: what the agent refused, `Unavailable` where it died, or
        `DeadlineExceeded`; the lease is of no use then, and to be closed.
        """
        given = 0
        while True:
            while given < len(self._ready_spans):
                yield self._ready_spans[given]
                given += 1
            if self._is_complete:
                return
            self._receive()

    def wait_until_whole(self) -> None:
        """Returns when all of it may be read. Raises as `ready_parts`."""
        while not self._is_complete:
            self._receive()

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Read-only bytes of the linear space, once they may be read. A write past Python's check is a SIGSEGV. Raises
        ValueError, and as `ready_parts`.
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
        """`buffer` lies over the mapping, and whatever is made of it keeps it alive."""
        self._buffers.append(weakref.ref(buffer))

    @property
    def in_use(self) -> bool:
        """Whether something lives that would look into the mapping. (Of a bare `view` nothing is known.)"""
        return any(looker() is not None for looker in self._buffers)

    def __enter__(self) -> "Lease":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fileno(self) -> int:
        """Of a whole lease readable once the agent is gone; what is mapped stays."""
        return self._sock.fileno()

    def close(self) -> None:
        """Unmap and end the lease, in this order: the agent looks whether we have it mapped as soon as it ends.

        Touching a view or tensor afterwards is a SIGSEGV.
        """
        if self._sock.fileno() < 0:
            return
        try:
            self._unmap()
        finally:
            self._sock.close()

    def _receive(self) -> None:
        """Take in the agent's next message."""
        if self._sock.fileno() < 0:
            raise ValueError("the lease is closed")
        try:
            self._sock.settimeout(_remaining_s(self._until_s))
            with receive_reply(self._sock) as (reply, descriptors):
                if descriptors:
                    self._move(reply, descriptors)
                self._take(reply)
        except TimeoutError as error:
            raise Refused(DeadlineExceeded(self._timeout_s, "restoring weights")) from error
        except ContradictoryReply as error:
            raise error.refused(self.version) from error
        except OSError as error:
            raise Refused(Unavailable("address space for weights")) from error

    def _move(self, reply: LeaseReply, descriptors: Sequence[int]) -> None:
        """A part was found wrong after it had been told: all of it is elsewhere now, and comes here instead."""
        if not reply.whole:
            raise ContradictoryReply("it moved before it was whole")
        answer = validate_reply(reply, descriptors, self.version)
        self._map(answer)
        self.extents = answer.layout.extents

    def _take(self, reply: LeaseReply) -> None:
        try:
            for span in reply.ready:
                self._add(span)
        except ValueError as error:
            raise ContradictoryReply(str(error)) from error
        if reply.whole:
            self._end(reply)

    def _add(self, span: Span) -> None:
        begin, end = span
        if begin % PAGE_BYTES or end % PAGE_BYTES:
            raise ValueError(f"{begin} to {end} are no pages")
        self._ready.add(begin, end)
        libc.protect(self.address + begin, end - begin, libc.PROT_READ)
        self._ready_spans.append(span)

    def _end(self, reply: LeaseReply) -> None:
        """What is mapped is all there."""
        for span in self._ready.gaps():
            self._add(span)
        self.chunks_by_tier = reply.chunks_by_tier or {}
        self.bytes_by_tier = reply.bytes_by_tier or {}
        self._is_complete = True
        self._sock.settimeout(None)

    def _map(self, answer: LeaseAnswer) -> None:
        """Put it where it is to be, whatever was there. Raises OSError."""
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
    """Lease a version from the agent, which loads and verifies what is not in memory yet. Blocks.

    Waits up to RESTART_S for an agent that is being restarted. `engines` are pairs of library and device class: if the
    agent knows no answers of one of them, it looks in the store.

    A `progressive` lease is returned as soon as the places of its bytes are known. `view`, `ready_parts` and
    `wait_until_whole` wait for the bytes, and raise what goes wrong with them. Any other lease can be read at once.

    All waits together end after `timeout_s`. Raises `Refused`: the agent's refusal, `Unavailable`, `DeadlineExceeded`,
    or `ManifestCorrupt` if the answer contradicts itself.
    """
    asked_by = cause()
    wish = LeaseRequest(
        tenant=tenant,
        version=version,
        request_id=None if asked_by is None else asked_by.request_id,
        engines=engines,
        progressive=progressive,
    )
    until_s = time.monotonic() + timeout_s
    sock = _connect(directory, until_s)
    try:
        return _request_lease(sock, wish, timeout_s, until_s)
    except Refused as refused:
        if not isinstance(refused.failure, Unavailable) or time.monotonic() >= until_s:
            raise
    # An agent that is killed takes connections until it has ended. Ask the next one, once: the version may be what
    # ends them.
    return _request_lease(_connect(directory, until_s), wish, timeout_s, until_s)


def _connect(directory: SocketDirectory, until_s: float) -> socket.socket:
    restarts_s = min(until_s, time.monotonic() + RESTART_S)
    while True:
        try:
            return directory.connect(SOCKET, socket.SOCK_SEQPACKET, max(_LOOK_S, until_s - time.monotonic()))
        except OSError as error:
            is_ended = isinstance(error, FileNotFoundError | ConnectionRefusedError)
            if not is_ended or time.monotonic() >= restarts_s:
                raise Refused(Unavailable("the weight cache")) from error
        time.sleep(_LOOK_S)


def _request_lease(sock: socket.socket, wish: LeaseRequest, timeout_s: float, until_s: float) -> Lease:
    """Send the request and return the lease, which owns the socket. On failure the socket is closed."""
    try:
        sock.settimeout(_remaining_s(until_s))
        sock.sendall(encode(wish))
        sock.settimeout(_remaining_s(until_s))
        with receive_reply(sock) as (reply, descriptors):
            if not (reply.whole or wish.progressive):
                raise ContradictoryReply("it is not whole")
            answer = validate_reply(reply, descriptors, wish.version)
            return Lease(sock, wish.tenant, wish.version, answer, reply, timeout_s, until_s)
    except BaseException as error:
        sock.close()
        match error:
            case TimeoutError():
                raise Refused(DeadlineExceeded(timeout_s, "restoring weights")) from error
            case ContradictoryReply():
                raise error.refused(wish.version) from error
            case OSError():
                raise Refused(Unavailable("the weight cache")) from error
        raise


def _remaining_s(until_s: float) -> float:
    """Raises TimeoutError where nothing is left."""
    if (left_s := until_s - time.monotonic()) <= 0:
        raise TimeoutError
    return left_s


def _reserved(nbytes: int) -> int:
    """Address space for so many bytes; 0 for none. Raises `Refused(Unavailable)`."""
    try:
        return libc.reserve(nbytes) if nbytes else 0
    except OSError as error:
        raise Refused(Unavailable("address space for weights")) from error
