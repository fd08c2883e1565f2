"""Load chunks into the host tier, verified in place. Each is loaded once for all loads that wait for it
(single-flight).

A chunk becomes ready only after its bytes, in their final place, matched its digest. If no source has such bytes, every
waiting load is refused. `read_scheduler.py` decides when each chunk is read.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial

from kelvin.blobstore.bounded_gather import cancel_and_wait
from kelvin.contracts.errors import Failure, Internal, Refused
from kelvin.contracts.traffic_errors import Cancelled
from weightcache.fetch.fetcher import Fetcher
from weightcache.fetch.nvme_admission import NvmeAdmission
from weightcache.host.arena import Arena
from weightcache.host.policy.extents import SlabRange
from weightcache.host.policy.host_index import Reservation
from weightcache.sources.policy.fair_read_queue import FULL_WEIGHT, Flow, positions_by_chunk

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _ChunkLoad:
    """One running load of a chunk. Its outcome is the chunk's tier, or a failure."""

    place: SlabRange
    outcome: asyncio.Future[str | Failure] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class ChunkLoader:
    """Loads chunks. A read that has begun runs to its end, even without waiting loads, because its memory is in use."""

    def __init__(self, arena: Arena, fetcher: Fetcher, admissions: NvmeAdmission) -> None:
        self._arena = arena
        self._fetcher = fetcher
        self._scheduler = fetcher.scheduler
        self._admissions = admissions
        self._loads: dict[tuple[str, str], _ChunkLoad] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def loading_count(self) -> int:
        """Return the number of chunks that are being loaded."""
        return len(self._loads)

    @property
    def busy_count(self) -> int:
        """Return the number of chunks whose slabs are in use: loading, or waiting to be written to NVMe."""
        return len(self._loads) + self._admissions.waiting_count

    async def load(
        self,
        reservation: Reservation,
        flow: Flow | None = None,
        weight: float = FULL_WEIGHT,
        on_ready: Callable[[str], None] = lambda _: None,
    ) -> dict[str, str]:
        """Load all chunks of the reservation and return their tiers. Raises `Refused` of the first failed chunk, in the
        order of `reservation.to_load` and `to_await`, once the chunks before it have ended.

        After a failure or a cancellation, chunks that are still queued are given up unless other loads wait for them.
        The call gets `weight` shares of each source. `flow` names this call for `set_weight`. `on_ready` is called for
        each chunk that becomes ready, until this returns or raises.
        """
        tenant = reservation.tenant
        for digest in reservation.to_load:
            self._start(tenant, digest, reservation.places[digest])
        loads = {digest: self._loads[tenant, digest] for digest in (*reservation.to_load, *reservation.to_await)}
        flow = object() if flow is None else flow
        positions = positions_by_chunk(reservation.places, tenant)
        self._scheduler.enter(flow, {key: positions[key] for key in positions if key[1] in loads}, weight)
        tiers = dict.fromkeys(reservation.places, "host")
        callbacks = {digest: partial(_note_outcome, on_ready, digest) for digest in loads}
        for digest, load in loads.items():
            load.outcome.add_done_callback(callbacks[digest])
        try:
            for digest, load in loads.items():
                outcome = await asyncio.shield(load.outcome)
                if isinstance(outcome, Failure):
                    raise Refused(outcome)
                tiers[digest] = outcome
        finally:
            self._scheduler.leave(flow)
            for digest, load in loads.items():
                load.outcome.remove_done_callback(callbacks[digest])
        return tiers

    def set_weight(self, flow: Flow, weight: float) -> None:
        """Change the weight of a flow."""
        self._scheduler.set_weight(flow, weight)

    async def wait_until_idle(self) -> None:
        """Wait until nothing is loading and all loaded chunks are admitted. See `NvmeAdmission.wait_until_idle`."""
        while self._tasks:
            await asyncio.wait(self._tasks)
        await self._admissions.wait_until_idle()

    async def close(self) -> None:
        """Cancel all loads. On return nothing writes to the arena any more."""
        await cancel_and_wait(tuple(self._tasks))
        await self._admissions.close()

    def _start(self, tenant: str, digest: str, place: SlabRange) -> None:
        self._loads[tenant, digest] = _ChunkLoad(place)
        self._arena.index.pin((place.slab,))
        self._start_task(self._load(tenant, digest))

    def _start_task(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _load(self, tenant: str, digest: str) -> None:
        """Run one load from start to end. On any exit, the index, the pin and the waiters are settled."""
        load = self._loads[tenant, digest]
        outcome: str | Failure = Cancelled()
        try:
            outcome = await self._fetcher.fetch(tenant, digest, await self._arena.view(load.place))
        except Refused as refused:
            outcome = refused.failure
        except Exception:
            log.exception("a load failed", extra={"chunk": digest})
            outcome = Internal()
        finally:
            del self._loads[tenant, digest]
            self._arena.finish_load(tenant, digest, is_ready=not isinstance(outcome, Failure))
            if not isinstance(outcome, Failure) and outcome != "nvme":
                self._admissions.offer(tenant, digest, load.place)
            self._arena.unpin((load.place.slab,))
            load.outcome.set_result(outcome)


def _note_outcome(on_ready: Callable[[str], None], digest: str, outcome: "asyncio.Future[str | Failure]") -> None:
    if not isinstance(outcome.result(), Failure):
        on_ready(digest)
