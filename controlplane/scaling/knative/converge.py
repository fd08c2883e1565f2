"""Make the cluster's objects as they are wanted, and keep them so. `policy/convergence.py` decides what to do to one.

`run` lasts for as long as this process leads. It may be cancelled anywhere: the next leader goes on from what it sees.
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
from controlplane.policy import convergence as policy
from controlplane.policy.convergence import (
    FOREIGN,
    Apply,
    Check,
    Delete,
    Foreign,
    Memory,
    Refusal,
    Settled,
    Wait,
)
from controlplane.policy.labels import OURS_SELECTOR
from controlplane.scaling.knative.cluster import (
    Busy,
    ClusterApi,
    ClusterError,
    Json,
    Ref,
    Trouble,
    Unreachable,
)
from controlplane.scaling.knative.view import View
from service.loops import isolated, record_error

ABREAST: Final = 8  # calls at once
TOGETHER: Final = 50  # looked at before others have their turn: some milliseconds
AWAY_S: Final = 16.0  # between two attempts at most, while calls fail: one object alone may be to blame
SPACING_S: Final = 0.05  # between two applies that probably change nothing: a new leader has one for each object
DEFECT_S: Final = 30.0  # until an object is looked at again after an unexpected error
_US: Final = 1_000_000
_LOG = logging.getLogger("kelvin.cluster")


class Converger:
    """Wanted objects of one kind, the ones seen, and what is left to do. Objects of ours that are not wanted are
    deleted. What another `installation` wrote is left to that. `told` is called with each name whose object changed.
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
        told: Callable[[Ref], None] | None = None,
    ) -> None:
        self._api, self._clock, self._luck, self._told = api, clock, luck, told
        self._installation = installation
        self._kind = (api_version, kind)
        self._view = View()
        self._wanted: dict[Ref, Json] | None = None
        self._stamped: dict[Ref, Json] = {}  # the same, as they are written; made when they are looked at
        self._memory: dict[Ref, Memory] = {}
        self._away = Memory()  # of the cluster as a whole
        self._looks: dict[Ref, None] = {}  # to be looked at, in their order
        self._due: dict[Ref, float] = {}
        self._heap: list[tuple[float, int, Ref]] = []
        self._order = count()
        self._busy: set[Ref] = set()
        self._checked_at = 0.0  # when the last of the checks is due
        self._changed = asyncio.Event()
        self.synced = asyncio.Event()  # all that there is was seen once

    def __repr__(self) -> str:
        wanted = "none loaded" if self._wanted is None else len(self._wanted)
        due = f"due={len(self._due)} timers={len(self._heap)}"
        return f"<Converger wanted={wanted} {due} busy={len(self._busy)} refused={len(self.refusals())}>"

    def want(self, objects: Iterable[Json]) -> None:
        """Set all objects that are wanted from now on. Raises ValueError for one of another kind."""
        rendered = {Ref.of(each): each for each in objects}
        for ref in rendered:
            if (ref.api_version, ref.kind) != self._kind:
                msg = f"{ref.api_version} {ref.kind}: not the kind that is written"
                raise ValueError(msg)
        before, self._wanted = self._wanted, rendered
        if before is None:
            self._look([*rendered, *self._view.objects])
            return
        others = [ref for ref, each in rendered.items() if before.get(ref) != each]
        others += [ref for ref in before if ref not in rendered]
        for ref in others:
            self._stamped.pop(ref, None)
        self._look(others)

    def seen(self, ref: Ref) -> Json | None:
        """The object as it was last seen."""
        return self._view.objects.get(ref)

    def refusals(self) -> Mapping[Ref, Refusal]:
        """Return the objects that are not as they are wanted, and why."""
        return {ref: each.refusal for ref, each in self._memory.items() if each.refusal is not None}

    async def run(self) -> None:
        """Run until cancelled. Begins with what there is now, whatever was seen before."""
        self._view = View()
        self._looks, self._due, self._heap, self._away = {}, {}, [], Memory()
        self._checked_at = 0.0
        self._busy.clear()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch(), name=f"watch {self._kind[1]}")
            places = asyncio.Semaphore(ABREAST)
            while True:
                await places.acquire()
                ref = await self._next()
                self._busy.add(ref)
                tasks.create_task(self._step(ref, places), name=f"converge {ref}")

    async def _watch(self) -> None:
        async with aclosing(self._api.watch(*self._kind, labels=OURS_SELECTOR)) as changes:
            async for change in changes:
                first, refs = not self._view.synced, self._view.take(change)
                self.synced.set()
                if first and self._wanted is not None:
                    refs |= self._wanted.keys()
                self._look(sorted(refs))
                for ref in refs:
                    self._tell(ref)

    def _tell(self, ref: Ref) -> None:
        if self._told is not None:
            with isolated(ref):
                self._told(ref)

    def _look(self, refs: Iterable[Ref]) -> None:
        """Queue objects to be looked at. Ten thousand at once would take seconds, in which no lease is renewed."""
        self._looks.update(dict.fromkeys(refs))
        self._changed.set()

    async def _look_at_them(self) -> None:
        """Look at all queued objects: note for each when something is due, if ever."""
        while self._looks:
            refs = [ref for ref, _ in zip(self._looks, range(TOGETHER), strict=False)]
            now = self._now()
            for ref in refs:
                del self._looks[ref]
                try:
                    self._look_at(ref, now)
                except Exception as error:
                    self._put_off(ref, error)
            await asyncio.sleep(0)

    def _look_at(self, ref: Ref, now: float) -> None:
        match self._judge(ref, now):
            case Settled(until):
                self._forget(ref)
                if until is None:
                    self._due.pop(ref, None)
                else:  # each change of its status comes by here: it is due as before
                    self._at(ref, until)
            case Check():
                if ref not in self._due:
                    self._checked_at = max(now, self._checked_at + SPACING_S)
                    self._at(ref, self._checked_at)
            case Wait(until):
                self._at(ref, until)
            case Foreign(owner):
                self._due.pop(ref, None)
                self._leave(ref, owner)
            case Apply() | Delete():
                self._at(ref, now)

    def _put_off(self, ref: Ref, defect: Exception) -> None:
        """Record an unexpected error about one object, and look at that object again later. The others go on."""
        record_error(defect, ref)
        self._at(ref, self._now() + DEFECT_S)

    def _judge(self, ref: Ref, now: float) -> policy.Step:
        if self._wanted is None or not self._view.synced:
            return Settled()
        memory = self._memory.get(ref, Memory())
        return policy.judge(self._stamped_of(ref), self.seen(ref), memory, now, self._installation)

    def _stamped_of(self, ref: Ref) -> Json | None:
        held = self._stamped.get(ref)
        if held is None and self._wanted is not None and ref in self._wanted:
            held = self._stamped[ref] = policy.stamped(self._wanted[ref], self._installation)
        return held

    def _leave(self, ref: Ref, owner: str) -> None:
        wanted, memory = self._stamped_of(ref), self._memory.get(ref, Memory())
        refusal = Refusal(FOREIGN, f"it is of the installation in {owner}")
        if (memory.refusal, memory.stamp) != (refusal, policy.stamp_of(wanted)):
            self._memory[ref] = policy.refused(wanted, refusal, memory, self._now(), self._luck())
            _LOG.warning("%s is left alone: %s", ref, refusal.message)

    def _forget(self, ref: Ref) -> None:
        """Drop the refusal of an object that is no longer wanted, or is as it should be by now."""
        held = self._memory.get(ref)
        if held is None or self._wanted is None:
            return
        is_as_wanted = held.stamp == policy.stamp_of(self._stamped_of(ref)) and self.seen(ref) is not None
        # An object that is there but not wanted is being deleted, or belongs to another installation.
        if ref not in self._wanted or (held.failing and is_as_wanted):
            del self._memory[ref]

    def _at(self, ref: Ref, when: float) -> None:
        if self._due.get(ref) != when:
            self._due[ref] = when
            heapq.heappush(self._heap, (when, next(self._order), ref))

    async def _next(self) -> Ref:
        """Return the object that is due first. Waits until it is, and until the cluster may be called again."""
        while True:
            await self._look_at_them()
            now, wait_s = self._now(), None
            while self._heap:
                when, _, ref = self._heap[0]
                late = max(when, self._away.not_before) - now
                current = self._due.get(ref) == when
                if current and ref not in self._busy and late > 0:
                    wait_s = late
                    break
                heapq.heappop(self._heap)
                if current:
                    del self._due[ref]
                    if ref not in self._busy:  # who is busy is looked at again when it is done
                        return ref
            await self._change(wait_s)

    async def _change(self, wait_s: float | None) -> None:
        """Wait until an object is queued, or for `wait_s` seconds."""
        self._changed.clear()
        if wait_s is None:
            await self._changed.wait()
            return
        async with asyncio.TaskGroup() as tasks:
            timer = tasks.create_task(self._clock.sleep(wait_s + 0.001))  # over, not on, the edge: clocks round
            timer.add_done_callback(lambda _: self._changed.set())
            await self._changed.wait()
            timer.cancel()

    async def _step(self, ref: Ref, places: asyncio.Semaphore) -> None:
        try:
            await self._take(ref)
        except Exception as error:
            self._put_off(ref, error)
        else:
            self._look([ref])
        finally:
            self._busy.discard(ref)
            places.release()
            self._changed.set()

    async def _take(self, ref: Ref) -> None:
        wanted, memory = self._stamped_of(ref), self._memory.get(ref, Memory())
        answer: Json | None = None
        try:
            match self._judge(ref, self._now()):
                case Apply() | Check():
                    assert wanted is not None
                    with self._view.asking(ref) as put:
                        answer = await self._api.apply(wanted)
                        put(answer)
                case Delete(uid):
                    await self._api.delete(ref, uid=uid)
                    self._view.doom(ref, uid)
                case Wait() | Settled() | Foreign():
                    return
        except ClusterError as error:
            self._failed(ref, wanted, memory, error.trouble)
            return
        self._away = Memory()
        self._memory[ref] = policy.succeeded(wanted, answer, memory, self._now(), self._luck())

    def _failed(self, ref: Ref, wanted: Json | None, memory: Memory, trouble: Trouble) -> None:
        now, refusal = self._now(), Refusal(trouble.reason, trouble.message)
        not_before = now + trouble.retry_after_s if isinstance(trouble, Busy) else now
        held = policy.refused(wanted, refusal, memory, now, self._luck())
        self._memory[ref] = policy.not_sooner(held, not_before)
        if memory.refusal != refusal:
            _LOG.warning("%s is refused: %s", ref, trouble)
        if isinstance(trouble, Busy | Unreachable) and self._away.not_before <= now:  # of those at once one counts
            away = policy.refused(None, refusal, self._away, now, self._luck())
            away = replace(away, not_before=min(away.not_before, now + AWAY_S))
            self._away = policy.not_sooner(away, not_before)

    def _now(self) -> float:
        return self._clock.monotonic_us() / _US
