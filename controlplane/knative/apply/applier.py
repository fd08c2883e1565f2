"""Make the cluster's objects as they are wanted, and keep them so. `knative/policy/apply_steps.py` decides each step.

`run` lasts while this process leads. It may be cancelled anywhere: the next leader starts from the cluster's state.
"""

import asyncio
import heapq
import logging
import random
from collections.abc import Callable, Iterable, Mapping
from contextlib import aclosing
from dataclasses import replace
from itertools import count
from typing import Final

from controlplane.clock import Clock
from controlplane.knative.apply.cluster import ApiFailure, Busy, ClusterApi, ClusterError, Json, Ref, Unreachable
from controlplane.knative.apply.object_cache import ObjectCache
from controlplane.knative.policy import apply_steps as policy
from controlplane.knative.policy.apply_steps import (
    FOREIGN,
    Apply,
    ApplyState,
    Check,
    DeleteObject,
    Foreign,
    Refusal,
    Settled,
    Wait,
)
from controlplane.knative.policy.object_labels import OURS_SELECTOR
from kelvin.process.loops import contain_errors, record_error

MAX_CONCURRENT_CALLS: Final = 8
BATCH_SIZE: Final = 50  # processed between two yields to the event loop; takes some milliseconds
OUTAGE_RETRY_MAX_S: Final = 16.0  # longest pause between attempts while calls fail: one object may be the cause
SPACING_S: Final = 0.05  # between checks that probably change nothing: a new leader checks every object
DEFECT_RETRY_S: Final = 30.0  # until an object is processed again after an unexpected error
_US: Final = 1_000_000
_LOG = logging.getLogger("kelvin.cluster")


class Applier:
    """Applies the wanted objects of one kind, and deletes our objects that are not wanted.

    Objects of another `installation` are left alone. `on_changed` is called with the name of each object that changed.
    """

    def __init__(
        self,
        api: ClusterApi,
        api_version: str,
        kind: str,
        clock: Clock,
        installation: str,
        *,
        luck: Callable[[], float] = random.random,
        on_changed: Callable[[Ref], None] | None = None,
    ) -> None:
        self._api, self._clock, self._luck, self._on_changed = api, clock, luck, on_changed
        self._installation = installation
        self._kind = (api_version, kind)
        self._view = ObjectCache()
        self._wanted: dict[Ref, Json] | None = None
        self._wanted_with_digest: dict[Ref, Json] = {}  # the same with their digests, made on demand
        self._states: dict[Ref, ApplyState] = {}
        self._outage = ApplyState()  # of the cluster as a whole
        self._queued: dict[Ref, None] = {}  # to be processed, in this order
        self._due: dict[Ref, float] = {}
        self._heap: list[tuple[float, int, Ref]] = []
        self._order = count()
        self._busy: set[Ref] = set()
        self._checked_at = 0.0  # when the last of the checks is due
        self._changed = asyncio.Event()
        self.synced = asyncio.Event()  # every object was seen once

    def __repr__(self) -> str:
        wanted = "none loaded" if self._wanted is None else len(self._wanted)
        due = f"due={len(self._due)} timers={len(self._heap)}"
        return f"<Applier wanted={wanted} {due} busy={len(self._busy)} refused={len(self.refusals())}>"

    def set_wanted(self, objects: Iterable[Json]) -> None:
        """Replace the set of wanted objects. Raises ValueError for an object of another kind."""
        rendered = {Ref.of(each): each for each in objects}
        for ref in rendered:
            if (ref.api_version, ref.kind) != self._kind:
                msg = f"{ref.api_version} {ref.kind}: not the kind that is written"
                raise ValueError(msg)
        before, self._wanted = self._wanted, rendered
        if before is None:
            self._enqueue([*rendered, *self._view.objects])
            return
        changed = [ref for ref, each in rendered.items() if before.get(ref) != each]
        changed += [ref for ref in before if ref not in rendered]
        for ref in changed:
            self._wanted_with_digest.pop(ref, None)
        self._enqueue(changed)

    def find_observed(self, ref: Ref) -> Json | None:
        """Return the object as it was last seen."""
        return self._view.objects.get(ref)

    def refusals(self) -> Mapping[Ref, Refusal]:
        """Return the objects that differ from their wanted state, and why."""
        return {ref: each.refusal for ref, each in self._states.items() if each.refusal is not None}

    async def run(self) -> None:
        """Run until cancelled. Starts from the cluster's present state, whatever was seen before."""
        self._view = ObjectCache()
        self._queued, self._due, self._heap, self._outage = {}, {}, [], ApplyState()
        self._checked_at = 0.0
        self._busy.clear()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch(), name=f"watch {self._kind[1]}")
            permits = asyncio.Semaphore(MAX_CONCURRENT_CALLS)
            while True:
                await permits.acquire()
                ref = await self._wait_for_next()
                self._busy.add(ref)
                tasks.create_task(self._run_step(ref, permits), name=f"step {ref}")

    async def _watch(self) -> None:
        async with aclosing(self._api.watch(*self._kind, labels=OURS_SELECTOR)) as changes:
            async for change in changes:
                first, refs = not self._view.synced, self._view.apply_change(change)
                self.synced.set()
                if first and self._wanted is not None:
                    refs |= self._wanted.keys()
                self._enqueue(sorted(refs))
                for ref in refs:
                    self._notify_changed(ref)

    def _notify_changed(self, ref: Ref) -> None:
        if self._on_changed is not None:
            with contain_errors(ref):
                self._on_changed(ref)

    def _enqueue(self, refs: Iterable[Ref]) -> None:
        """Queue objects to be processed. Ten thousand at once would take seconds, in which no lease is renewed."""
        self._queued.update(dict.fromkeys(refs))
        self._changed.set()

    async def _process_queued(self) -> None:
        """Process all queued objects: schedule the next step of each, if there is one."""
        while self._queued:
            refs = [ref for ref, _ in zip(self._queued, range(BATCH_SIZE), strict=False)]
            now = self._now()
            for ref in refs:
                del self._queued[ref]
                try:
                    self._schedule_step(ref, now)
                except Exception as error:
                    self._retry_after_defect(ref, error)
            await asyncio.sleep(0)

    def _schedule_step(self, ref: Ref, now: float) -> None:
        match self._decide(ref, now):
            case Settled(until):
                self._clear_refusal(ref)
                if until is None:
                    self._due.pop(ref, None)
                else:  # each status change gets here; the due time stays the same
                    self._schedule(ref, until)
            case Check():
                if ref not in self._due:
                    self._checked_at = max(now, self._checked_at + SPACING_S)
                    self._schedule(ref, self._checked_at)
            case Wait(until):
                self._schedule(ref, until)
            case Foreign(owner):
                self._due.pop(ref, None)
                self._record_foreign(ref, owner)
            case Apply() | DeleteObject():
                self._schedule(ref, now)

    def _retry_after_defect(self, ref: Ref, defect: Exception) -> None:
        """Record an unexpected error about one object, and process it again later. Other objects are not delayed."""
        record_error(defect, ref)
        self._schedule(ref, self._now() + DEFECT_RETRY_S)

    def _decide(self, ref: Ref, now: float) -> policy.ApplyStep:
        if self._wanted is None or not self._view.synced:
            return Settled()
        state = self._states.get(ref, ApplyState())
        return policy.decide(self._with_digest(ref), self.find_observed(ref), state, now, self._installation)

    def _with_digest(self, ref: Ref) -> Json | None:
        wanted = self._wanted_with_digest.get(ref)
        if wanted is None and self._wanted is not None and ref in self._wanted:
            wanted = self._wanted_with_digest[ref] = policy.with_digest(self._wanted[ref], self._installation)
        return wanted

    def _record_foreign(self, ref: Ref, owner: str) -> None:
        wanted, state = self._with_digest(ref), self._states.get(ref, ApplyState())
        refusal = Refusal(FOREIGN, f"it belongs to the installation in {owner}")
        if (state.refusal, state.wanted_digest) != (refusal, policy.digest_of(wanted)):
            self._states[ref] = policy.after_refusal(wanted, refusal, state, self._now(), self._luck())
            _LOG.warning("%s is left alone: %s", ref, refusal.message)

    def _clear_refusal(self, ref: Ref) -> None:
        """Drop the refusal of an object that is no longer wanted, or is now in its wanted state."""
        state = self._states.get(ref)
        if state is None or self._wanted is None:
            return
        is_as_wanted = (
            state.wanted_digest == policy.digest_of(self._with_digest(ref)) and self.find_observed(ref) is not None
        )
        # An existing object that is not wanted is being deleted, or belongs to another installation.
        if ref not in self._wanted or (state.is_failing and is_as_wanted):
            del self._states[ref]

    def _schedule(self, ref: Ref, when: float) -> None:
        if self._due.get(ref) != when:
            self._due[ref] = when
            heapq.heappush(self._heap, (when, next(self._order), ref))

    async def _wait_for_next(self) -> Ref:
        """Return the object that is due first. Waits until then, and until the cluster may be called again."""
        while True:
            await self._process_queued()
            now, wait_s = self._now(), None
            while self._heap:
                when, _, ref = self._heap[0]
                delay_s = max(when, self._outage.not_before) - now
                is_current = self._due.get(ref) == when
                if is_current and ref not in self._busy and delay_s > 0:
                    wait_s = delay_s
                    break
                heapq.heappop(self._heap)
                if is_current:
                    del self._due[ref]
                    if ref not in self._busy:  # a busy object is processed again when its call is done
                        return ref
            await self._wait_for_change(wait_s)

    async def _wait_for_change(self, wait_s: float | None) -> None:
        """Wait until an object is queued, or for `wait_s` seconds."""
        self._changed.clear()
        if wait_s is None:
            await self._changed.wait()
            return
        async with asyncio.TaskGroup() as tasks:
            timer = tasks.create_task(self._clock.sleep(wait_s + 0.001))  # clocks round, so sleep a little longer
            timer.add_done_callback(lambda _: self._changed.set())
            await self._changed.wait()
            timer.cancel()

    async def _run_step(self, ref: Ref, permits: asyncio.Semaphore) -> None:
        try:
            await self._execute_step(ref)
        except Exception as error:
            self._retry_after_defect(ref, error)
        else:
            self._enqueue([ref])
        finally:
            self._busy.discard(ref)
            permits.release()
            self._changed.set()

    async def _execute_step(self, ref: Ref) -> None:
        wanted, state = self._with_digest(ref), self._states.get(ref, ApplyState())
        response: Json | None = None
        try:
            match self._decide(ref, self._now()):
                case Apply() | Check():
                    assert wanted is not None
                    with self._view.track_call(ref) as store:
                        response = await self._api.apply(wanted)
                        store(response)
                case DeleteObject(uid):
                    await self._api.delete(ref, uid=uid)
                    self._view.mark_deleting(ref, uid)
                case Wait() | Settled() | Foreign():
                    return
        except ClusterError as error:
            self._record_refusal(ref, wanted, state, error.api_failure)
            return
        self._outage = ApplyState()
        self._states[ref] = policy.after_success(wanted, response, state, self._now(), self._luck())

    def _record_refusal(self, ref: Ref, wanted: Json | None, state: ApplyState, api_failure: ApiFailure) -> None:
        now, refusal = self._now(), Refusal(api_failure.reason, api_failure.message)
        not_before = now + api_failure.retry_after_s if isinstance(api_failure, Busy) else now
        refused = policy.after_refusal(wanted, refusal, state, now, self._luck())
        self._states[ref] = policy.delay_until(refused, not_before)
        if state.refusal != refusal:
            _LOG.warning("%s is refused: %s", ref, api_failure)
        # Of several failures at the same time only one counts.
        if isinstance(api_failure, Busy | Unreachable) and self._outage.not_before <= now:
            outage = policy.after_refusal(None, refusal, self._outage, now, self._luck())
            outage = replace(outage, not_before=min(outage.not_before, now + OUTAGE_RETRY_MAX_S))
            self._outage = policy.delay_until(outage, not_before)

    def _now(self) -> float:
        return self._clock.monotonic_us() / _US
