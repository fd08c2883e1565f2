"""Versions in the host tier: each is brought once for all callers, and pinned while a lease of it is being granted."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Final

from blobstore.abreast import end_all
from contracts.errors import CapacityExceeded, Failure, Internal, Refused
from contracts.manifest import Manifest
from contracts.traffic_errors import DeadlineExceeded, Overloaded
from service.first import first
from weightcache.arena import Arena
from weightcache.attestations import Attestations
from weightcache.loader import Loader
from weightcache.papers import Papers
from weightcache.policy.host import Reservation
from weightcache.policy.rates import Rates
from weightcache.policy.sharing import FULL_WEIGHT, LOW_WEIGHT
from weightcache.resident import Arrival, Filling, Resident, Tally, resident_of, tally_of
from weightcache.wire import MAX_SLABS

log = logging.getLogger(__name__)

GIVE_WAY_S: Final = 5.0  # for what a prefetch was just reading
LOOK_S: Final = 0.01

Early = Callable[[Filling], Awaitable[None]]


Key = tuple[str, str]  # tenant, version


class Waiting:
    """The versions that leases wait for. Leases come first: background loads learn here when to begin, and when to
    give way.
    """

    def __init__(self) -> None:
        self._awaited: Counter[Key] = Counter()
        self._changed = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Waiting awaited={len(self._awaited)}>"

    @contextmanager
    def leasing(self, key: Key) -> Iterator[None]:
        """Count a lease as waiting for this version while the block runs."""
        self._awaited[key] += 1
        self._tell()
        try:
            yield
        finally:
            self._awaited[key] -= 1
            if not self._awaited[key]:
                del self._awaited[key]
            self._tell()

    def is_busy(self, but: Key | None = None) -> bool:
        """Return whether a lease waits for another version than `but`."""
        return any(key != but for key in self._awaited)

    async def until_free(self, but: Key | None = None) -> None:
        """Wait until no lease waits for another version than `but`."""
        while self.is_busy(but):
            await self._changed.wait()

    async def try_run(self, work: Callable[[], Awaitable[None]], key: Key) -> bool:
        """Run `work`, which is about that version. Return False if it was cancelled, and has ended, because a lease
        began to wait for another version. Raises what `work` raises.
        """
        is_done, _ = await first(work(), self._until_busy(key))
        return is_done

    async def _until_busy(self, but: Key) -> None:
        while not self.is_busy(but):
            await self._changed.wait()

    def _tell(self) -> None:
        """Have all waiters look again."""
        self._changed.set()
        self._changed = asyncio.Event()


@dataclass(eq=False, slots=True)
class _Claim:
    """Bandwidth share of one load: its key in the fair queues, and its weight."""

    weight: float


@dataclass(slots=True)
class _Flight:
    task: asyncio.Task[Arrival | Failure]
    claim: _Claim
    filling: Filling
    waiting: int = 0
    leased: bool = False  # somebody who waited, or waits, wants a lease


class Residents:
    """Versions in memory. Each is loaded by one flight (single-flight), cancelled once no caller waits for it."""

    def __init__(
        self,
        arena: Arena,
        loader: Loader,
        papers: Papers,
        attestations: Attestations,
        waiting: Waiting,
        rates: Rates,
    ) -> None:
        self._arena = arena
        self._loader = loader
        self._papers = papers
        self._attestations = attestations
        self.rates = rates
        self._waiting = waiting
        self._gave_way_s = float("-inf")
        self._hot: dict[tuple[str, str], Resident] = {}
        self._flights: dict[tuple[str, str], _Flight] = {}
        self._owed: dict[tuple[str, str], Tally] = {}  # what an urgent prefetch found, for the first lease
        arena.on_end = self.forget

    def __repr__(self) -> str:
        return f"<Residents hot={len(self._hot)} arriving={len(self._flights)}>"

    @property
    def hot_count(self) -> int:
        """How many versions can be leased at once."""
        return len(self._hot)

    def try_hot(self, tenant: str, version: str) -> Tally | None:
        """Return the tally of a version that can be leased at once; else None, even if all its bytes are in memory."""
        hot = self._hot.get((tenant, version))
        return None if hot is None else hot.tally

    @asynccontextmanager
    async def pinned(
        self,
        tenant: str,
        version: str,
        timeout_s: float,
        engines: tuple[tuple[str, str], ...] = (),
        early: Early | None = None,
    ) -> AsyncIterator[Arrival]:
        """For a lease: yield the version, whole, verified and kept from eviction while the block runs.

        If the version has to be brought first, `early` runs meanwhile, and is cancelled when the version is there.
        Raises `Refused`, and what `early` raises.
        """
        key = (tenant, version)
        async with self._arrival(key, timeout_s, engines, leased=True, early=early) as arrival:
            owed = self._owed.pop(key, None)
            is_hot = arrival.tally is arrival.resident.tally
            yield Arrival(arrival.resident, owed) if is_hot and owed is not None else arrival

    async def bring(self, tenant: str, version: str, timeout_s: float, *, urgent: bool) -> None:
        """Bring the version without a lease. It is here on return, and may be evicted from then on. Raises `Refused`.

        An urgent call is part of a start: the lease that follows is told where its chunks were found. Other calls get
        a small share of each source, until a lease waits for the version.
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
        early: Early | None = None,
    ) -> AsyncIterator[Arrival]:
        hot = self._hot.get(key)
        if hot is not None and hot.knows(engines):
            self._arena.index.pin(hot.slabs)
            try:
                yield Arrival(hot, hot.tally)
            finally:
                self._arena.unpin(hot.slabs)
            return
        flight = self._flights.get(key)
        if flight is None:
            flight = self._depart(key, weight)
        if weight > flight.claim.weight:
            flight.claim.weight = weight
            self._loader.weigh(flight.claim, weight)
        flight.waiting += 1
        flight.leased |= leased
        try:
            with self._waiting.leasing(key) if leased else nullcontext():
                arrival = await _within(flight, timeout_s, early)
            yield arrival if leased or not flight.leased else Arrival(arrival.resident, arrival.resident.tally)
        finally:
            flight.waiting -= 1
            if not flight.waiting:
                self._land(key, flight)

    async def close(self) -> None:
        """Cancel all flights."""
        await end_all([flight.task for flight in self._flights.values()])
        self._hot.clear()

    def _depart(self, key: tuple[str, str], weight: float) -> _Flight:
        claim, filling = _Claim(weight), Filling()
        flight = _Flight(asyncio.create_task(self._fly(*key, claim, filling)), claim, filling)
        self._flights[key] = flight

        def done(_: object) -> None:
            if self._flights.get(key) is flight:
                del self._flights[key]  # who comes now finds it hot, or tries again

        flight.task.add_done_callback(done)
        return flight

    def _land(self, key: tuple[str, str], flight: _Flight) -> None:
        """End a flight that no caller waits for any more: unpin what it pinned, and let no caller join it."""
        if self._flights.get(key) is flight:
            del self._flights[key]
        if not flight.task.done():
            if not flight.leased:
                self._gave_way_s = time.monotonic()
            flight.task.cancel()
            flight.task.add_done_callback(self._release)  # it may have arrived in the same instant
        else:
            self._release(flight.task)

    def _release(self, task: asyncio.Task[Arrival | Failure]) -> None:
        if not task.cancelled() and isinstance(arrival := task.result(), Arrival):
            self._arena.unpin(arrival.resident.slabs)

    async def _fly(self, tenant: str, version: str, claim: _Claim, filling: Filling) -> Arrival | Failure:
        """The version's slabs stay pinned where this returns an arrival."""
        began_s = time.monotonic()
        try:
            raw, manifest = await self._papers.manifest(tenant, version)
            attestations = await self._attestations.of(tenant, version)

            def placed(reservation: Reservation) -> Resident:
                return resident_of(raw, manifest, attestations, reservation)

            arrival = await self._brought(tenant, manifest, placed, claim, filling)
        except Refused as refused:
            return refused.failure
        except Exception:
            log.exception("a version did not arrive", extra={"tenant": tenant, "version": version})
            return Internal()
        self._hot[tenant, version] = arrival.resident
        self.rates.observe(arrival.tally.bytes, time.monotonic() - began_s)
        return arrival

    async def _brought(
        self,
        tenant: str,
        manifest: Manifest,
        placed: Callable[[Reservation], Resident],
        claim: _Claim,
        filling: Filling,
    ) -> Arrival:
        """At a reservation whose chunks are ready; what was found wrong while others were loading is brought anew."""
        tiers: dict[str, str] = {}
        chunks = [(chunk.digest, chunk.length) for chunk in manifest.chunks]
        while True:
            reservation = await self._room_for(tenant, chunks, claim)
            try:
                resident = placed(reservation)
            except BaseException:
                self._arena.withdraw(reservation)
                raise
            try:
                with filling.towards(resident, chunks, reservation.ready):
                    ready = partial(filling.add, resident)
                    found = await self._loader.bring(reservation, claim, claim.weight, ready)
            except BaseException:
                self._arena.unpin(reservation.slabs)
                raise
            tiers = {**found, **{digest: tier for digest, tier in tiers.items() if found[digest] == "host"}}
            if self._arena.index.is_current(reservation):
                return Arrival(resident, tally_of(reservation, tiers))
            self._arena.unpin(reservation.slabs)

    async def _room_for(self, tenant: str, chunks: Sequence[tuple[str, int]], claim: _Claim) -> Reservation:
        """A prefetch that gives way holds its place until what it was reading was read and kept: that is waited for."""
        until_s = time.monotonic() + GIVE_WAY_S
        while True:
            try:
                return self._reserve(tenant, chunks)
            except Refused as refused:
                if not isinstance(refused.failure, Overloaded):
                    raise
                if time.monotonic() > until_s or not self._loader.unsettled or not self._gives_way(claim):
                    raise
            await asyncio.sleep(LOOK_S)

    def _gives_way(self, to: _Claim) -> bool:
        """Whether a prefetch does, or did a moment ago."""
        others = (flight for flight in self._flights.values() if flight.claim is not to)
        leaving = any(not flight.leased and flight.claim.weight < FULL_WEIGHT for flight in others)
        return leaving or time.monotonic() - self._gave_way_s < GIVE_WAY_S

    def _reserve(self, tenant: str, chunks: Sequence[tuple[str, int]]) -> Reservation:
        # A version that no lease can hold is refused before anything is evicted for it.
        if (least := self._arena.index.slabs_needed(chunks)) > MAX_SLABS:
            raise Refused(CapacityExceeded("slabs of a lease", least, MAX_SLABS))
        reservation = self._arena.reserve(tenant, chunks, time.monotonic())
        if len(reservation.slabs) > MAX_SLABS:  # it is scattered
            self._arena.withdraw(reservation)
            raise Refused(CapacityExceeded("slabs of a lease", len(reservation.slabs), MAX_SLABS))
        return reservation

    def forget(self, slab: int) -> None:
        """Make versions with chunks in the slab non-resident: the slab, or a chunk in it, is gone."""
        for key in [key for key, resident in self._hot.items() if slab in resident.slabs]:
            del self._hot[key]
            self._owed.pop(key, None)


async def _within(flight: _Flight, timeout_s: float, early: Early | None) -> Arrival:
    began = time.monotonic()
    try:
        async with asyncio.timeout(timeout_s) as limit:
            if early is not None:
                await _beside(early(flight.filling), flight.task)
            outcome = await asyncio.shield(flight.task)
    except TimeoutError as error:
        if not limit.expired():  # it is what `early` raised
            raise
        raise Refused(DeadlineExceeded(time.monotonic() - began, "restoring weights")) from error
    if isinstance(outcome, Failure):
        raise Refused(outcome)
    return outcome


async def _beside(work: Awaitable[None], flight: asyncio.Task[Arrival | Failure]) -> None:
    """Until the work or the flight is over; the work is gone then. Raises what the work raises."""
    working = asyncio.ensure_future(work)
    try:
        await asyncio.wait((working, flight), return_when=asyncio.FIRST_COMPLETED)
    finally:
        await end_all((working,))
    if not working.cancelled():
        working.result()
