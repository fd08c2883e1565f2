"""Versions in the host tier: brought there once however many ask, and pinned while an answer to them is being made."""

import asyncio
import fcntl
import logging
import os
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass

import msgspec

from contracts.control import SealAttestation
from contracts.errors import CapacityExceeded, DeadlineExceeded, Failure, Internal, Refused
from contracts.manifest import Manifest
from weightcache.arena import Arena
from weightcache.attestations import Attestations
from weightcache.libc import F_ADD_SEALS, PAPER_SEALS
from weightcache.loader import Loader
from weightcache.papers import Papers
from weightcache.policy.extents import extents_of
from weightcache.policy.host import Reservation
from weightcache.policy.rates import Rates
from weightcache.policy.sharing import FULL_WEIGHT, LOW_WEIGHT
from weightcache.waiting import Waiting
from weightcache.wire import MAX_SLABS, Layout

log = logging.getLogger(__name__)

TIERS = ("host", "nvme", "peer", "store")


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


@dataclass(frozen=True, slots=True)
class Resident:
    """A version whose chunks are all ready, and the answer to whoever leases it from now on."""

    slabs: tuple[int, ...]
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
    """A resident version and where its chunks came from."""

    resident: Resident
    tally: Tally


@dataclass(eq=False, slots=True)
class _Claim:
    """A flight's name for its share of the sources, and how large that is."""

    weight: float


@dataclass(slots=True)
class _Flight:
    task: asyncio.Task[Arrival | Failure]
    claim: _Claim
    waiting: int = 0
    leased: bool = False  # somebody who waited, or waits, wants a lease


class Residents:
    """One flight per version: it is cancelled when nobody waits for it any more."""

    def __init__(
        self,
        arena: Arena,
        loader: Loader,
        papers: Papers,
        attestations: Attestations,
        waiting: Waiting,
        rates: Rates | None = None,
    ) -> None:
        self._arena = arena
        self._loader = loader
        self._papers = papers
        self._attestations = attestations
        self.rates = rates or Rates()
        self._waiting = waiting
        self._hot: dict[tuple[str, str], Resident] = {}
        self._flights: dict[tuple[str, str], _Flight] = {}
        self._owed: dict[tuple[str, str], Tally] = {}  # what an urgent prefetch found, for the first lease
        arena.on_end = self.forget

    def __repr__(self) -> str:
        return f"<Residents hot={len(self._hot)} arriving={len(self._flights)}>"

    @property
    def hot_count(self) -> int:
        """Versions that are answered at once."""
        return len(self._hot)

    def try_hot(self, tenant: str, version: str) -> Tally | None:
        """Of a version that would be answered at once; None of others, though all of their bytes may be there."""
        hot = self._hot.get((tenant, version))
        return None if hot is None else hot.tally

    @asynccontextmanager
    async def pinned(
        self, tenant: str, version: str, timeout_s: float, engines: tuple[tuple[str, str], ...] = ()
    ) -> AsyncIterator[Arrival]:
        """For a lease: the version, whole, verified and kept from eviction while the block runs. Raises `Refused`."""
        key = (tenant, version)
        async with self._arrival(key, timeout_s, engines, leased=True) as arrival:
            owed = self._owed.pop(key, None)
            is_hot = arrival.tally is arrival.resident.tally
            yield Arrival(arrival.resident, owed) if is_hot and owed is not None else arrival

    async def bring(self, tenant: str, version: str, timeout_s: float, *, urgent: bool) -> None:
        """For nobody yet: the version is here when this returns, and may be evicted from then on. Raises `Refused`.

        An urgent one is part of a start: the lease that comes for it is told where its chunks were found. Others have
        a small share beside it, until somebody waits.
        """
        key = (tenant, version)
        weight = FULL_WEIGHT if urgent else LOW_WEIGHT
        async with self._arrival(key, timeout_s, (), leased=False, weight=weight) as arrival:
            self._arena.index.touch(arrival.resident.slabs, time.monotonic())
            if urgent and arrival.tally is not arrival.resident.tally and key in self._hot:
                self._owed[key] = arrival.tally

    @asynccontextmanager
    async def _arrival(
        self,
        key: tuple[str, str],
        timeout_s: float,
        engines: tuple[tuple[str, str], ...],
        *,
        leased: bool,
        weight: float = FULL_WEIGHT,
    ) -> AsyncIterator[Arrival]:
        hot = self._hot.get(key)
        if hot is not None and hot.knows(engines):
            self._arena.index.pin(hot.slabs)
            try:
                yield Arrival(hot, hot.tally)
            finally:
                self._arena.unpin(hot.slabs)
            return
        flight = self._flights.get(key) or self._depart(key, weight)
        if weight > flight.claim.weight:
            flight.claim.weight = weight
            self._loader.weigh(flight.claim, weight)
        flight.waiting += 1
        flight.leased |= leased
        try:
            with self._waiting.leasing(key) if leased else nullcontext():
                arrival = await _within(flight.task, timeout_s)
            yield arrival if leased or not flight.leased else Arrival(arrival.resident, arrival.resident.tally)
        finally:
            flight.waiting -= 1
            if not flight.waiting:
                self._land(key, flight)

    async def close(self) -> None:
        """Ends all flights."""
        tasks = [flight.task for flight in self._flights.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self._hot.clear()

    def _depart(self, key: tuple[str, str], weight: float) -> _Flight:
        claim = _Claim(weight)
        flight = _Flight(asyncio.create_task(self._fly(*key, claim)), claim)
        self._flights[key] = flight

        def done(_: object) -> None:
            if self._flights.get(key) is flight:
                del self._flights[key]  # who comes now finds it hot, or tries again

        flight.task.add_done_callback(done)
        return flight

    def _land(self, key: tuple[str, str], flight: _Flight) -> None:
        """The last who waited has left: what the flight pinned for them is unpinned."""
        if not flight.task.done():
            if self._flights.get(key) is flight:
                del self._flights[key]
            flight.task.cancel()
            flight.task.add_done_callback(self._release)  # it may have arrived in the same instant
        else:
            self._release(flight.task)

    def _release(self, task: asyncio.Task[Arrival | Failure]) -> None:
        if not task.cancelled() and isinstance(arrival := task.result(), Arrival):
            self._arena.unpin(arrival.resident.slabs)

    async def _fly(self, tenant: str, version: str, claim: _Claim) -> Arrival | Failure:
        """The version's slabs stay pinned where this returns an arrival."""
        began_s = time.monotonic()
        try:
            raw, manifest = await self._papers.manifest(tenant, version)
            attestations = await self._attestations.of(tenant, version)
            reservation, tiers = await self._brought(tenant, manifest, claim)
            try:
                resident = _resident(raw, manifest, attestations, reservation)
            except BaseException:
                self._arena.unpin(reservation.slabs)
                raise
        except Refused as refused:
            return refused.failure
        except Exception:
            log.exception("a version did not arrive", extra={"tenant": tenant, "version": version})
            return Internal()
        self._hot[tenant, version] = resident
        tally = _tally(reservation, tiers)
        self.rates.observe(tally.bytes, time.monotonic() - began_s)
        return Arrival(resident, tally)

    async def _brought(self, tenant: str, manifest: Manifest, claim: _Claim) -> tuple[Reservation, dict[str, str]]:
        """A reservation whose chunks are ready; what was found wrong while others were loading is brought anew."""
        tiers: dict[str, str] = {}
        while True:
            reservation = self._reserve(tenant, manifest)
            try:
                found = await self._loader.bring(reservation, claim, claim.weight)
            except BaseException:
                self._arena.unpin(reservation.slabs)
                raise
            tiers = {**found, **{digest: tier for digest, tier in tiers.items() if found[digest] == "host"}}
            if self._arena.index.is_current(reservation):
                return reservation, tiers
            self._arena.unpin(reservation.slabs)

    def _reserve(self, tenant: str, manifest: Manifest) -> Reservation:
        chunks = [(chunk.digest, chunk.length) for chunk in manifest.chunks]
        reservation = self._arena.reserve(tenant, chunks, time.monotonic())
        if len(reservation.slabs) > MAX_SLABS:
            self._arena.unpin(reservation.slabs)
            raise Refused(CapacityExceeded("slabs of a lease", len(reservation.slabs), MAX_SLABS))
        return reservation

    def forget(self, slab: int) -> None:
        """The slab is gone, or something in it: versions that have chunks in it are no longer resident."""
        for key in [key for key, resident in self._hot.items() if slab in resident.slabs]:
            del self._hot[key]
            self._owed.pop(key, None)


async def _within(task: asyncio.Task[Arrival | Failure], timeout_s: float) -> Arrival:
    began = time.monotonic()
    try:
        async with asyncio.timeout(timeout_s):
            outcome = await asyncio.shield(task)
    except TimeoutError as error:
        raise Refused(DeadlineExceeded(time.monotonic() - began, "restoring weights")) from error
    if isinstance(outcome, Failure):
        raise Refused(outcome)
    return outcome


def _resident(
    raw: bytes, manifest: Manifest, attestations: tuple[SealAttestation, ...], reservation: Reservation
) -> Resident:
    slabs = reservation.slabs
    position = {slab: index for index, slab in enumerate(slabs)}
    chunks = [(chunk.digest, chunk.length) for chunk in manifest.chunks]
    extents = tuple(
        (extent.virtual, position[extent.slab], extent.offset, extent.length)
        for extent in extents_of(chunks, reservation.places)
    )
    layout = msgspec.json.encode(Layout(total_bytes=manifest.total_bytes, extents=extents, attestations=attestations))
    all_hot = _tally(reservation, dict.fromkeys(reservation.places, "host"))
    engines = frozenset((seal.fingerprint.torch, seal.fingerprint.device_class) for seal in attestations)
    return Resident(slabs, SealedFile((raw, layout)), len(raw), len(layout), engines, all_hot)


def _tally(reservation: Reservation, tiers: dict[str, str]) -> Tally:
    tally = Tally(dict.fromkeys(TIERS, 0), dict.fromkeys(TIERS, 0))
    for digest, tier in tiers.items():
        tally.chunks[tier] += 1
        tally.bytes[tier] += reservation.places[digest].length
    return tally
