"""The pool of parked standbys of one device class: hands them out, and forks new ones in their place.

Starts are served before jobs, each first come, first served. `scaling/policy/standby_sizing.py` decides how many there
should be, and how many are forked now.
"""

import asyncio
import logging
from collections import Counter, deque
from dataclasses import dataclass
from typing import Final, Literal

from controlplane.scaling.local.fleet import Fleet
from controlplane.scaling.local.footprints import Footprints
from controlplane.scaling.local.runtime_process import RuntimeProcess
from controlplane.scaling.policy.replica_lifecycle import LIVE, ReplicaState
from controlplane.scaling.policy.standby_demand import DemandEstimate, StandbyDemand
from controlplane.scaling.policy.standby_sizing import (
    PoolFacts,
    PoolLoad,
    PoolSizing,
    TargetSize,
    backoff_s,
    choose_fork_count,
    holds_cores,
    next_size,
    target_size,
)
from controlplane.scaling.replicas import Replica
from kelvin.contracts.backoff import should_log
from kelvin.contracts.errors import Failure, Refused, Unavailable
from kelvin.ipc.zygote_client import PEER

log = logging.getLogger(__name__)

FAILURE_RESET_US: Final = 10_000_000  # after this time without a failed fork, the back-off ends
BALANCE_INTERVAL_S: Final = 1.0
MEASURE_INTERVAL_S: Final = 15.0  # between measurements of standbys' memory

Purpose = Literal["start", "job"]


@dataclass(frozen=True, slots=True)
class PoolState:
    """The pool as an operator sees it. `kept_count` follows `size.wanted`, downwards with a delay. `counts` are takes
    by purpose and by `hit` (a standby was parked) or `miss`.
    """

    device: str
    size: TargetSize
    kept_count: int
    parked: int
    forked: int
    takes: DemandEstimate
    counts: dict[tuple[str, str], int]


class StandbyPool:
    """Keeps standbys parked. A process that was handed out may come back through `put_back`, unused."""

    def __init__(self, fleet: Fleet, sizing: PoolSizing, footprints: Footprints, cores: int) -> None:
        self.sizing = sizing
        self.footprints = footprints
        self._fleet = fleet
        self._cores = cores
        self._demand = StandbyDemand()
        self._size = target_size(sizing, self._load())
        self._kept = self._size.wanted
        self._surplus_since_us = self._now()  # last time when all kept standbys were wanted
        self._parked: deque[RuntimeProcess] = deque()
        self._starts: deque[asyncio.Future[RuntimeProcess]] = deque()
        self._jobs: deque[asyncio.Future[RuntimeProcess]] = deque()
        self._counts: Counter[tuple[str, str]] = Counter()
        self._forked = 0
        self._failures = 0
        self._failure: Failure | None = None  # of the last fork
        self._failed_us = -FAILURE_RESET_US
        fleet.add_exit_listener(self._handle_exit)

    def __repr__(self) -> str:
        waiting = len(self._starts) + len(self._jobs)
        return f"<StandbyPool parked={len(self._parked)}/{self._kept} forked={self._forked} waiting={waiting}>"

    @property
    def parked(self) -> int:
        """Return how many standbys can be taken now."""
        return len(self._parked)

    def state(self) -> PoolState:
        """Return the pool's sizes, takes and reasons."""
        return PoolState(
            device="cpu",
            size=self._size,
            kept_count=self._kept,
            parked=len(self._parked),
            forked=self._forked,
            takes=self._demand.estimate(self._now() / 1e6),
            counts=dict(self._counts),
        )

    def try_take(self, purpose: Purpose = "start") -> RuntimeProcess | None:
        """Return a parked standby, or None. The caller must call `balance` afterwards to have it replaced."""
        if not self._parked:
            return None
        self._record_take(purpose, "hit")
        return self._parked.popleft()

    async def take(self, timeout_s: float, purpose: Purpose = "start") -> RuntimeProcess:
        """Return a parked standby; wait for a fork if there is none. After `timeout_s` raises Refused: why the last
        fork failed, or Unavailable.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while (process := await self._take_or_wait(purpose)).is_leaving:
                    pass  # it died before it reached us
                return process
        except TimeoutError:
            raise Refused(self._failure or Unavailable(PEER)) from None

    async def _take_or_wait(self, purpose: Purpose) -> RuntimeProcess:
        if (process := self.try_take(purpose)) is not None:
            self.balance()
            return process
        self._record_take(purpose, "miss")
        waiter: asyncio.Future[RuntimeProcess] = asyncio.get_running_loop().create_future()
        queue = self._jobs if purpose == "job" else self._starts
        queue.append(waiter)
        self.balance()
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter in queue:
                queue.remove(waiter)
            elif not waiter.cancelled():
                self.put_back(waiter.result())  # it came just when we gave up
            raise

    def put_back(self, process: RuntimeProcess) -> None:
        """Park a standby that is new or was not used. A waiting caller gets it first."""
        if process.is_leaving:
            return
        for queue in (self._starts, self._jobs):
            while queue:
                waiter = queue.popleft()
                if not waiter.done():
                    waiter.set_result(process)
                    return
        self._parked.append(process)
        self._trim()

    def adopt(self, process: RuntimeProcess) -> None:
        """Park a standby of an earlier control plane. Surplus ones end slowly, because they may be needed."""
        if self.sizing.minimum and len(self._parked) >= self._kept < self.sizing.maximum:
            self._kept = len(self._parked) + 1
            self._surplus_since_us = self._now()
        self.put_back(process)

    def balance(self) -> None:
        """Decide how many standbys there should be, and start the forks that are due."""
        self._resize()
        waiting = len(self._starts) + len(self._jobs)
        if len(self._parked) >= self._kept and not waiting:
            self._demand.clear_outstanding()
        facts = PoolFacts(
            size=self._kept,
            parked=len(self._parked),
            forked=self._forked,
            waiting=waiting,
            starting=self._count_starting(),
            cores=self._cores,
        )
        for _ in range(choose_fork_count(facts)):
            self._forked += 1
            self._fleet.tasks.start(self._fork(), "fork a standby", detached=True)

    async def run(self) -> None:
        """Balance periodically, for changes without an event: forgotten takes, long starts, memory. Until cancelled."""
        measured_us = 0
        while True:
            await self._fleet.clock.sleep(BALANCE_INTERVAL_S)
            if self._now() - measured_us >= MEASURE_INTERVAL_S * 1e6:
                measured_us = self._now()
                await self.footprints.refresh()
            self.balance()

    def check_integrity(self) -> None:
        """Assert that parked processes are standbys, and that no caller waits while one is parked."""
        table = self._fleet.table
        assert all(table[process.runtime_id].state is ReplicaState.STANDBY for process in self._parked)
        assert not (self._parked and (self._starts or self._jobs)), "a caller waits beside a parked standby"
        assert self._forked >= 0
        self._demand.check_integrity()

    def _load(self) -> PoolLoad:
        running = sum(replica.state in LIVE for replica in self._fleet.table)
        return PoolLoad(self._demand.estimate(self._now() / 1e6), running, self.footprints.standby_bytes)

    def _resize(self) -> None:
        now_us = self._now()
        self._size = target_size(self.sizing, self._load())
        kept = next_size(self._kept, self._size.wanted, (now_us - self._surplus_since_us) / 1e6)
        if kept != self._kept or self._size.wanted >= kept:
            self._surplus_since_us = now_us
        if kept != self._kept:
            log.info("standbys", extra={"kept": kept, "wanted": self._size.wanted, "why": str(self._size.reason)})
            self._kept = kept
            self._trim()

    def _trim(self) -> None:
        while len(self._parked) > self._kept:
            self._fleet.end(self._parked.pop())  # the youngest: the oldest has warm caches

    def _count_starting(self) -> int:
        now_us = self._now()
        return sum(
            holds_cores((now_us - each.since_us) / 1e6, restoring=each.state is ReplicaState.RESTORING)
            for each in self._fleet.table
            if each.state in LIVE
        )

    def _record_take(self, purpose: Purpose, result: str) -> None:
        self._counts[purpose, result] += 1
        self._demand.record_take(self._now() / 1e6)

    async def _fork(self) -> None:
        try:
            await self._fleet.clock.sleep(backoff_s(self._failures))
            process = await self._fleet.fork_standby()
        except Refused as refused:
            self._failure = refused.failure
            self._record_failure()
            if should_log(self._failures):
                log.warning("no standby was forked", extra={"why": refused.failure.message, "failures": self._failures})
        else:
            self._failure = None
            if self._now() - self._failed_us > FAILURE_RESET_US:
                self._failures = 0
            self._demand.record_replacement(self._now() / 1e6)
            self.put_back(process)
        finally:
            self._forked -= 1
        self.balance()

    def _handle_exit(self, replica: Replica) -> None:
        standby = next((each for each in self._parked if each.runtime_id == replica.runtime_id), None)
        if standby is not None:
            self._parked.remove(standby)
            self._record_failure()  # one that dies unused counts as a failed fork
        self.balance()

    def _record_failure(self) -> None:
        self._failures += 1
        self._failed_us = self._now()

    def _now(self) -> int:
        return self._fleet.clock.monotonic_us()
