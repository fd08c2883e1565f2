"""Standbys of the fleet's for the jobs of a push: one that has computed for one tenant takes nothing of another, so it
ends with its job, whatever came of that. Starts come first.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from controlplane.feed import FeedHub
from controlplane.policy.replica_life import ReplicaEvent
from controlplane.scaling.fleet import Fleet
from controlplane.scaling.pool import StandbyPool
from controlplane.scaling.process import Process
from service.jobs import JobDesk

STANDBY_S: Final = 30.0
TERM_S: Final = 2.0


def job_desk(fleet: Fleet, pool: StandbyPool, feed: FeedHub) -> JobDesk:
    """Return a desk whose jobs run on standbys of this pool. Its calls raise Unavailable if no standby comes."""

    @asynccontextmanager
    async def standby() -> AsyncIterator[Process]:
        process = await pool.take(STANDBY_S, "job")
        try:
            fleet.table.move(process.runtime_id, ReplicaEvent.TOOK_JOB, fleet.clock.monotonic_us())
            pool.balance()
            yield process
        finally:
            fleet.end(process, TERM_S)

    return JobDesk(standby, feed.weight, feed.is_suspended)
