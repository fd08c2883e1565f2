"""A version as the host tier has it: the slabs that its chunks are in, and the papers that go with them.

When it is there, and for how long, is `residents.py`'s.
"""

import fcntl
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import msgspec

from contracts.jobs import SealAttestation
from contracts.manifest import Manifest
from weightcache.libc import F_ADD_SEALS, PAPER_SEALS
from weightcache.policy.extents import Place, extents_of
from weightcache.policy.host import Reservation
from weightcache.wire import Layout

TIERS: Final = ("host", "nvme", "peer", "store")


class SealedFile:
    """Immutable bytes behind a descriptor that other processes may be given. Closed with its last reference."""

    def __init__(self, parts: Iterable[bytes]) -> None:
        self.fd = os.memfd_create("kelvin-papers", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        for part in parts:
            left = memoryview(part)
            while left:
                left = left[os.write(self.fd, left) :]
        fcntl.fcntl(self.fd, F_ADD_SEALS, PAPER_SEALS)

    def __del__(self) -> None:
        os.close(self.fd)


@dataclass(frozen=True, slots=True)
class Tally:
    """Distinct chunks of a version, and their bytes, by the tier that this lease found them in."""

    chunks: dict[str, int]
    bytes: dict[str, int]


@dataclass(frozen=True, slots=True, eq=False)
class Resident:
    """Where a version's chunks are, or will be once they are ready, and the answer to whoever leases it."""

    slabs: tuple[int, ...]
    places: Mapping[str, Place]  # by digest
    papers: SealedFile
    manifest_bytes: int
    layout_bytes: int
    engines: frozenset[tuple[str, str]]  # library and device class of each seal
    tally: Tally  # everything in the host tier

    def knows(self, engines: tuple[tuple[str, str], ...]) -> bool:
        """Whether there are known answers of one of these, or of any where none is named: if not, there may be news."""
        return not self.engines.isdisjoint(engines) if engines else bool(self.engines)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A resident version, all of it ready, and where its chunks came from."""

    resident: Resident
    tally: Tally


def resident_of(
    raw: bytes, manifest: Manifest, attestations: tuple[SealAttestation, ...], reservation: Reservation
) -> Resident:
    """At the places of the reservation."""
    slabs = reservation.slabs
    position = {slab: index for index, slab in enumerate(slabs)}
    chunks = [(chunk.digest, chunk.length) for chunk in manifest.chunks]
    extents = tuple(
        (extent.virtual, position[extent.slab], extent.offset, extent.length)
        for extent in extents_of(chunks, reservation.places)
    )
    layout = msgspec.json.encode(Layout(total_bytes=manifest.total_bytes, extents=extents, attestations=attestations))
    all_hot = tally_of(reservation, dict.fromkeys(reservation.places, "host"))
    engines = frozenset((seal.fingerprint.torch, seal.fingerprint.device_class) for seal in attestations)
    papers = SealedFile((raw, layout))
    return Resident(slabs, reservation.places, papers, len(raw), len(layout), engines, all_hot)


def tally_of(reservation: Reservation, tiers: Mapping[str, str]) -> Tally:
    """Of each digest's tier."""
    tally = Tally(dict.fromkeys(TIERS, 0), dict.fromkeys(TIERS, 0))
    for digest, tier in tiers.items():
        tally.chunks[tier] += 1
        tally.bytes[tier] += reservation.places[digest].length
    return tally
