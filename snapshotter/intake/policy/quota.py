"""Decide whether a push fits: the tenant's stored bytes, what its open pushes may still add, and the limit.

Stored bytes are packs and publishers' statements; seals belong to the installation. A chunk counts once, however many
pushes need it, and not at all if a pack holds it. The same holds for a kept file. So a push that is repeated, or is in
two states at once (packed, not dropped yet), counts once.
"""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kelvin.contracts.artifact_errors import StorageQuotaExceeded
from kelvin.contracts.errors import Refused

# A chunk's entry in a pack's table (a digest, two numbers, punctuation) and its share of the footer, at most.
ENTRY_BYTES: Final = 128


@dataclass(frozen=True, slots=True)
class Promise:
    """An open push and what it may add: chunks or a file (digest -> bytes). With `free`, it may be dropped to make
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
    """Return the open pushes to drop so that `wanted` fits: as few free ones as needed, in their order.

    Raises `Refused(StorageQuotaExceeded)` if it does not fit. A push that adds nothing always fits.
    """
    wanted_bytes = _bytes_of([wanted], stored)
    kept = list(open_promises)
    forgotten: list[str] = []
    while True:
        total = stored_bytes + _bytes_of([wanted, *(promise.chunks for promise in kept)], stored)
        if not wanted_bytes or total <= limit_bytes:
            return tuple(forgotten)
        free = next((promise for promise in kept if promise.free), None)
        if free is None:
            raise Refused(StorageQuotaExceeded(total - wanted_bytes, wanted_bytes, limit_bytes))
        kept.remove(free)
        forgotten.append(free.plan_id)


def _bytes_of(sets: Sequence[Mapping[str, int]], stored: Container[str]) -> int:
    """Return the bytes that the distinct chunks of all sets will take in packs."""
    chunks = {digest: length for chunks in sets for digest, length in chunks.items() if digest not in stored}
    return sum(chunks.values()) + ENTRY_BYTES * len(chunks)
