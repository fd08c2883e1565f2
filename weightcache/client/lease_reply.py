"""Receive the agent's replies, and check everything that the mapping relies on.

The agent has verified the content. The checks here cover lengths, bounds, seals, and the manifest's digest.
"""

import fcntl
import mmap
import os
import socket
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, TypeVar

from kelvin.contracts.artifact_errors import ManifestCorrupt
from kelvin.contracts.artifacts.manifest import PAGE_BYTES, Manifest, decode_manifest
from kelvin.contracts.errors import Refused, Unavailable
from kelvin.contracts.problem import from_wire
from kelvin.contracts.wire import BadJson, decoder
from weightcache.client.lease_protocol import MAX_MESSAGE_BYTES, MAX_SLABS, Layout, LeaseReply
from weightcache.client.libc import F_SEAL_FUTURE_WRITE

_T = TypeVar("_T")
_ONE_FD: Final = array("i").itemsize


class ContradictoryReply(Exception):
    """The agent's reply contradicts itself."""

    def to_refusal(self, version: str) -> Refused:
        """Return the exception for the caller that wants the version."""
        return Refused(ManifestCorrupt(version, f"its lease is wrong: {self}"))


@dataclass(frozen=True, slots=True)
class LeaseAnswer:
    """A checked reply: manifest, layout and slab descriptors. They are open inside the block of `receive_reply`."""

    manifest: Manifest
    layout: Layout
    slabs: Sequence[int]


@contextmanager
def receive_reply(sock: socket.socket) -> Iterator[tuple[LeaseReply, Sequence[int]]]:
    """Receive the agent's next message with its descriptors, which are closed after the block. Raises `Refused`: the
    agent's refusal, or `Unavailable` if it is gone; ContradictoryReply; TimeoutError after the socket's timeout.
    """
    descriptors = array("i")
    space = socket.CMSG_SPACE((MAX_SLABS + 1) * _ONE_FD)
    try:
        try:
            raw, ancillary, flags, _ = sock.recvmsg(MAX_MESSAGE_BYTES, space, socket.MSG_CMSG_CLOEXEC)
        except TimeoutError:
            raise
        except OSError as error:
            raise Refused(Unavailable("the weight cache")) from error
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                descriptors.frombytes(data[: len(data) - len(data) % _ONE_FD])
        if not raw:
            raise Refused(Unavailable("the weight cache"))
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            raise ContradictoryReply("the message was cut")
        reply = _decode(raw, LeaseReply)
        if not reply.ok:
            raise _refusal_of(reply)
        yield reply, descriptors
    finally:
        for fd in descriptors:
            os.close(fd)


def validate_reply(reply: LeaseReply, descriptors: Sequence[int], version: str) -> LeaseAnswer:
    """Return the checked reply. Raises ContradictoryReply, and `Refused` if the manifest is not the version's."""
    if len(descriptors) != 1 + len(reply.slabs):
        raise ContradictoryReply(f"{len(descriptors)} descriptors for {len(reply.slabs)} slabs")
    documents, *slabs = descriptors
    raw, layout = _read_documents(documents, reply)
    manifest = decode_manifest(raw, version)
    _check_slabs(slabs, reply)
    _check_layout(layout, manifest, reply)
    if any(attestation.version != version for attestation in layout.attestations):
        raise ContradictoryReply("an attestation speaks of another version")
    return LeaseAnswer(manifest, layout, slabs)


def _refusal_of(reply: LeaseReply) -> Exception:
    if reply.failure is None:
        return ContradictoryReply("refused without a reason")
    return Refused(from_wire(reply.failure))


def _read_documents(fd: int, reply: LeaseReply) -> tuple[bytes, Layout]:
    size = os.fstat(fd).st_size
    if size != reply.manifest_bytes + reply.layout_bytes or size == 0:
        raise ContradictoryReply(f"{size} bytes of documents")
    if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_WRITE:
        raise ContradictoryReply("its documents are not sealed")
    with mmap.mmap(fd, size, prot=mmap.PROT_READ) as both:
        return both[: reply.manifest_bytes], _decode(both[reply.manifest_bytes :], Layout)


def _decode(raw: bytes, kind: type[_T]) -> _T:
    try:
        return decoder(kind).decode(raw)
    except BadJson as error:
        raise ContradictoryReply(str(error)) from error


def _check_slabs(slabs: Sequence[int], reply: LeaseReply) -> None:
    needed = F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SHRINK  # only the agent can write, and no access is ever a SIGBUS
    for fd, fact in zip(slabs, reply.slabs, strict=True):
        if os.fstat(fd).st_size != fact.bytes:
            raise ContradictoryReply(f"slab {fact.id} has not {fact.bytes} bytes")
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & needed != needed:
            raise ContradictoryReply(f"slab {fact.id} is not sealed")


def _check_layout(layout: Layout, manifest: Manifest, reply: LeaseReply) -> None:
    if layout.total_bytes != manifest.total_bytes:
        raise ContradictoryReply(f"{layout.total_bytes} bytes where the manifest has {manifest.total_bytes}")
    end = 0
    for virtual, slab, offset, length in layout.extents:
        if virtual != end or length == 0 or length % PAGE_BYTES or offset % PAGE_BYTES:
            raise ContradictoryReply(f"an extent at {virtual}+{length}")
        if slab >= len(reply.slabs) or offset + length > reply.slabs[slab].bytes:
            raise ContradictoryReply(f"an extent beyond slab {slab}")
        end += length
    if end != layout.total_bytes:
        raise ContradictoryReply(f"extents of {end} bytes")
