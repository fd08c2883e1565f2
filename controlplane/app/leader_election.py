"""Elect one of several control planes as the leader: the holder of a Lease. `leadership_policy.py` decides.

A leader that loses the Lease has stopped before another can take it, if stopping takes less than `lease_s` minus
`hold_s`. It may become a candidate again. A leader that ends releases the Lease, so that the next one leads at once.
"""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from typing import Final, Protocol

from controlplane import dependencies
from controlplane.app.leadership_policy import (
    AwaitHolder,
    LeaseDurations,
    ObservedLease,
    acquired_spec,
    decide,
    leads_until,
    losses_after,
    observe,
    pause_s,
    read,
    released_spec,
)
from controlplane.clock import Clock
from controlplane.knative.apply.cluster import ApiFailure, ClusterError, Json, Ref, WriteConflict, timestamp
from controlplane.tasks import cancel_and_wait
from kelvin.process.loops import PROCESS_HEALTH

LEASE: Final = ("coordination.k8s.io/v1", "Lease")
_US: Final = 1_000_000
_LOG = logging.getLogger("kelvin.cluster")


class LeaseStore(Protocol):
    """Store of Leases. Each call ends within `dependencies.LEASE` and is safe to cancel."""

    async def read(self, ref: Ref) -> Json | None:
        """Return the Lease, or None if there is none. Raises ClusterError."""
        ...

    async def create(self, obj: Json) -> Json:
        """Create the Lease. Raises ClusterError, with WriteConflict if it exists."""
        ...

    async def replace(self, obj: Json) -> Json:
        """Replace the resource version that `obj` names. Raises ClusterError, with WriteConflict for an old one."""
        ...


class LeaderElection:
    """One candidate. `identity` is a name that no other process ever has."""

    def __init__(
        self,
        leases: LeaseStore,
        namespace: str,
        name: str,
        identity: str,
        clock: Clock,
        *,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._leases, self._identity, self._clock, self._jitter = leases, identity, clock, jitter
        self._ref = Ref(*LEASE, namespace, name)
        self._durations = LeaseDurations()
        self._observed: ObservedLease | None = None
        self._leads_until_s = 0.0  # we lead until then, or longer after a renewal
        self._losses = 0  # in quick succession
        self.api_failure: ApiFailure | None = None  # of the last call

    def __repr__(self) -> str:
        return f"<LeaderElection {self._ref.name} me={self._identity} holder={self.holder!r} leading={self.leading}>"

    @property
    def leading(self) -> bool:
        """Whether we lead, so that no other candidate can lead at this moment."""
        return self._now() < self._leads_until_s

    @property
    def holder(self) -> str | None:
        """The leader as far as we know. None before the first read, empty if the Lease is free."""
        return None if self._observed is None else self._observed.record.holder

    async def win(self) -> None:
        """Return once this candidate leads. After quick losses in a row it waits longer each time."""
        if self._losses:
            await self._clock.sleep(pause_s(self._losses, self._durations, self._jitter()))
        waiting = await self._try_acquire()
        while not self.leading:
            # Spread the candidates' calls. Try soon after the holder's time is over.
            wait_s = self._durations.retry_s * (1 + self._jitter() / 5)
            if waiting is not None:
                wait_s = min(wait_s, max(0.0, waiting.until - self._now()) + 0.2 * self._jitter() + 0.001)
            await self._clock.sleep(wait_s)
            waiting = await self._try_acquire()
        _LOG.info("%s is the leader", self._identity)

    async def lead(self, work: Callable[[], Awaitable[None]]) -> bool:
        """Run `work()` to its end while renewing the Lease, then release it and return True. If the lead is lost,
        cancel `work()` and return False. Raises what `work` raises, and any defect in renewing the Lease.
        """
        begun = self._now()
        keeping = asyncio.create_task(self._renew_until_lost(), name="keep the lease")
        try:
            is_ours = await _run_while_leading(work, keeping)
        finally:
            await cancel_and_wait(keeping)
            await self._release()
            if not keeping.cancelled() and (defect := keeping.exception()) is not None:
                raise defect
        if not is_ours:
            self._losses = losses_after(self._losses, self._now() - begun)
            _LOG.warning("%s lost the lead: %s", self._identity, self.api_failure or f"{self.holder} leads")
        return is_ours

    async def _renew_until_lost(self) -> None:
        while True:
            # Sleep at least a millisecond. Clocks round, so a sleep to the exact end could return early for ever.
            await self._clock.sleep(min(self._durations.retry_s, max(0.001, self._leads_until_s - self._now())))
            if not self.leading:
                return
            timer = asyncio.create_task(self._clock.sleep(self._leads_until_s - self._now()))
            renewal = asyncio.create_task(self._try_acquire())
            try:
                await asyncio.wait((timer, renewal), return_when=asyncio.FIRST_COMPLETED)
            finally:
                await cancel_and_wait(timer, renewal)
            if not renewal.cancelled() and renewal.result() is not None:
                _LOG.warning("%s holds the lease", self.holder)
                self._leads_until_s = 0.0
                return

    async def _try_acquire(self) -> AwaitHolder | None:
        """Read the Lease. Take or renew it if allowed, which moves `_leads_until_s`; else return AwaitHolder."""
        begun = self._now()
        try:
            found = await self._leases.read(self._ref)
            self._observed = observe(
                self._observed, None if found is None else read(found, self._durations), self._now()
            )
            step = decide(self._observed, self._identity, self._now())
            if isinstance(step, AwaitHolder):
                return step
            answer = await self._write(found)
        except ClusterError as error:
            if self.api_failure is None and not isinstance(error.api_failure, WriteConflict):
                _LOG.warning("the lease can't be taken or renewed: %s", error)
            self.api_failure = error.api_failure
            return None
        except Exception:  # a defect, or a malformed Lease: the lead expires unless a later call renews it
            PROCESS_HEALTH.errors["lease"] += 1
            _LOG.exception("the lease could not be read")
            return None
        self.api_failure = None
        self._observed = observe(self._observed, read(answer, self._durations), self._now())
        self._leads_until_s = leads_until(begun, self._durations)
        return None

    async def _write(self, found: Json | None) -> Json:
        now = self._timestamp()
        if found is None:
            head = {"name": self._ref.name, "namespace": self._ref.namespace}
            spec = acquired_spec(None, self._identity, now, self._durations)
            return await self._leases.create({"apiVersion": LEASE[0], "kind": LEASE[1], "metadata": head, "spec": spec})
        return await self._leases.replace(
            {**found, "spec": acquired_spec(found.get("spec"), self._identity, now, self._durations)}
        )

    async def _release(self) -> None:
        """Release the Lease if it is still ours. If that fails, the other candidates wait for its duration."""
        self._leads_until_s = 0.0
        try:
            async with asyncio.timeout(dependencies.LEASE.timeout_s):
                found = await self._leases.read(self._ref)
                if found is not None and read(found, self._durations).holder == self._identity:
                    await self._leases.replace({**found, "spec": released_spec(found["spec"], self._timestamp())})
        except (ClusterError, TimeoutError) as error:
            _LOG.info("the lease could not be released: %s", error)
        except Exception:
            PROCESS_HEALTH.errors["lease"] += 1
            _LOG.exception("the lease could not be released")

    def _now(self) -> float:
        return self._clock.monotonic_us() / _US

    def _timestamp(self) -> str:
        """Return the wall clock time in the cluster's format. Its microseconds come from the clock that does not step,
        so that each renewal changes the Lease even if the wall clock stands still.
        """
        return timestamp(self._clock.wall_s()).replace("Z", f".{self._clock.monotonic_us() % _US:06d}Z")


async def _run_while_leading(work: Callable[[], Awaitable[None]], keeping: asyncio.Task[None]) -> bool:
    """Run `work` to its end and return True. If `keeping` ends first, cancel `work` and return False."""
    try:
        async with asyncio.timeout(None) as leading:  # it can tell its own cancellation from any other

            def cancel_work(_: object) -> None:
                leading.reschedule(0.0)

            keeping.add_done_callback(cancel_work)
            try:
                await work()  # not as a task of its own: each cancellation of the caller has to reach it
            finally:
                keeping.remove_done_callback(cancel_work)
    except TimeoutError:
        if not leading.expired():
            raise
    return not leading.expired()
