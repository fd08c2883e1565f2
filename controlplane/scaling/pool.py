"""The pool of parked standbys: hands them out, and has new ones borne off the path of requests.

Starts are served before jobs, each in order of asking. How many to fork is `policy/pool`'s to say.
"""

import asyncio
import logging
from collections import deque
from typing import Final

from contracts.errors import Refused, Unavailable
from controlplane.policy.pool import PoolFacts, backoff_s, to_fork
from controlplane.policy.replica_life import ReplicaState
from controlplane.replicas import Replica
from controlplane.scaling.fleet import Fleet
from controlplane.scaling.process import Process
from controlplane.scaling.zygote import PEER

log = logging.getLogger(__name__)

FORGIVE_US: Final = 10_000_000  # after so long without a loss, births are trusted again


class StandbyPool:
    """Keeps `size` standbys parked. A process that was handed out comes back only through `put_back`, unused."""

    def __init__(self, fleet: Fleet, size: int) -> None:
        self.size = size
        self._fleet = fleet
        self._parked: deque[Process] = deque()
        self._starts: deque[asyncio.Future[Process]] = deque()
        self._jobs: deque[asyncio.Future[Process]] = deque()
        self._forked = 0
        self._failures = 0
        self._failed_us = -FORGIVE_US
        fleet.on_lost(self._lost)

    def __repr__(self) -> str:
        waiting = len(self._starts) + len(self._jobs)
        return f"<StandbyPool parked={len(self._parked)}/{self.size} forked={self._forked} waiting={waiting}>"

    @property
    def parked(self) -> int:
        """Standbys that can be taken now."""
        return len(self._parked)

    def try_take(self) -> Process | None:
        """A parked standby at once, or None. The refill is the caller's to ask for: `balance`."""
        return self._parked.popleft() if self._parked else None

    async def take(self, timeout_s: float, *, for_job: bool = False) -> Process:
        """A parked standby, waiting for one to be borne. Raises Refused(Unavailable) after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                while (process := await self._next(for_job)).is_leaving:
                    pass  # it died on its way to us
                return process
        except TimeoutError:
            raise Refused(Unavailable(PEER)) from None

    async def _next(self, for_job: bool) -> Process:
        if (process := self.try_take()) is not None:
            self.balance()
            return process
        place: asyncio.Future[Process] = asyncio.get_running_loop().create_future()
        queue = self._jobs if for_job else self._starts
        queue.append(place)
        self.balance()
        try:
            return await place
        except asyncio.CancelledError:
            if place in queue:
                queue.remove(place)
            elif not place.cancelled():
                self.put_back(place.result())  # it came in the moment in which we gave up
            raise

    def put_back(self, process: Process) -> None:
        """A standby that is parked: a new one, an adopted one, or one that was taken and not used."""
        if process.is_leaving:
            return
        for queue in (self._starts, self._jobs):
            while queue:
                place = queue.popleft()
                if not place.done():
                    place.set_result(process)
                    return
        self._parked.append(process)
        while len(self._parked) > self.size:
            self._fleet.end(self._parked.pop())

    def balance(self) -> None:
        """Begin as many births as are due."""
        table = self._fleet.table
        facts = PoolFacts(
            size=self.size,
            parked=len(self._parked),
            forked=self._forked,
            waiting=len(self._starts) + len(self._jobs),
            restoring=table.count(ReplicaState.RESTORING),
        )
        for _ in range(to_fork(facts)):
            self._forked += 1
            self._fleet.tasks.start(self._bear(), "bear a standby", for_nobody=True)

    def check_integrity(self) -> None:
        """Assert that what is parked is parked, and that nobody waits beside a free standby."""
        table = self._fleet.table
        assert all(table[process.runtime_id].state is ReplicaState.STANDBY for process in self._parked)
        assert not (self._parked and (self._starts or self._jobs)), "a caller waits beside a parked standby"
        assert self._forked >= 0

    async def _bear(self) -> None:
        try:
            await self._fleet.clock.sleep(backoff_s(self._failures))
            process = await self._fleet.bear()
        except Refused as refused:
            self._failed()
            if self._failures & (self._failures - 1) == 0:  # the 1st, 2nd, 4th, 8th, ...
                log.warning("no standby was borne", extra={"why": refused.failure.message, "failures": self._failures})
        else:
            if self._now() - self._failed_us > FORGIVE_US:
                self._failures = 0
            self.put_back(process)
        finally:
            self._forked -= 1
        self.balance()

    def _lost(self, replica: Replica) -> None:
        mine = next((each for each in self._parked if each.runtime_id == replica.runtime_id), None)
        if mine is not None:
            self._parked.remove(mine)
            self._failed()  # one that dies unused counts as a birth that came to nothing
        self.balance()

    def _failed(self) -> None:
        self._failures += 1
        self._failed_us = self._now()

    def _now(self) -> int:
        return self._fleet.clock.monotonic_us()
