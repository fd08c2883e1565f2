"""What client and agent say on the lease socket: one JSON message to the agent; one or more back, with descriptors.

An answer is whole: all bytes are there and verified. Whoever asks for a progressive lease may be answered before that:
then parts follow that have become ready, and at last one that it is whole, or a failure. An answer with descriptors
that comes after such a one replaces it, and is whole.

The first descriptor is a sealed memfd: the manifest's canonical bytes, then a `Layout`. It holds what may outgrow a
socket message. The rest are the slabs, in the order in which extents number them.
"""

from typing import Final

from kelvin.contracts.artifacts.manifest import Digest, Offset, Size
from kelvin.contracts.artifacts.runtime_control import SealAttestation
from kelvin.contracts.problem import WireFailure
from kelvin.contracts.wire import Fact

SOCKET: Final = "lease.sock"
MAX_MESSAGE_BYTES: Final = 64 << 10
MAX_SLABS: Final = 252  # 253 descriptors fit a message (SCM_MAX_FD)
MAX_SPANS: Final = 1000  # of a message
HUGE_PAGE: Final = 2 << 20  # a lease is mapped at a multiple of it, so extents that agree modulo it may have huge pages


class LeaseRequest(Fact, frozen=True):
    """The client's message. The lease lasts until the connection or the process ends."""

    tenant: str
    version: Digest
    request_id: str | None = None  # for which it is wanted, where that is known
    engines: tuple[tuple[str, str], ...] = ()  # library and device class: known answers of one are wanted
    progressive: bool = False  # whether to answer as soon as it is known where the bytes will be


class SlabFact(Fact, frozen=True):
    """A slab's number, unique while the agent lives, and its size."""

    id: int
    bytes: Size


class LeaseReply(Fact, frozen=True):
    """The agent's message: `ok`, or a failure and no descriptors. `ready` are parts of the linear space, first byte and
    the first byte after it, that no earlier message had.
    """

    ok: bool
    whole: bool = True
    ready: tuple[tuple[Offset, Offset], ...] = ()
    failure: WireFailure | None = None
    manifest_bytes: Size = 0
    layout_bytes: Size = 0
    slabs: tuple[SlabFact, ...] = ()
    chunks_by_tier: dict[str, int] | None = None  # where this lease's chunks were found, or came from
    bytes_by_tier: dict[str, int] | None = None


class Layout(Fact, frozen=True):
    """Where the version's linear space lies: extents of (virtual offset, index of the slab, offset in it, length)."""

    total_bytes: Size
    extents: tuple[tuple[Offset, Offset, Offset, Size], ...]
    attestations: tuple[SealAttestation, ...]
