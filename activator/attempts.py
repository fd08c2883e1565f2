"""Attempts at one completion: take a slot, send the request to that replica, and relay its frames to the client.

`policy/retries.py` decides whether and when a failed attempt is repeated, `hedges.py` whether a late one gets a second
replica.
"""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from typing import Final

from activator.answer import Answer
from activator.call import Call, Sender
from activator.exchange import now_us
from activator.failings import ELSEWHERE, blame, failure_of
from activator.hedges import Hedges, Outrun, Race, Second, speaks
from activator.keys import VersionKey
from activator.line import Replica
from activator.meters import Meters
from activator.policy.ask import Ask
from activator.policy.retries import LIMITS, Again, Budgets, Tried, Withheld, decide, failed
from activator.proxy import Declined, Lost, Upstream
from activator.throttler import NoSlotInTime, Slot, Throttler
from contracts.artifact_errors import WeightsDamaged
from contracts.errors import Failure, ModelNotFound, Refused
from contracts.frames import Counts, End, Frame, FrameKind
from contracts.timeline import Stage
from contracts.traffic_errors import ReplicaLost
from contracts.usage import ACK_TOKENS
from contracts.wire import BadJson, decoder

_UNTRIED: Final = Tried()
_ENDS: Final = decoder(End)


class Attempts:
    """Makes attempts at replicas of any version. Without `hedges` no attempt gets a second replica; `draw` returns a
    random number in [0, 1).
    """

    def __init__(
        self,
        throttler: Throttler,
        sender: Sender,
        budgets: Budgets[tuple[str, VersionKey]],
        meters: Meters,
        hedges: Hedges | None,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._throttler = throttler
        self._sender = sender
        self._budgets = budgets
        self._meters = meters
        self._hedges = hedges
        self._draw = draw

    async def serve(
        self, key: VersionKey, ask: Ask, call: Call, answer: Answer, is_current: Callable[[], bool]
    ) -> None:
        """Send a complete answer to the client, retrying on other replicas.

        A retry is safe if the replica was lost before its first byte, or withdrew its answer (`weights_damaged`) before
        the client had any of it. Raises Refused with the last attempt's failure; Refused(ModelNotFound) before an
        attempt if `is_current` returns False, because the request no longer goes to this version.
        """
        self._budgets.asked((ask.tenant, key), time.monotonic())
        tried = _UNTRIED
        failure: Failure | None = None
        while True:
            if not is_current():
                raise Refused(ModelNotFound(str(call.reference)))
            try:
                await self._try(key, ask, call, answer, tried.until_s, is_current)
                return
            except NoSlotInTime:
                assert failure is not None, "only who is sent again has so little time"
                self._count(ask, call, failure, Withheld.TIME)
                raise Refused(failure) from None
            except Lost as lost:
                if not lost.untouched:
                    raise Refused(ReplicaLost()) from lost
                failure = ReplicaLost()
                if lost.has_ended:  # nothing was sent to the ended replica, so this spends no retry
                    self._count(ask, call, failure, "again")
                    continue
            except Declined as declined:
                failure = declined.failure
                if failure.code not in ELSEWHERE:
                    raise Refused(failure) from declined
            tried = failed(
                tried, lost=isinstance(failure, ReplicaLost), sent_s=call.dispatched_us / 1e6, now_s=time.monotonic(),
                limits=LIMITS,
            )  # fmt: skip
            await asyncio.sleep(self._pause_s(key, ask, call, tried, failure))

    async def _try(
        self, key: VersionKey, ask: Ask, call: Call, answer: Answer, again_by_s: float | None,
        is_current: Callable[[], bool],
    ) -> None:  # fmt: skip
        """Make one attempt. Raises Refused and NoSlotInTime; Lost and Declined, after which the account names no
        replica.
        """
        waits_since_us = self._begin_wait(key, call)
        async with self._throttler.slot(key, ask, call.deadline, again_by_s) as slot:
            while True:
                replica = slot.replica
                _dispatched(call, replica, waits_since_us)
                upstream = self._sender.send(key, call, replica)
                race = None if self._hedges is None else self._hedges.race(key, ask, call, replica, upstream)
                try:
                    if race is None:
                        await self._at(call, answer, slot, upstream)
                    else:
                        await self._race(race, call, answer, slot, upstream)
                    return
                except Declined as declined:
                    if not declined.is_full:
                        raise
                # The replica did nothing for the request, so this was no attempt.
                if not is_current():
                    raise Refused(ModelNotFound(str(call.reference)))
                call.account.timeline.withdraw(Stage.DISPATCHED)
                waits_since_us = self._begin_wait(key, call)
                await slot.exchange()

    def _begin_wait(self, key: VersionKey, call: Call) -> int:
        """Show the request as waiting for a slot. Return the time (monotonic microseconds)."""
        call.stage = "restoring" if self._throttler.is_asleep(key) else "queued"
        return now_us()

    async def _at(self, call: Call, answer: Answer, slot: Slot, upstream: Upstream, race: Race | None = None) -> None:
        """Relay the whole answer of this slot's replica. Raises Refused, Lost, Declined."""
        replica = slot.replica
        try:
            call.upstream = upstream  # from now on a cancellation must reach this replica, also before the head
            async with upstream:
                if upstream.runtime_id is not None:  # a pod has one name, and each of its lives another
                    call.account.runtime_id = upstream.runtime_id
                self._throttler.report_began(replica, upstream.credit)
                await _relay(call, answer, upstream, slot, await upstream.some(), race)
            self._throttler.report_answered(replica)
        except (Refused, Lost, Declined) as failed:
            self._failed_at(replica, call, slot, failed)
            if race is None and upstream.telling is not None:  # it may be sent there again, once that is forgotten
                await asyncio.wait((upstream.telling,))
            raise
        finally:
            if upstream.cost is not None:
                _take_cost(call, slot, upstream, upstream.cost)

    async def _race(self, race: Race, call: Call, answer: Answer, slot: Slot, upstream: Upstream) -> None:
        """Relay the answer of this slot's replica, or of a second one if that begins sooner or the first attempt fails.

        The first slot is free once its replica knows that its answer is not wanted. Raises as `_at`.
        """
        try:
            try:
                with race:
                    await self._at(call, answer, slot, upstream, race)
                return
            except Outrun:
                second = await race.second()
                assert second is not None
                slot.outrun(upstream.telling)
            except (Lost, Declined) as failed:
                if not _may_follow(failed) or (second := await race.second()) is None:
                    raise
                slot.outrun(None)
            await self._go_on(call, answer, second)
        except (Lost, Declined) as failed:
            race.end()
            if _may_follow(failed):  # it may be sent again, to one that must have forgotten it by then
                await race.settled()
            raise
        finally:
            race.end()
            if upstream.telling is not None:
                slot.outrun(upstream.telling)

    async def _go_on(self, call: Call, answer: Answer, second: Second) -> None:
        """Relay the answer of the second attempt, which has begun. Raises as `_at`."""
        replica, frames = second.slot.replica, second.frames
        assert frames is not None
        try:
            await _relay(call, answer, second.upstream, second.slot, frames)
            self._throttler.report_answered(replica)
        except (Refused, Lost, Declined) as failed:
            self._failed_at(replica, call, second.slot, failed)
            raise
        finally:
            second.end()
            await second.ended()
            if second.upstream.cost is not None:
                _take_cost(call, second.slot, second.upstream, second.upstream.cost)

    def _failed_at(self, replica: Replica, call: Call, slot: Slot, failed: Refused | Lost | Declined) -> None:
        blame(self._throttler, replica, failed)
        if isinstance(failed, Declined) or (isinstance(failed, Lost) and failed.untouched):
            call.account.runtime_id = call.upstream = None  # it served nothing of this
            slot.tokens = 0
        if isinstance(failed, Declined):
            call.encoded_in_vain = failed.encoded_tokens

    def _pause_s(self, key: VersionKey, ask: Ask, call: Call, tried: Tried, failure: Failure) -> float:
        """Return the seconds until the next attempt. Raises Refused if there is none."""
        now_s = time.monotonic()
        why = decide(tried, now_s, call.remaining_s(), self._draw(), LIMITS)
        if isinstance(why, Again) and not self._budgets.try_spend((ask.tenant, key), now_s):
            why = Withheld.BUDGET
        self._count(ask, call, failure, "again" if isinstance(why, Again) else why)
        if isinstance(why, Again):
            return why.pause_s
        raise Refused(failure)

    def _count(self, ask: Ask, call: Call, failure: Failure, then: str) -> None:
        self._meters.retry((ask.tenant, call.account.model), failure.code, then)


def _dispatched(call: Call, replica: Replica, waits_since_us: int) -> None:
    """Record the stages of the wait. A request is cold if its replica appeared after the wait began.

    The control plane reports the stages of a restore. A Knative pod has none: it is ready when its row arrives.
    """
    now, account = now_us(), call.account
    account.queued_us += now - waits_since_us
    account.runtime_id = replica.row.runtime_id
    if replica.appeared_us > waits_since_us:
        account.cold = True
        longest_us = max((span.after_us for span in replica.row.restore), default=0)
        # The row may have come again since the poke. The replica was ready when its row first came, at the latest.
        zero_us = min(replica.poked_us or replica.appeared_us, replica.appeared_us - longest_us)
        account.timeline.stamp(Stage.POKED, max(zero_us, account.timeline.began_us))
        late = [span for span in replica.row.restore if zero_us + span.after_us >= account.timeline.began_us]
        account.timeline.graft(late, zero_us)
        if not replica.row.restore:
            account.timeline.stamp(Stage.READY, replica.appeared_us)
    account.timeline.stamp(Stage.DISPATCHED, now)
    call.dispatched_us = now
    call.stage = "prefilling"


def _take_cost(call: Call, slot: Slot, upstream: Upstream, cost: Counts) -> None:
    """Record the cost of a cancelled answer, as the replica reported it."""
    call.account.seen = cost
    call.account.runtime_id = upstream.runtime_id or call.account.runtime_id
    slot.tokens = cost.prompt_tokens + cost.completion_tokens


def _may_follow(failed: Lost | Declined) -> bool:
    """Return whether another replica may answer after this failure."""
    return failed.untouched if isinstance(failed, Lost) else failed.is_full or failed.failure.code in ELSEWHERE


async def _relay(
    call: Call, answer: Answer, upstream: Upstream, slot: Slot, frames: list[Frame], race: Race | None = None
) -> None:
    """Relay these frames and all that follow, no faster than the client reads. Raises Refused for the replica's
    failure, Declined if another replica may still answer.
    """
    account, acknowledged = call.account, 0
    while frames:
        if race is not None and speaks(_told(frames)):
            race.spoke()
            race = None
        seen = account.seen = frames[-1].counts
        slot.tokens = seen.prompt_tokens + seen.completion_tokens
        data = [frame for frame in frames if frame.kind is FrameKind.DATA]
        if data:
            call.stage = "streaming"
            counts = data[-1].counts
            await answer.pass_on(_joined(data), counts.completion_tokens)
            if account.stream and counts.completion_tokens >= acknowledged + ACK_TOKENS:
                acknowledged = counts.completion_tokens
                upstream.acknowledge(acknowledged)
        last = frames[-1]
        if last.kind is FrameKind.FAILED:
            failure = failure_of(last)
            if failure.code == WeightsDamaged.code and answer.try_forget():
                upstream.disown()  # it has counted the request, and another one's record will stand for it
                raise Declined(failure)
            raise Refused(failure)
        if last.kind is FrameKind.END:
            if account.delivered_tokens > acknowledged:  # if we die before the record is durable, it is charged
                upstream.acknowledge(account.delivered_tokens)
            end = _end(last)
            account.unfiltered = end.unfiltered
            account.timeline.graft(end.spans, call.dispatched_us)
            return
        frames = await upstream.some()


def _told(frames: list[Frame]) -> list[Frame]:
    """Return the frames without a final failure after which another replica may answer. The client never sees it."""
    last = frames[-1]
    is_declined = last.kind is FrameKind.FAILED and failure_of(last).code == WeightsDamaged.code
    return frames[:-1] if is_declined else frames


def _joined(frames: Sequence[Frame]) -> bytes:
    return frames[0].payload if len(frames) == 1 else b"".join(frame.payload for frame in frames)


def _end(frame: Frame) -> End:
    try:
        return _ENDS.decode(frame.payload)
    except BadJson:
        return End(finish_reason="stop", unfiltered=True)  # unreadable: don't replay the answer
