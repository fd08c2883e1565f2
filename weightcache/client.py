"""A runtime's side of a lease: ask, check the answer, map the version's bytes read-only. Blocking; no thread, no loop.

Just after a fork is a good time for it. Content was verified by the agent, which alone can write; here everything that
the mapping itself relies on is checked: lengths, bounds, seals, the manifest's digest.
"""

import fcntl
import mmap
import os
import socket
from array import array
from collections.abc import Sequence
from typing import Final, TypeVar

import msgspec

from contracts.artifact_errors import ManifestCorrupt
from contracts.control import SealAttestation
from contracts.errors import DeadlineExceeded, Refused, Unavailable
from contracts.manifest import PAGE, Manifest, decode_manifest
from contracts.problem import from_wire
from contracts.wire import encode
from service.cause import cause
from service.unix import SocketDirectory
from weightcache import libc
from weightcache.libc import F_GET_SEALS, F_SEAL_FUTURE_WRITE, F_SEAL_SHRINK, F_SEAL_WRITE
from weightcache.wire import MAX_MESSAGE_BYTES, MAX_SLABS, SOCKET, Layout, LeaseReply, LeaseRequest

_T = TypeVar("_T")
Engines = tuple[tuple[str, str], ...]
_ONE_FD: Final = array("i").itemsize


class Lease:
    """The bytes of a version, mapped read-only from `address`. Views and tensors die with `close`."""

    def __init__(
        self,
        sock: socket.socket,
        tenant: str,
        version: str,
        manifest: Manifest,
        layout: Layout,
        reply: LeaseReply,
        address: int,
    ) -> None:
        self._sock = sock
        self.tenant = tenant
        self.version = version
        self.manifest = manifest
        self.attestations: tuple[SealAttestation, ...] = layout.attestations
        self.extents = layout.extents
        self.total_bytes = layout.total_bytes
        self.chunks_by_tier: dict[str, int] = reply.chunks_by_tier or {}
        self.bytes_by_tier: dict[str, int] = reply.bytes_by_tier or {}
        self.address = address

    def __repr__(self) -> str:
        state = "closed" if self._sock.fileno() < 0 else f"{self.total_bytes} bytes at {self.address:#x}"
        return f"<Lease {self.tenant} {self.version[:12]} {state}>"

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Read-only bytes of the linear space. A write past Python's check is a SIGSEGV. Raises ValueError."""
        if self._sock.fileno() < 0:
            raise ValueError("the lease is closed")
        if not 0 <= offset <= offset + nbytes <= self.total_bytes:
            raise ValueError(f"{offset}+{nbytes} is not within {self.total_bytes} bytes")
        if nbytes == 0:
            return memoryview(b"")
        return libc.view(self.address + offset, nbytes).toreadonly()

    def __enter__(self) -> "Lease":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fileno(self) -> int:
        """Readable once the agent is gone; what is mapped stays."""
        return self._sock.fileno()

    def close(self) -> None:
        """Unmap and end the lease. Touching a view or tensor afterwards is a SIGSEGV."""
        if self._sock.fileno() >= 0:
            self._sock.close()
            if self.total_bytes:
                libc.unmap(self.address, self.total_bytes)


def acquire(directory: SocketDirectory, tenant: str, version: str, timeout_s: float, engines: Engines = ()) -> Lease:
    """Lease a version from the agent, which loads and verifies what isn't in memory yet. Raises `Refused`: what the
    agent refused, `Unavailable`, `DeadlineExceeded`, or `ManifestCorrupt` where the answer contradicts itself.
    `engines` are library and device class: where the agent knows no answers of any, it asks the store for news.
    """
    try:
        sock = directory.connect(SOCKET, socket.SOCK_SEQPACKET, timeout_s)
    except OSError as error:
        raise Refused(Unavailable("the weight cache")) from error
    try:
        asked_by = cause()
        request_id = None if asked_by is None else asked_by.request_id
        wish = LeaseRequest(tenant=tenant, version=version, request_id=request_id, engines=engines)
        reply, descriptors = _ask(sock, wish, timeout_s)
        try:
            return _accept(sock, tenant, version, reply, descriptors)
        finally:
            for fd in descriptors:
                os.close(fd)  # the mapping keeps the memory
    except BaseException:
        sock.close()
        raise


def _ask(sock: socket.socket, request: LeaseRequest, timeout_s: float) -> tuple[LeaseReply, Sequence[int]]:
    space = socket.CMSG_SPACE((MAX_SLABS + 1) * _ONE_FD)
    try:
        sock.settimeout(timeout_s)
        sock.sendall(encode(request))
        raw, ancillary, flags, _ = sock.recvmsg(MAX_MESSAGE_BYTES, space, socket.MSG_CMSG_CLOEXEC)
    except TimeoutError as error:
        raise Refused(DeadlineExceeded(timeout_s, "restoring weights")) from error
    except OSError as error:
        raise Refused(Unavailable("the weight cache")) from error
    descriptors = array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(data[: len(data) - len(data) % _ONE_FD])
    try:
        if not raw:
            raise Refused(Unavailable("the weight cache"))
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            raise _Contradiction("the message was cut")
        reply = _decoded(raw, LeaseReply)
        if not reply.ok:
            raise _failure(reply)
    except BaseException as error:
        for fd in descriptors:
            os.close(fd)
        if isinstance(error, _Contradiction):
            raise error.refused(request.version) from error
        raise
    return reply, descriptors


class _Contradiction(Exception):
    """What the agent said can't be true."""

    def refused(self, version: str) -> Refused:
        return Refused(ManifestCorrupt(version, f"its lease is wrong: {self}"))


def _failure(reply: LeaseReply) -> Exception:
    if reply.failure is None:
        return _Contradiction("refused without a reason")
    return Refused(from_wire(reply.failure))


def _accept(sock: socket.socket, tenant: str, version: str, reply: LeaseReply, descriptors: Sequence[int]) -> Lease:
    try:
        if len(descriptors) != 1 + len(reply.slabs):
            raise _Contradiction(f"{len(descriptors)} descriptors for {len(reply.slabs)} slabs")
        papers, *slabs = descriptors
        raw, layout = _papers(papers, reply)
        manifest = decode_manifest(raw, version)
        _check_slabs(slabs, reply)
        _check_layout(layout, manifest, reply)
        if any(attestation.version != version for attestation in layout.attestations):
            raise _Contradiction("an attestation speaks of another version")
    except _Contradiction as error:
        raise error.refused(version) from error
    address = _map(layout, slabs) if layout.total_bytes else 0
    sock.settimeout(None)
    return Lease(sock, tenant, version, manifest, layout, reply, address)


def _papers(fd: int, reply: LeaseReply) -> tuple[bytes, Layout]:
    size = os.fstat(fd).st_size
    if size != reply.manifest_bytes + reply.layout_bytes or size == 0:
        raise _Contradiction(f"{size} bytes of papers")
    if not fcntl.fcntl(fd, F_GET_SEALS) & F_SEAL_WRITE:
        raise _Contradiction("its papers are not sealed")
    with mmap.mmap(fd, size, prot=mmap.PROT_READ) as both:
        return both[: reply.manifest_bytes], _decoded(both[reply.manifest_bytes :], Layout)


def _decoded(raw: bytes, kind: type[_T]) -> _T:
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.ValidationError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _Contradiction(str(error)) from error


def _check_slabs(slabs: Sequence[int], reply: LeaseReply) -> None:
    needed = F_SEAL_FUTURE_WRITE | F_SEAL_SHRINK  # nobody but the agent writes; no touch of it is ever a SIGBUS
    for fd, fact in zip(slabs, reply.slabs, strict=True):
        if os.fstat(fd).st_size != fact.bytes:
            raise _Contradiction(f"slab {fact.id} has not {fact.bytes} bytes")
        if fcntl.fcntl(fd, F_GET_SEALS) & needed != needed:
            raise _Contradiction(f"slab {fact.id} is not sealed")


def _check_layout(layout: Layout, manifest: Manifest, reply: LeaseReply) -> None:
    if layout.total_bytes != manifest.total_bytes:
        raise _Contradiction(f"{layout.total_bytes} bytes where the manifest has {manifest.total_bytes}")
    end = 0
    for virtual, slab, offset, length in layout.extents:
        if virtual != end or length == 0 or length % PAGE or offset % PAGE:
            raise _Contradiction(f"an extent at {virtual}+{length}")
        if slab >= len(reply.slabs) or offset + length > reply.slabs[slab].bytes:
            raise _Contradiction(f"an extent beyond slab {slab}")
        end += length
    if end != layout.total_bytes:
        raise _Contradiction(f"extents of {end} bytes")


def _map(layout: Layout, slabs: Sequence[int]) -> int:
    try:
        address = libc.reserve(layout.total_bytes)
        try:
            for virtual, slab, offset, length in layout.extents:
                libc.map_shared(address + virtual, length, slabs[slab], offset, writable=False)
        except OSError:
            libc.unmap(address, layout.total_bytes)
            raise
    except OSError as error:
        raise Refused(Unavailable("address space for weights")) from error
    return address
