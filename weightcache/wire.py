"""What client and agent say on the lease socket: one JSON message each way, descriptors with the answer.

The first descriptor is a sealed memfd: the manifest's canonical bytes, then a `Layout`. It holds what may outgrow a
socket message. The rest are the slabs, in the order in which extents number them.
"""

from typing import Final

from contracts.control import SealAttestation
from contracts.manifest import Digest, Offset, Size
from contracts.problem import WireFailure
from contracts.wire import Wire

SOCKET: Final = "lease.sock"
MAX_MESSAGE_BYTES: Final = 64 << 10
MAX_SLABS: Final = 252  # 253 descriptors fit a message (SCM_MAX_FD)


class LeaseRequest(Wire, frozen=True):
    """The client's message. The lease lasts until the connection or the process ends."""

    tenant: str
    version: Digest
    request_id: str | None = None  # for which it is wanted, where that is known
    engines: tuple[tuple[str, str], ...] = ()  # library and device class: known answers of one are wanted


class SlabFact(Wire, frozen=True):
    """A slab's number, unique while the agent lives, and its size."""

    id: int
    bytes: Size


class LeaseReply(Wire, frozen=True):
    """The agent's message: `ok`, or a failure and no descriptors."""

    ok: bool
    failure: WireFailure | None = None
    manifest_bytes: Size = 0
    layout_bytes: Size = 0
    slabs: tuple[SlabFact, ...] = ()
    chunks_by_tier: dict[str, int] | None = None  # where this lease's chunks were found, or came from
    bytes_by_tier: dict[str, int] | None = None


class Layout(Wire, frozen=True):
    """Where the version's linear space lies: extents of (virtual offset, index of the slab, offset in it, length)."""

    total_bytes: Size
    extents: tuple[tuple[Offset, Offset, Offset, Size], ...]
    attestations: tuple[SealAttestation, ...]
