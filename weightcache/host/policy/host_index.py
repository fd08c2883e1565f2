"""The index of the host tier: where each chunk is, which slabs are in use, and what a new version evicts. Pure.

A chunk is *loading* once its place is reserved, and *ready* once its bytes are there and verified. A slab is freed
whole, and only if nothing pins it (a reservation, a load, a write to NVMe) and no living process holds it. A process
that received the slab may have it mapped even after its lease, until it dies or the kernel reports otherwise.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from kelvin.contracts.artifact_errors import ChunkCorrupt
from kelvin.contracts.errors import CapacityExceeded, Refused
from kelvin.contracts.traffic_errors import Overloaded
from weightcache.host.policy.eviction import Candidate, TenantShares, choose_victims
from weightcache.host.policy.extents import (
    FreeTail,
    SlabRange,
    WantedChunk,
    count_new_slabs,
    distinct_chunks,
    place_chunks,
)

RETRY_S: Final = 1.0
HALF_LIFE_S: Final = 600.0  # half-life of an idle slab's value

ReloadEstimator = Callable[[str, Iterable[tuple[str, int]]], float]  # seconds to reload a tenant's (digest, length)


@dataclass(frozen=True, slots=True)
class Reservation:
    """Places for all chunks of a version. Its slabs stay pinned until `Arena.unpin(reservation.slabs)`."""

    tenant: str
    places: dict[str, SlabRange]  # by digest
    to_load: tuple[str, ...]  # digests that the owner of this reservation must load
    to_await: tuple[str, ...]  # digests that another load will bring
    new_slabs: tuple[int, ...]  # new, empty slabs of this reservation
    evicted_slabs: tuple[int, ...]  # slabs that were evicted for it

    @property
    def ready(self) -> tuple[str, ...]:
        """Return the digests that were ready when the reservation was made."""
        coming = {*self.to_load, *self.to_await}
        return tuple(digest for digest in self.places if digest not in coming)

    @property
    def slabs(self) -> tuple[int, ...]:
        """Return the slabs in the order in which the version first needs them."""
        return tuple(dict.fromkeys(place.slab for place in self.places.values()))


@dataclass(slots=True)
class _Slab:
    tenant: str
    used_at: float
    used_bytes: int = 0
    pins: int = 0
    chunks: set[str] = field(default_factory=set)
    holders: set[int] = field(default_factory=set)

    @property
    def is_busy(self) -> bool:
        return self.pins > 0 or bool(self.holders)


@dataclass(slots=True)
class _ChunkEntry:
    place: SlabRange
    is_ready: bool = False


class HostIndex:
    """An index of at most `max_slabs` slabs of `slab_bytes`, each with chunks of one tenant. Slab numbers are never
    reused. `quota` limits the slabs of one version always, and those of one tenant while others need some; None: no
    limit.
    """

    def __init__(
        self,
        slab_bytes: int,
        max_slabs: int,
        quota: int | None = None,
        reload_s: ReloadEstimator = lambda _tenant, _chunks: 1.0,
    ) -> None:
        self.slab_bytes = slab_bytes
        self.max_slabs = max_slabs
        self.quota = max_slabs if quota is None else min(quota, max_slabs)
        self._reload_s = reload_s
        self._slabs: dict[int, _Slab] = {}
        self._chunks: dict[tuple[str, str], _ChunkEntry] = {}
        self._next = 0

    def __repr__(self) -> str:
        busy = sum(slab.is_busy for slab in self._slabs.values())
        return f"<HostIndex slabs={len(self._slabs)}/{self.max_slabs} busy={busy} chunks={len(self._chunks)}>"

    @property
    def slab_count(self) -> int:
        """Return the number of slabs that hold a tenant's chunks."""
        return len(self._slabs)

    @property
    def busy_count(self) -> int:
        """Return the number of slabs that can't be evicted now."""
        return sum(slab.is_busy for slab in self._slabs.values())

    @property
    def ready_totals(self) -> tuple[int, int]:
        """Return the number of ready chunks, and their bytes."""
        lengths = [entry.place.length for entry in self._chunks.values() if entry.is_ready]
        return len(lengths), sum(lengths)

    @property
    def slabs_by_tenant(self) -> Counter[str]:
        """Return the number of slabs by tenant."""
        return Counter(slab.tenant for slab in self._slabs.values())

    def reserve(self, tenant: str, chunks: Sequence[tuple[str, int]], now: float) -> Reservation:
        """Reserve places for all of (digest, length), or change nothing. Chunks that are present stay in place if that
        fits.

        Raises `Refused`: `CapacityExceeded` if they exceed the tier or the tenant's quota, even if the tier is empty;
        `Overloaded` if too much is in use; `ChunkCorrupt` if a digest is here with another length.
        """
        wanted = distinct_chunks(chunks)
        slabs_alone = self._count_slabs_alone(wanted)
        if slabs_alone > self.max_slabs:
            raise Refused(CapacityExceeded("slabs of the weight cache", slabs_alone, self.max_slabs))
        if slabs_alone > self.quota:
            name = "slabs of the weight cache that one tenant may have (KELVIN_HOST_QUOTA)"
            raise Refused(CapacityExceeded(name, slabs_alone, self.quota))
        plan = self._plan(tenant, wanted, keep_idle=True) or self._plan(tenant, wanted, keep_idle=False)
        if plan is None and self.slabs_by_tenant[tenant] + slabs_alone > self.quota < self.max_slabs:
            raise Refused(Overloaded("this tenant's share of the weight cache", self.quota, RETRY_S, "slabs"))
        if plan is None:
            raise Refused(Overloaded("the host tier of the weight cache", self.max_slabs, RETRY_S, "slabs"))
        return self._apply(tenant, wanted, *plan, now)

    def count_slabs_needed(self, chunks: Sequence[tuple[str, int]]) -> int:
        """Return how many slabs these (digest, length) need in an empty tier. Raises `Refused(CapacityExceeded)` if a
        chunk is longer than a slab.
        """
        return self._count_slabs_alone(distinct_chunks(chunks))

    def mark_ready(self, tenant: str, digest: str) -> None:
        """Record that the chunk's bytes are in place and verified."""
        entry = self._chunks[tenant, digest]
        assert not entry.is_ready
        entry.is_ready = True

    def drop(self, tenant: str, digest: str) -> None:
        """Forget a chunk whose load failed. Its place stays unused until the slab ends."""
        entry = self._chunks[tenant, digest]
        assert not entry.is_ready
        del self._chunks[tenant, digest]
        self._slabs[entry.place.slab].chunks.discard(digest)

    def drop_damaged(self, tenant: str, digest: str) -> None:
        """Forget a ready chunk that was found damaged. Its place stays unused until the slab ends. The slab must be
        pinned. Processes with a mapping still see the damaged bytes.
        """
        entry = self._chunks[tenant, digest]
        assert entry.is_ready
        assert self._slabs[entry.place.slab].pins
        del self._chunks[tenant, digest]
        self._slabs[entry.place.slab].chunks.discard(digest)

    def is_current(self, reservation: Reservation) -> bool:
        """Return whether all chunks of the reservation are ready at their reserved places."""
        return all(self.try_place(reservation.tenant, digest) == place for digest, place in reservation.places.items())

    def ready_chunks(self) -> tuple[tuple[tuple[str, str], int], ...]:
        """Return ((tenant, digest), length) of each ready chunk."""
        return tuple((key, entry.place.length) for key, entry in self._chunks.items() if entry.is_ready)

    def has_slab(self, slab: int) -> bool:
        """Return whether the slab still exists."""
        return slab in self._slabs

    def slabs_of_holder(self, holder: int) -> tuple[int, ...]:
        """Return the slabs that the process may have mapped."""
        return tuple(number for number, slab in self._slabs.items() if holder in slab.holders)

    def is_ready(self, tenant: str, digest: str) -> bool:
        """Return whether the chunk may be served."""
        entry = self._chunks.get((tenant, digest))
        return entry is not None and entry.is_ready

    def is_loading(self, tenant: str, digest: str) -> bool:
        """Return whether the chunk is being loaded."""
        entry = self._chunks.get((tenant, digest))
        return entry is not None and not entry.is_ready

    def try_place(self, tenant: str, digest: str) -> SlabRange | None:
        """Return the place of the chunk, if it is ready."""
        entry = self._chunks.get((tenant, digest))
        return entry.place if entry is not None and entry.is_ready else None

    def touch(self, slabs: Iterable[int], now: float) -> None:
        """Record a use of these slabs."""
        for number in slabs:
            self._slabs[number].used_at = max(self._slabs[number].used_at, now)

    def pin(self, slabs: Iterable[int]) -> None:
        """Keep these slabs. Each pin is undone by one `unpin`."""
        for number in slabs:
            self._slabs[number].pins += 1

    def unpin(self, slabs: Iterable[int]) -> tuple[int, ...]:
        """Undo one `pin` of each slab. Return the slabs that ended because they are empty."""
        numbers = tuple(slabs)
        for number in numbers:
            assert self._slabs[number].pins > 0
            self._slabs[number].pins -= 1
        return self._end_empty(numbers)

    def add_holder(self, holder: int, slabs: Iterable[int], now: float) -> None:
        """Record that the process `holder` received these slabs: they stay until `drop_holder`."""
        for number in slabs:
            self._slabs[number].holders.add(holder)
            self._slabs[number].used_at = now

    def drop_holder(self, holder: int) -> tuple[int, ...]:
        """Remove a process that is dead or maps none of its slabs. Return the slabs that ended: they are empty."""
        held = self.slabs_of_holder(holder)
        for number in held:
            self._slabs[number].holders.discard(holder)
        return self._end_empty(held)

    def evict(self, tenant: str | None, digests: frozenset[str] | None) -> tuple[tuple[int, ...], int]:
        """End idle slabs that hold any of these chunks (None: any). Return them, and how many slabs were busy."""
        matching = [
            number
            for number, slab in self._slabs.items()
            if tenant in (None, slab.tenant) and (digests is None or not digests.isdisjoint(slab.chunks))
        ]
        ended = tuple(number for number in matching if not self._slabs[number].is_busy)
        for number in ended:
            self._end(number)
        return ended, len(matching) - len(ended)

    def check_integrity(self) -> None:
        """Raise AssertionError if two facts contradict each other."""
        assert len(self._slabs) <= self.max_slabs
        digests_by_slab: dict[int, set[str]] = {number: set() for number in self._slabs}
        for (tenant, digest), entry in self._chunks.items():
            slab = self._slabs[entry.place.slab]
            assert slab.tenant == tenant, "a slab holds one tenant's chunks"
            assert entry.is_ready or slab.pins, "a load pins its slab"
            digests_by_slab[entry.place.slab].add(digest)
        for number, slab in self._slabs.items():
            assert number < self._next
            assert slab.pins >= 0
            assert slab.chunks == digests_by_slab[number]
            assert slab.chunks or slab.is_busy, "an idle slab holds something"
            end = 0
            for place in sorted((self._chunks[slab.tenant, d].place for d in slab.chunks), key=lambda p: p.offset):
                assert place.offset >= end, "places do not overlap"
                end = place.end
            assert end <= slab.used_bytes <= self.slab_bytes

    def _count_slabs_alone(self, wanted: Sequence[WantedChunk]) -> int:
        """Return how many slabs these chunks need if none of them is present. Raises `Refused(CapacityExceeded)`."""
        longest = max((chunk.length for chunk in wanted), default=0)
        if longest > self.slab_bytes:
            raise Refused(
                CapacityExceeded("bytes of a slab of the weight cache (KELVIN_SLAB_BYTES)", longest, self.slab_bytes)
            )
        return count_new_slabs(wanted, (), self.slab_bytes)

    def _plan(
        self, tenant: str, wanted: Sequence[WantedChunk], *, keep_idle: bool
    ) -> tuple[dict[str, SlabRange], tuple[int, ...]] | None:
        """Return which chunks keep their places, and which slabs end; None if there is no room.

        Without `keep_idle`, chunks in idle slabs get new places. Scattered over many slabs, they could take the room
        that their own version needs.
        """
        present: dict[str, SlabRange] = {}
        ended: set[int] = set()
        for chunk in wanted:
            entry = self._chunks.get((tenant, chunk.digest))
            if entry is None:
                continue
            if entry.place.length != chunk.length:  # one digest with two lengths: the manifest is wrong
                raise Refused(ChunkCorrupt(chunk.digest, "host"))
            if keep_idle or self._slabs[entry.place.slab].is_busy:
                present[chunk.digest] = entry.place
            else:
                ended.add(entry.place.slab)
        missing = [chunk for chunk in wanted if chunk.digest not in present]
        kept_slabs = {place.slab for place in present.values()}
        while True:
            free_tails = self._free_tails(tenant, ended)
            free_count = self.max_slabs - len(self._slabs) + len(ended)
            new_count = count_new_slabs(missing, free_tails, self.slab_bytes)
            slabs_by_tenant = Counter(slab.tenant for number, slab in self._slabs.items() if number not in ended)
            slabs_by_tenant[tenant] += new_count
            if new_count <= free_count:
                return present, tuple(sorted(ended))
            idle = (
                Candidate(number, 1, slab.used_at, self._reload_of(slab), slab.tenant)
                for number, slab in self._slabs.items()
                if not slab.is_busy and number not in kept_slabs and number not in ended
            )
            shares = TenantShares(slabs_by_tenant, self.quota, tenant)
            victims = choose_victims(idle, new_count - free_count, HALF_LIFE_S, shares)
            if victims is None:
                return None
            ended |= set(victims)  # they may have had free tails, so count again

    def _reload_of(self, slab: _Slab) -> float:
        lengths = ((digest, self._chunks[slab.tenant, digest].place.length) for digest in slab.chunks)
        return self._reload_s(slab.tenant, lengths)

    def _free_tails(self, tenant: str, excluded_slabs: set[int]) -> list[FreeTail]:
        return [
            FreeTail(number, slab.used_bytes)
            for number, slab in self._slabs.items()
            if slab.tenant == tenant and number not in excluded_slabs
        ]

    def _apply(
        self,
        tenant: str,
        wanted: Sequence[WantedChunk],
        present: dict[str, SlabRange],
        ended: tuple[int, ...],
        used_at: float,
    ) -> Reservation:
        missing = [chunk for chunk in wanted if chunk.digest not in present]
        for number in ended:
            self._end(number)
        free_tails = self._free_tails(tenant, set())
        count = count_new_slabs(missing, free_tails, self.slab_bytes)
        new_slabs = tuple(range(self._next, self._next + count))
        self._next += count
        for number in new_slabs:
            self._slabs[number] = _Slab(tenant, used_at)
        new_places = place_chunks(missing, free_tails, new_slabs, self.slab_bytes)
        for digest, place in new_places.items():
            self._chunks[tenant, digest] = _ChunkEntry(place)
            slab = self._slabs[place.slab]
            slab.chunks.add(digest)
            slab.used_bytes = max(slab.used_bytes, place.end)
        all_places = {**present, **new_places}
        places = {chunk.digest: all_places[chunk.digest] for chunk in wanted}
        to_await = tuple(digest for digest in present if not self._chunks[tenant, digest].is_ready)
        reservation = Reservation(tenant, places, tuple(new_places), to_await, new_slabs, ended)
        for number in reservation.slabs:
            self._slabs[number].used_at = max(self._slabs[number].used_at, used_at)
        self.pin(reservation.slabs)
        return reservation

    def _end_empty(self, numbers: Iterable[int]) -> tuple[int, ...]:
        """End the slabs that hold no chunk and are not in use."""
        empty = tuple(n for n in numbers if not self._slabs[n].chunks and not self._slabs[n].is_busy)
        for number in empty:
            self._end(number)
        return empty

    def _end(self, number: int) -> None:
        slab = self._slabs.pop(number)
        for digest in slab.chunks:
            del self._chunks[slab.tenant, digest]
