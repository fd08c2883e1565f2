"""Repairs of the weight cache."""

from tests.simulation.undone import Undoing, repair
from weightcache.host.arena import Arena
from weightcache.host.policy.host_index import Reservation
from weightcache.nvme.scrubber import ChunkExaminer, MemoryDamage
from weightcache.sources.policy.healing import ReadOutcome


@repair(r"^the_indexes_are_sound")
def refused_reservation_stays(undoing: Undoing) -> None:
    """A reservation that is refused after it took places leaves its chunks in the state loading for ever. Other
    versions with these chunks get internal errors.
    """

    def withdraw(self: Arena, reservation: Reservation) -> None:
        self.unpin(reservation.slabs)

    undoing.method(Arena, "withdraw", withdraw)


@repair(r"KeyError\(.*policy/host_index\.py")
def slow_look_condemns_the_new_copy(undoing: Undoing) -> None:
    """Two examinations read one damaged chunk in memory. The slower one condemns the new copy while it is loading: the
    lease that waits for it hangs, and its slab stays pinned.
    """

    async def in_memory(self: ChunkExaminer, tenant: str, digest: str) -> ReadOutcome:
        index = self._arena.index
        place = index.try_place(tenant, digest)
        if place is None:
            return ReadOutcome.ABSENT
        index.pin((place.slab,))
        try:
            if await self._verifier.matches_digest(await self._arena.view(place), digest):
                return ReadOutcome.WHOLE
            self._counters.chunk_faults["host"][ReadOutcome.DIGEST] += 1
            self._on_damage(place.slab)
            index.drop_damaged(tenant, digest)
            self._damaged[MemoryDamage(tenant, digest, place)] = None
            return ReadOutcome.DIGEST
        finally:
            self._arena.unpin((place.slab,))

    undoing.method(ChunkExaminer, "_examine_memory", in_memory)
