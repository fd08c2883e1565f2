"""A version as the host tier has it: the slabs that its chunks are in, and the papers that go with them.

Also how its load goes, for those who wait for it. When it is there, and for how long, is `version_loader.py`'s.
"""

import asyncio
import fcntl
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import msgspec

from kelvin.contracts.artifacts.manifest import Manifest
from kelvin.contracts.artifacts.runtime_control import SealAttestation
from weightcache.client.lease_protocol import MAX_SPANS, Layout
from weightcache.client.libc import DOCUMENT_SEALS, F_ADD_SEALS
from weightcache.client.spans_policy import Span, spans_of
from weightcache.host.policy.extents import SlabRange, extents_of
from weightcache.host.policy.host_index import Reservation

TIERS: Final = ("host", "nvme", "peer", "store")


class SealedFile:
    """Immutable bytes behind a descriptor that other processes may be given. Closed with its last reference."""

    def __init__(self, parts: Iterable[bytes]) -> None:
        self.fd = os.memfd_create("kelvin-papers", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        for part in parts:
            left = memoryview(part)
            while left:
                left = left[os.write(self.fd, left) :]
        fcntl.fcntl(self.fd, F_ADD_SEALS, DOCUMENT_SEALS)

    def __del__(self) -> None:
        os.close(self.fd)


@dataclass(frozen=True, slots=True)
class TierTally:
    """Distinct chunks of a version, and their bytes, by the tier that this lease found them in."""

    chunks: dict[str, int]
    bytes: dict[str, int]


@dataclass(frozen=True, slots=True, eq=False)
class ResidentVersion:
    """Where a version's chunks are, or will be once they are ready, and the answer to whoever leases it."""

    slabs: tuple[int, ...]
    places: Mapping[str, SlabRange]  # by digest
    papers: SealedFile
    manifest_bytes: int
    layout_bytes: int
    engines: frozenset[tuple[str, str]]  # library and device class of each seal
    tally: TierTally  # everything in the host tier

    def knows(self, engines: tuple[tuple[str, str], ...]) -> bool:
        """Whether there are known answers of one of these, or of any where none is named: if not, there may be news."""
        return not self.engines.isdisjoint(engines) if engines else bool(self.engines)


@dataclass(frozen=True, slots=True)
class LoadedVersion:
    """A resident version, all of it ready, and where its chunks came from."""

    resident: ResidentVersion
    tally: TierTally


def build_resident(
    raw: bytes, manifest: Manifest, attestations: tuple[SealAttestation, ...], reservation: Reservation
) -> ResidentVersion:
    """At the places of the reservation."""
    slabs = reservation.slabs
    position = {slab: index for index, slab in enumerate(slabs)}
    chunks = [(chunk.digest, chunk.length) for chunk in manifest.chunks]
    extents = tuple(
        (extent.virtual, position[extent.slab], extent.offset, extent.length)
        for extent in extents_of(chunks, reservation.places)
    )
    layout = msgspec.json.encode(Layout(total_bytes=manifest.total_bytes, extents=extents, attestations=attestations))
    all_hot = build_tally(reservation, dict.fromkeys(reservation.places, "host"))
    engines = frozenset((seal.fingerprint.torch, seal.fingerprint.device_class) for seal in attestations)
    papers = SealedFile((raw, layout))
    return ResidentVersion(slabs, reservation.places, papers, len(raw), len(layout), engines, all_hot)


def build_tally(reservation: Reservation, tiers: Mapping[str, str]) -> TierTally:
    """Of each digest's tier."""
    tally = TierTally(dict.fromkeys(TIERS, 0), dict.fromkeys(TIERS, 0))
    for digest, tier in tiers.items():
        tally.chunks[tier] += 1
        tally.bytes[tier] += reservation.places[digest].length
    return tally


class LoadProgress:
    """Where a version's bytes will be, and which may be read already. Written by the flight, read by any number.

    A chunk is told once it is ready, which is to say verified where it lies. A flight that has to bring the version to
    another place (something in it was found wrong meanwhile) is told anew from the start.
    """

    def __init__(self) -> None:
        self.resident: ResidentVersion | None = None  # while it is on its way there
        self._spans_by_digest: dict[str, tuple[Span, ...]] = {}
        self._ready: list[Span] = []  # in the order in which they became so
        self._changed = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Filling placed={self.resident is not None} ready={len(self._ready)}>"

    @contextmanager
    def loading_into(
        self, resident: ResidentVersion, chunks: Sequence[tuple[str, int]], ready: Iterable[str]
    ) -> Iterator[None]:
        """While the block brings the version there: its chunks, of which these are ready from the start."""
        self.resident, self._spans_by_digest, self._ready = resident, spans_of(chunks), []
        for digest in ready:
            self._ready += self._spans_by_digest[digest]
        self._notify()
        try:
            yield
        finally:
            self.resident = None
            self._notify()

    def add(self, resident: ResidentVersion, digest: str) -> None:
        """The chunk is ready there."""
        if self.resident is resident:
            self._ready += self._spans_by_digest[digest]
            self._notify()

    async def wait_until_placed(self) -> ResidentVersion:
        """Where it will be, once that is known."""
        while self.resident is None:
            await self._changed.wait()
        return self.resident

    async def ready_since(self, resident: ResidentVersion, count: int) -> tuple[Span, ...]:
        """What became ready there beyond the first `count` spans, at most `MAX_SPANS` of it, once there is some; none
        once the version is not on its way there any more.
        """
        while self.resident is resident and len(self._ready) == count:
            await self._changed.wait()
        return tuple(self._ready[count : count + MAX_SPANS]) if self.resident is resident else ()

    def _notify(self) -> None:
        """Whoever waits looks again."""
        self._changed.set()
        self._changed = asyncio.Event()
