"""A version in the host tier: the slabs of its chunks, its documents, and the progress of its load.

`version_loader.py` decides when a version is resident, and for how long.
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
from weightcache.client.libc import DOCUMENT_SEALS
from weightcache.client.spans_policy import Span, spans_of
from weightcache.host.policy.extents import SlabRange, extents_of
from weightcache.host.policy.host_index import Reservation

TIERS: Final = ("host", "nvme", "peer", "store")


class SealedFile:
    """Immutable bytes behind a descriptor that can be sent to other processes. Closed with its last reference."""

    def __init__(self, parts: Iterable[bytes]) -> None:
        self.fd = os.memfd_create("kelvin-documents", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        for part in parts:
            remaining = memoryview(part)
            while remaining:
                remaining = remaining[os.write(self.fd, remaining) :]
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, DOCUMENT_SEALS)

    def __del__(self) -> None:
        os.close(self.fd)


@dataclass(frozen=True, slots=True)
class TierTally:
    """Distinct chunks of a version, and their bytes, by the tier in which a lease found them."""

    chunks: dict[str, int]
    bytes: dict[str, int]


@dataclass(frozen=True, slots=True, eq=False)
class ResidentVersion:
    """The places of a version's chunks, ready or loading, and the content of its lease replies."""

    slabs: tuple[int, ...]
    places: Mapping[str, SlabRange]  # by digest
    documents: SealedFile
    manifest_bytes: int
    layout_bytes: int
    engines: frozenset[tuple[str, str]]  # library and device class of each seal
    tally: TierTally  # the tally of a hot lease: everything in the host tier

    def has_seal_for(self, engines: tuple[tuple[str, str], ...]) -> bool:
        """Return whether a seal for one of these engines is here. Without `engines`: whether any seal is here. If not,
        the store may have one.
        """
        return not self.engines.isdisjoint(engines) if engines else bool(self.engines)


@dataclass(frozen=True, slots=True)
class LoadedVersion:
    """A resident version, completely ready, and the tiers that its chunks came from."""

    resident: ResidentVersion
    tally: TierTally

    @property
    def was_hot(self) -> bool:
        """Return whether the load counts as hot: it has the tally of a lease of a version in memory."""
        return self.tally is self.resident.tally


def build_resident(
    manifest_raw: bytes, manifest: Manifest, attestations: tuple[SealAttestation, ...], reservation: Reservation
) -> ResidentVersion:
    """Return the version at the places of the reservation."""
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
    documents = SealedFile((manifest_raw, layout))
    return ResidentVersion(slabs, reservation.places, documents, len(manifest_raw), len(layout), engines, all_hot)


def build_tally(reservation: Reservation, tiers: Mapping[str, str]) -> TierTally:
    """Return the tally of these tiers by digest."""
    tally = TierTally(dict.fromkeys(TIERS, 0), dict.fromkeys(TIERS, 0))
    for digest, tier in tiers.items():
        tally.chunks[tier] += 1
        tally.bytes[tier] += reservation.places[digest].length
    return tally


class LoadProgress:
    """The places of a version's bytes during its load, and which parts are readable. One writer, any number of readers.

    A chunk is reported once it is ready, which means verified in its place. If the load has to use other places (a
    chunk was found damaged meanwhile), reporting starts again from the beginning.
    """

    def __init__(self) -> None:
        self.resident: ResidentVersion | None = None  # set during a load
        self._spans_by_digest: dict[str, tuple[Span, ...]] = {}
        self._ready: list[Span] = []  # in order of readiness
        self._changed = asyncio.Event()

    @contextmanager
    def track_load(
        self, resident: ResidentVersion, chunks: Sequence[tuple[str, int]], ready: Iterable[str]
    ) -> Iterator[None]:
        """Report a load to the places of `resident` while the block runs. Digests in `ready` are ready at its start."""
        self.resident, self._spans_by_digest, self._ready = resident, spans_of(chunks), []
        for digest in ready:
            self._ready += self._spans_by_digest[digest]
        self._notify()
        try:
            yield
        finally:
            self.resident = None
            self._notify()

    def mark_ready(self, resident: ResidentVersion, digest: str) -> None:
        """Report a chunk as ready."""
        if self.resident is resident:
            self._ready += self._spans_by_digest[digest]
            self._notify()

    async def wait_until_placed(self) -> ResidentVersion:
        """Wait until the places are known, and return them."""
        while self.resident is None:
            await self._changed.wait()
        return self.resident

    async def ready_since(self, resident: ResidentVersion, count: int) -> tuple[Span, ...]:
        """Wait for ready spans after the first `count`, and return at most `MAX_SPANS` of them. Returns none once the
        version is no longer being loaded to these places.
        """
        while self.resident is resident and len(self._ready) == count:
            await self._changed.wait()
        return tuple(self._ready[count : count + MAX_SPANS]) if self.resident is resident else ()

    def _notify(self) -> None:
        """Wake all waiters to check again."""
        self._changed.set()
        self._changed = asyncio.Event()
