"""Whether a push may store what it lacks: what the tenant has, what its open pushes were promised, and the limit.

What it has are packs, and what publishers say of its versions; seals are the installation's own. A chunk counts once
however many pushes want it, and not at all where a pack holds it; so does a file that is kept as it is. So a push that
is repeated, or stands in two states at once (packed, not yet forgotten), is counted like one.
"""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kelvin.contracts.artifact_errors import StorageQuotaExceeded
from kelvin.contracts.errors import Refused

# Its entry in a pack's table (a digest, two numbers, punctuation) and its share of the footer, at most.
ENTRY_BYTES: Final = 128


@dataclass(frozen=True, slots=True)
class Promise:
    """An open push and what it may add: chunks or a file (digest -> bytes). `free` where it may be forgotten to make
    room.
    """

    plan_id: str
    chunks: Mapping[str, int]
    free: bool


def make_room(
    stored_bytes: int,
    stored: Container[str],
    wanted: Mapping[str, int],
    open_promises: Sequence[Promise],
    limit_bytes: int,
) -> tuple[str, ...]:
    """Which open pushes to forget so that `wanted` fits: of those that are free as few as needed, in their order.

    Raises `Refused(StorageQuotaExceeded)` where it does not fit. A push that adds nothing always does.
    """
    asked = _bytes_of([wanted], stored)
    kept = list(open_promises)
    forgotten: list[str] = []
    while True:
        total = stored_bytes + _bytes_of([wanted, *(promise.chunks for promise in kept)], stored)
        if not asked or total <= limit_bytes:
            return tuple(forgotten)
        free = next((promise for promise in kept if promise.free), None)
        if free is None:
            raise Refused(StorageQuotaExceeded(total - asked, asked, limit_bytes))
        kept.remove(free)
        forgotten.append(free.plan_id)


def _bytes_of(sets: Sequence[Mapping[str, int]], stored: Container[str]) -> int:
    """What the distinct chunks of all of them will take in packs."""
    chunks = {digest: length for chunks in sets for digest, length in chunks.items() if digest not in stored}
    return sum(chunks.values()) + ENTRY_BYTES * len(chunks)
