"""Messages on the lease socket: one JSON message to the agent; one or more replies, with descriptors.

A whole reply means that all bytes are there and verified. A progressive lease may get an earlier reply. Then replies
with newly ready parts follow, and finally a whole one or a failure. If the bytes move, one later
reply has new descriptors. It replaces the earlier layout and is whole.

The first descriptor is a sealed memfd with the manifest's canonical bytes, then a `Layout`. These may be too large for
a socket message. The other descriptors are the slabs, in the order that extents refer to.
"""

from typing import Final

from kelvin.contracts.artifacts.manifest import Digest, Offset, Size
from kelvin.contracts.artifacts.runtime_control import SealAttestation
from kelvin.contracts.problem import WireFailure
from kelvin.contracts.wire import Fact

SOCKET: Final = "lease.sock"
MAX_MESSAGE_BYTES: Final = 64 << 10
MAX_SLABS: Final = 252  # 253 descriptors fit a message (SCM_MAX_FD)
MAX_SPANS: Final = 1000  # per message
HUGE_PAGE: Final = 2 << 20  # leases are mapped at multiples of it, so extents that agree modulo it may have huge pages


class LeaseRequest(Fact, frozen=True):
    """The client's message. The lease lasts until the connection or the process ends."""

    tenant: str
    version: Digest
    request_id: str | None = None  # the inference request that needs the lease, if known
    engines: tuple[tuple[str, str], ...] = ()  # library and device class whose known answers are wanted
    progressive: bool = False  # reply as soon as the places of the bytes are known


class SlabFact(Fact, frozen=True):
    """A slab's number, unique during the agent's life, and its size."""

    id: int
    bytes: Size


class LeaseReply(Fact, frozen=True):
    """The agent's message: `ok`, or a failure without descriptors.

    `ready` has newly ready parts of the linear space, each as its first byte and the first byte after it.
    """

    ok: bool
    whole: bool = True
    ready: tuple[tuple[Offset, Offset], ...] = ()
    failure: WireFailure | None = None
    manifest_bytes: Size = 0
    layout_bytes: Size = 0
    slabs: tuple[SlabFact, ...] = ()
    chunks_by_tier: dict[str, int] | None = None  # tiers from which this lease's chunks came
    bytes_by_tier: dict[str, int] | None = None


class Layout(Fact, frozen=True):
    """The layout of a version's linear space. An extent is (virtual offset, slab index, offset in the slab, length)."""

    total_bytes: Size
    extents: tuple[tuple[Offset, Offset, Offset, Size], ...]
    attestations: tuple[SealAttestation, ...]
