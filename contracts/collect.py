"""What `kelvin collect` and the snapshotter say to each other: which objects no version needs, and where they went."""

from contracts.manifest import Digest
from contracts.wire import Wire


class CollectRequest(Wire, frozen=True):
    """`POST /push/v1/collect`. Without `run` nothing changes."""

    run: bool


class Freed(Wire, frozen=True):
    """An object that nothing needs. It is gone where the collection ran, and would be where it did not."""

    key: str
    nbytes: int
    reason: str


class Condemned(Wire, frozen=True):
    """A version that no model names: kept until the grace period is over, counted from the collection that found it."""

    version: Digest
    kept_s: int  # from now on


class CollectReport(Wire, frozen=True, omit_defaults=True):
    """The answer. `unreferenced_bytes` lie in packs that are kept for their other chunks, or for their age."""

    ran: bool
    grace_s: int
    freed: tuple[Freed, ...]  # in the order in which they go: what refers before what is referred to
    condemned: tuple[Condemned, ...]
    versions: int  # that are kept, condemned ones included
    packs: int  # that are kept
    unreferenced_bytes: int
    dropped_pushes: int  # that stood still for longer than the grace period
    pushes_running: bool
    lost: int = 0  # chunks of kept versions that are in no pack: while there is one, no pack is freed
