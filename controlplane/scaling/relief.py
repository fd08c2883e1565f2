"""Puts another replica in the place of one that serves, so that the decider sees one replica all the time.

Beside it where a device slot is free: the old one serves until the new one does, and is drained then. Else after it:
it is drained first, the start waits for its slot, and callers wait in their queues. Which replica goes, and when, is
`renewal`'s to say.
"""

import logging
from typing import Final, Protocol

from contracts.errors import Failure, Unavailable
from controlplane.facts import VersionKey
from controlplane.policy.replica_life import ReplicaEvent, ReplicaState
from controlplane.replicas import Start
from controlplane.scaling.drain import TERM_S
from controlplane.scaling.fleet import Fleet
from controlplane.scaling.process import Process
from service.born import KILL_S

log = logging.getLogger(__name__)

LAST_S: Final = TERM_S + KILL_S + 10.0  # from the end of a drain to the death, at the very most


class Host(Protocol):
    """Who starts and drains."""

    def begin(self, start: Start) -> None:
        """It has its slot."""

    def drain(self, process: Process) -> None:
        """It finishes what it has."""

    def fail(self, key: VersionKey, failure: Failure) -> None:
        """A start came to nothing."""


class Relief:
    """Replaces replicas one at a time. Use it from one event loop."""

    def __init__(self, fleet: Fleet, host: Host, drain_s: float) -> None:
        self._fleet = fleet
        self._table = fleet.table
        self._host = host
        self._drain_s = drain_s

    def __repr__(self) -> str:
        return f"<Relief under_way={self._table.count(ReplicaState.RELIEVED)}>"

    def relieve(self, runtime_id: str, *, beside: bool) -> None:
        """Begin it. Raises NoSlot where another one is to come beside it and can't, IllegalMove where it is not ready;
        then nothing has changed.
        """
        replica, now_us = self._table[runtime_id], self._fleet.clock.monotonic_us()
        assert replica.key is not None
        how = "beside it" if beside else "after it"
        log.info("a replica is relieved", extra={"runtime_id": runtime_id, "version": str(replica.key), "how": how})
        if beside:
            start = self._table.begin(replica.key, now_us)
            try:
                self._table.move(runtime_id, ReplicaEvent.RELIEVE, now_us)
            except BaseException:
                self._table.abandon(start)
                raise
            self._host.begin(start)
            return
        process = self._fleet[runtime_id]
        self._host.drain(process)
        start = self._table.begin(replica.key, now_us, after=runtime_id)
        self._fleet.tasks.start(self._follow(process, start), f"follow {runtime_id}")

    def let_go(self, key: VersionKey, wanted: int) -> None:
        """Drain relieved replicas of the version that are over `wanted`, the oldest first: others have their places, or
        nobody wants them filled.
        """
        relieved = self._table.relieved(key)
        surplus = self._table.ready(key) - max(0, wanted)
        for replica in relieved[: max(0, surplus)]:
            self._host.drain(self._fleet[replica.runtime_id])

    def keep(self, key: VersionKey) -> None:
        """Those for whom nobody is on the way any more serve on, the youngest first: they count again."""
        relieved = self._table.relieved(key)
        for replica in relieved[self._table.coming(key) :]:
            self._table.move(replica.runtime_id, ReplicaEvent.KEPT, self._fleet.clock.monotonic_us())
            log.warning("a replica stays: none took its place", extra={"runtime_id": replica.runtime_id})

    def is_forsaken(self, key: VersionKey) -> bool:
        """Whether a relieved replica has nobody on the way."""
        return len(self._table.relieved(key)) > self._table.coming(key)

    async def _follow(self, process: Process, start: Start) -> None:
        is_gone = await process.gone(self._drain_s + LAST_S)
        if not self._table.is_pending(start):
            return
        if is_gone:
            self._host.begin(start)
        else:
            self._table.abandon(start)
            self._host.fail(start.key, Unavailable("the device slot of the replica before"))
