"""One of several control planes leads: who holds a Lease. When it is to be taken is `leadership_policy`'s word.

Who loses it has stopped before another can have it, if stopping takes less than the difference of `hold_s` and
`lease_s`, and may stand again; who stops gives it up, so that the next one begins at once.
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
from controlplane.knative.apply.cluster import ApiFailure, ClusterError, Conflict, Json, Ref, timestamp
from controlplane.tasks import cancel_and_wait
from kelvin.process.loops import PROCESS_HEALTH

LEASE: Final = ("coordination.k8s.io/v1", "Lease")
_US: Final = 1_000_000
_LOG = logging.getLogger("kelvin.cluster")


class LeaseStore(Protocol):
    """Where Leases are kept. Each call ends within `dependencies.LEASE`, and is safe to cancel."""

    async def read(self, ref: Ref) -> Json | None:
        """None where it is not there. Raises ClusterError."""
        ...

    async def create(self, obj: Json) -> Json:
        """Raises ClusterError: Conflict where it is there already."""
        ...

    async def replace(self, obj: Json) -> Json:
        """Of the version that it names. Raises ClusterError: Conflict where there is a newer one."""
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
        luck: Callable[[], float] = random.random,
    ) -> None:
        self._leases, self._identity, self._clock, self._luck = leases, identity, clock, luck
        self._ref = Ref(*LEASE, namespace, name)
        self._terms = LeaseDurations()
        self._observed: ObservedLease | None = None
        self._leads_until_s = 0.0  # when we lead no more, unless it is renewed
        self._losses = 0  # soon after one another
        self.api_failure: ApiFailure | None = None  # of the last call

    def __repr__(self) -> str:
        return f"<LeaderElection {self._ref.name} me={self._identity} holder={self.holder!r} leading={self.leading}>"

    @property
    def leading(self) -> bool:
        """Whether nobody else can lead at this moment."""
        return self._now() < self._leads_until_s

    @property
    def holder(self) -> str | None:
        """Who leads, as far as we know; None before the first look, empty for nobody."""
        return None if self._observed is None else self._observed.record.holder

    async def win(self) -> None:
        """Returns once this candidate leads. Who lost it soon after it was won waits longer each time."""
        if self._losses:
            await self._clock.sleep(pause_s(self._losses, self._terms, self._luck()))
        waiting = await self._try_acquire()
        while not self.leading:
            # Not all at once, and soon after the holder's time is over.
            wait_s = self._terms.retry_s * (1 + self._luck() / 5)
            if waiting is not None:
                wait_s = min(wait_s, max(0.0, waiting.until - self._now()) + 0.2 * self._luck() + 0.001)
            await self._clock.sleep(wait_s)
            waiting = await self._try_acquire()
        _LOG.info("%s leads", self._identity)

    async def lead(self, work: Callable[[], Awaitable[None]]) -> bool:
        """Run `work()` to its end and keep the lead meanwhile, then give it up and return True. If the lead is lost,
        cancel `work()` and return False. Raises what `work` raises, and what a defect in keeping the lead raises.
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
            _LOG.warning("%s leads no more: %s", self._identity, self.api_failure or f"{self.holder} does")
        return is_ours

    async def _renew_until_lost(self) -> None:
        """Renew it until it is lost."""
        while True:
            # Over, not on, the edge: clocks round, and would be looked at for ever without being there.
            await self._clock.sleep(min(self._terms.retry_s, max(0.001, self._leads_until_s - self._now())))
            if not self.leading:
                return
            timer = asyncio.create_task(self._clock.sleep(self._leads_until_s - self._now()))
            renewal = asyncio.create_task(self._try_acquire())
            try:
                await asyncio.wait((timer, renewal), return_when=asyncio.FIRST_COMPLETED)
            finally:
                await cancel_and_wait(timer, renewal)
            if not renewal.cancelled() and renewal.result() is not None:
                _LOG.warning("%s has the lease", self.holder)
                self._leads_until_s = 0.0
                return

    async def _try_acquire(self) -> AwaitHolder | None:
        """Look, and take or renew it if we may: `_leads_until_s` is later then. Gives until when it is
        another's, if it is.
        """
        begun = self._now()
        try:
            found = await self._leases.read(self._ref)
            self._observed = observe(self._observed, None if found is None else read(found, self._terms), self._now())
            step = decide(self._observed, self._identity, self._now())
            if isinstance(step, AwaitHolder):
                return step
            answer = await self._write(found)
        except ClusterError as error:
            if self.api_failure is None and not isinstance(error.api_failure, Conflict):
                _LOG.warning("the lease is not to be had: %s", error)
            self.api_failure = error.api_failure
            return None
        except Exception:  # a defect, or a malformed Lease: the lead expires unless a later try renews it
            PROCESS_HEALTH.errors["lease"] += 1
            _LOG.exception("the lease could not be looked at")
            return None
        self.api_failure = None
        self._observed = observe(self._observed, read(answer, self._terms), self._now())
        self._leads_until_s = leads_until(begun, self._terms)
        return None

    async def _write(self, found: Json | None) -> Json:
        at = self._at()
        if found is None:
            head = {"name": self._ref.name, "namespace": self._ref.namespace}
            spec = acquired_spec(None, self._identity, at, self._terms)
            return await self._leases.create({"apiVersion": LEASE[0], "kind": LEASE[1], "metadata": head, "spec": spec})
        return await self._leases.replace(
            {**found, "spec": acquired_spec(found.get("spec"), self._identity, at, self._terms)}
        )

    async def _release(self) -> None:
        """What is ours no more is left alone; and if it can't be given up, others wait for their time."""
        self._leads_until_s = 0.0
        try:
            async with asyncio.timeout(dependencies.LEASE.timeout_s):
                found = await self._leases.read(self._ref)
                if found is not None and read(found, self._terms).holder == self._identity:
                    await self._leases.replace({**found, "spec": released_spec(found["spec"], self._at())})
        except (ClusterError, TimeoutError) as error:
            _LOG.info("the lease is not given up: %s", error)
        except Exception:
            PROCESS_HEALTH.errors["lease"] += 1
            _LOG.exception("the lease could not be given up")

    def _now(self) -> float:
        return self._clock.monotonic_us() / _US

    def _at(self) -> str:
        """With microseconds: the cluster takes no other form. They are those of a clock that does not step, so that
        each renewal changes the Lease, whatever the wall clock says.
        """
        return timestamp(self._clock.wall_s()).replace("Z", f".{self._clock.monotonic_us() % _US:06d}Z")


async def _run_while_leading(work: Callable[[], Awaitable[None]], keeping: asyncio.Task[None]) -> bool:
    """To its end, or that of `keeping`: False."""
    try:
        async with asyncio.timeout(None) as kept:  # which cancels this task, and tells it from who else does

            def over(_: object) -> None:
                kept.reschedule(0.0)

            keeping.add_done_callback(over)
            try:
                await work()  # not as a task of its own: whoever cancels us ends it, however often
            finally:
                keeping.remove_done_callback(over)
    except TimeoutError:
        if not kept.expired():
            raise
    return not kept.expired()
