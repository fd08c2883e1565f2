"""A second replica for a request whose first frame is late: the answer that begins first is passed on, the other one
ends before a byte of it was. When a frame is late is `policy/hedge`'s.

The first attempt runs in its request's own task, as if there were no other one, and costs a timer. A replica that had
begun and is not passed on is told so, and records its work itself: nobody is charged for it.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Final

from activator.call import Call, Sender
from activator.exchange import now_us
from activator.failings import blame, failure_of
from activator.keys import VersionKey
from activator.line import Replica
from activator.meters import Meters
from activator.policy.ask import Ask
from activator.policy.hedge import LIMITS, FirstFrames, HedgeLimits, hedge_after_s
from activator.policy.retries import Budgets
from activator.proxy import Declined, Lost, Upstream
from activator.throttler import Slot, Throttler
from contracts.frames import Frame, FrameKind

log = logging.getLogger(__name__)

FIRST: Final = "first"
SECOND: Final = "second"
NEITHER: Final = "neither"
WITHHELD: Final = "withheld"  # the budget is spent


class Outrun(Exception):
    """The second replica began the answer."""


class Second:
    """The second attempt at a request, in a task of its own, which keeps slot and connection for as long as the request
    needs them. Starts at once. `begun` is called with its first frame, unless it was ended before.
    """

    def __init__(self, throttler: Throttler, slot: Slot, upstream: Upstream, begun: Callable[[], None]) -> None:
        self.slot = slot
        self.upstream = upstream
        self.sent_us = now_us()
        self.frames: list[Frame] | None = None  # the first ones
        self.is_lead = False  # its answer is passed on
        self._throttler = throttler
        self._begun = begun
        loop = asyncio.get_running_loop()
        self._let_go: asyncio.Future[None] = loop.create_future()
        self._known = asyncio.Event()
        self._task = loop.create_task(self._run(), name="second")
        self._task.add_done_callback(self._ended)

    def __repr__(self) -> str:
        return f"<Second begun={self.frames is not None} lead={self.is_lead} over={self._task.done()}>"

    async def known(self) -> None:
        """Until it has begun an answer, or has come to nothing."""
        await self._known.wait()

    def end(self) -> None:
        """Its answer was passed on, or won't be: then its replica is told that. Returns at once. Idempotent."""
        if self.is_lead:
            if not self._let_go.done():
                self._let_go.set_result(None)
        elif not self._task.done():
            self.upstream.disown()
            self._task.cancel()

    async def ended(self) -> None:
        """Until nothing is left of it."""
        await asyncio.wait((self._task,))
        if self.upstream.telling is not None:
            await asyncio.wait((self.upstream.telling,))

    async def _run(self) -> None:
        replica = self.slot.replica
        try:
            async with self.upstream:
                self._throttler.report_began(replica, self.upstream.credit)
                frames = await self.upstream.some()
                while not speaks(frames):
                    frames = await self.upstream.some()
                if frames[-1].kind is FrameKind.FAILED:  # the first replica may do better
                    self.upstream.disown()
                    raise Declined(failure_of(frames[-1]))
                self.frames = frames
                self._known.set()
                self._begun()
                await self._let_go
        except (Lost, Declined) as failed:
            blame(self._throttler, replica, failed)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        """By itself or not, also where it was ended before its first step."""
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("unforeseen failure", exc_info=error)
        self._known.set()
        if self.is_lead:
            self.slot.release()
        else:
            self.slot.outrun(self.upstream.telling)


def speaks(frames: Sequence[Frame]) -> bool:
    """Whether an answer has begun: more than a beat, or one that counts a token (of an answer that doesn't stream)."""
    return any(frame.kind is not FrameKind.BEAT or frame.counts.completion_tokens for frame in frames)


class Hedges:
    """Of all requests of versions with several replicas. What is measured is kept of streams and of whole answers
    apart: a whole one says nothing until it is there, or for a second.
    """

    def __init__(
        self,
        throttler: Throttler,
        sender: Sender,
        budgets: Budgets[tuple[str, VersionKey]],
        meters: Meters,
        limits: HedgeLimits = LIMITS,
    ) -> None:
        self._throttler = throttler
        self._sender = sender
        self._budgets = budgets
        self._meters = meters
        self._frames = FirstFrames[tuple[VersionKey, bool]](limits)

    def __repr__(self) -> str:
        return f"<Hedges {self._frames!r}>"

    def race(self, key: VersionKey, ask: Ask, call: Call, replica: Replica, first: Upstream) -> "Race | None":
        """For an attempt that is about to be sent; None where there is no other replica that could be asked."""
        return Race(self, key, ask, call, replica, first) if self._throttler.has_several(key) else None

    def after_s(self, key: VersionKey, call: Call) -> float | None:
        """When to ask a second replica."""
        late_after_s = self._frames.late_after_s((key, call.account.stream))
        return hedge_after_s(late_after_s, call.remaining_s(), is_cold=call.account.cold)

    def try_second(self, race: "Race", key: VersionKey, ask: Ask, call: Call, than: Replica) -> Second | None:
        """Under way, where a slot is free and the budget has one."""
        slot = self._throttler.try_other(key, ask, call.deadline, than)
        if slot is None:
            return None
        if not self._budgets.try_spend((ask.tenant, key), time.monotonic()):
            slot.outrun(None)
            self.came(ask, call, WITHHELD)
            return None
        return Second(self._throttler, slot, self._sender.send(key, call, slot.replica), race.second_began)

    def took(self, key: VersionKey, call: Call, since_us: int) -> None:
        """The first frame of a request that was sent then."""
        if not call.account.cold:
            self._frames.took((key, call.account.stream), (now_us() - since_us) / 1e6)

    def came(self, ask: Ask, call: Call, first: str) -> None:
        """What a late request came to."""
        call.account.hedged = first
        self._meters.hedged((ask.tenant, call.account.model), first)


class Race:
    """One attempt, and the second one that it may get. `with` it around the first one: raises Outrun where the second
    one was sooner. `end` it in any case.
    """

    __slots__ = (
        "_ask", "_before", "_call", "_first", "_hedges", "_is_asked", "_is_counted", "_is_inside", "_key", "_replica",
        "_second", "_since_us", "_task", "_timer",
    )  # fmt: skip

    def __init__(
        self, hedges: Hedges, key: VersionKey, ask: Ask, call: Call, replica: Replica, first: Upstream
    ) -> None:
        self._hedges = hedges
        self._key = key
        self._ask = ask
        self._call = call
        self._replica = replica
        self._first = first
        self._since_us = call.dispatched_us
        self._timer: asyncio.TimerHandle | None = None
        self._second: Second | None = None
        self._is_inside = self._is_asked = self._is_counted = False

    def __enter__(self) -> None:
        self._is_inside = True
        after_s = self._hedges.after_s(self._key, self._call)
        if after_s is not None:
            task = asyncio.current_task()
            assert task is not None
            self._task, self._before = task, task.cancelling()
            self._timer = asyncio.get_running_loop().call_later(after_s, self._late)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_inside = False
        self._no_timer()
        if not self._is_asked:
            return
        self._task.uncancel()
        if kind is not asyncio.CancelledError or self._task.cancelling() <= self._before:  # else others ended it, too
            raise Outrun from None

    def spoke(self) -> None:
        """The first attempt's answer begins, and is passed on."""
        self._hedges.took(self._key, self._call, self._since_us)
        self.end(FIRST)

    def second_began(self) -> None:
        """It is passed on, unless the first attempt is over: then it waits to be asked for."""
        if self._is_inside and not self._first.is_left:
            self._pass_on()
            self._first.disown()
            self._is_asked = True
            self._task.cancel()

    async def second(self) -> Second | None:
        """For a first attempt that is over without an answer: the second one, where there is one and it begins."""
        second = self._second
        if second is None:
            return None
        if not second.is_lead:
            await second.known()
            if second.frames is None:
                return None
            self._pass_on()
        self._name(second)  # whatever became of the first one meanwhile
        return second

    def end(self, first: str = NEITHER) -> None:
        """No second attempt from now on; one that is not passed on ends, one that is is over. Idempotent."""
        self._no_timer()
        second = self._second
        if second is None:
            return
        if not second.is_lead:
            self._count(first)
        second.end()

    async def settled(self) -> None:
        """Once nothing is left of a second attempt, and a replica that was outrun knows it."""
        if self._second is not None:
            await self._second.ended()
        if self._first.telling is not None:
            await asyncio.wait((self._first.telling,))

    def _late(self) -> None:
        self._timer = None
        if not self._first.is_left:
            self._second = self._hedges.try_second(self, self._key, self._ask, self._call, self._replica)

    def _pass_on(self) -> None:
        second = self._second
        assert second is not None
        second.is_lead = True
        self._name(second)
        self._hedges.took(self._key, self._call, self._since_us)
        self._count(SECOND)

    def _name(self, second: Second) -> None:
        """In the record, and to whom it is told that this is durable."""
        call = self._call
        call.upstream = second.upstream
        call.account.runtime_id = second.upstream.runtime_id or second.slot.replica.row.runtime_id
        call.dispatched_us = second.sent_us

    def _count(self, first: str) -> None:
        if not self._is_counted:
            self._is_counted = True
            self._hedges.came(self._ask, self._call, first)

    def _no_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
