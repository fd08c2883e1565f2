"""Two look at one damaged chunk in memory. The slower one condemns the copy that is being brought anew: the lease that
waits for it hangs, and its slab stays pinned.
"""

from tests.simulation.undone import Undoing
from weightcache.examine import Damage, Examiner
from weightcache.policy.healing import Outcome

WORLD = "cache"
SIGN = r"KeyError\(.*policy/host\.py"


async def _in_memory(self: Examiner, tenant: str, digest: str) -> Outcome:
    index = self._arena.index
    place = index.try_place(tenant, digest)
    if place is None:
        return Outcome.ABSENT
    index.pin((place.slab,))
    try:
        if await self._verifier.is_right(await self._arena.view(place), digest):
            return Outcome.WHOLE
        self._counters.chunk_faults["host"][Outcome.DIGEST] += 1
        self._forget(place.slab)
        index.condemn(tenant, digest)
        self._wrong[Damage(tenant, digest, place)] = None
        return Outcome.DIGEST
    finally:
        self._arena.unpin((place.slab,))


def undo(undoing: Undoing) -> None:
    undoing.method(Examiner, "_in_memory", _in_memory)
