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
class PromisedBytes:
    """An open push and what it may add: chunks or a file (digest -> bytes). With `is_idle`, it may be dropped to make
    room.
    """

    plan_id: str
    added_bytes: Mapping[str, int]
    is_idle: bool


def choose_dropped_pushes(
    stored_bytes: int,
    stored: Container[str],
    added_bytes: Mapping[str, int],
    open_promises: Sequence[PromisedBytes],
    limit_bytes: int,
) -> tuple[str, ...]:
    """Return the open pushes to drop so that `added_bytes` fit: as few idle ones as needed, in their order.

    Raises `Refused(StorageQuotaExceeded)` if it does not fit. A push that adds nothing always fits.
    """
    wanted_bytes = _bytes_of([added_bytes], stored)
    kept = list(open_promises)
    dropped: list[str] = []
    while True:
        total = stored_bytes + _bytes_of([added_bytes, *(promise.added_bytes for promise in kept)], stored)
        if not wanted_bytes or total <= limit_bytes:
            return tuple(dropped)
        idle_push = next((promise for promise in kept if promise.is_idle), None)
        if idle_push is None:
            raise Refused(StorageQuotaExceeded(total - wanted_bytes, wanted_bytes, limit_bytes))
        kept.remove(idle_push)
        dropped.append(idle_push.plan_id)


def _bytes_of(groups: Sequence[Mapping[str, int]], stored: Container[str]) -> int:
    """Return the bytes that the distinct chunks of all sets will take in packs."""
    chunks = {digest: length for chunks in groups for digest, length in chunks.items() if digest not in stored}
    return sum(chunks.values()) + ENTRY_BYTES * len(chunks)
