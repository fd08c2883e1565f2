"""The attempts at one completion: a slot, a replica, its frames to the client; another one where that is safe.

Whether it is tried again, and when, is `policy/retries`'.
"""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from activator.answer import Answer
from activator.breakers import INTEGRITY
from activator.call import Call
from activator.exchange import now_us
from activator.keys import VersionKey
from activator.line import Replica
from activator.meters import Meters
from activator.policy.ask import Ask
from activator.policy.retries import LIMITS, Again, Budgets, RetryLimits, Tried, Withheld, decide, failed
from activator.proxy import Declined, Lost, Told, Upstream, Upstreams
from activator.slots import NoSlotInTime, Slot
from activator.throttler import Throttler
from contracts.artifact_errors import WeightsDamaged
from contracts.errors import Failure, Internal, Refused, Unavailable
from contracts.frames import End, Frame, FrameKind
from contracts.problem import WireFailure, code_of, from_wire
from contracts.timeline import Stage
from contracts.traffic_errors import ReplicaLost
from contracts.usage import ACK_TOKENS
from contracts.wire import decoder

_ELSEWHERE: Final = frozenset({Unavailable.code, WeightsDamaged.code})  # another replica may answer


class Attempts:
    """At the replicas of any version. `source` is the spool that owes the records; `draw` is of [0, 1)."""

    def __init__(
        self,
        throttler: Throttler,
        upstreams: Upstreams,
        source: str,
        meters: Meters,
        limits: RetryLimits = LIMITS,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._throttler = throttler
        self._upstreams = upstreams
        self._source = source
        self._meters = meters
        self._limits = limits
        self._budgets = Budgets[tuple[str, VersionKey]](limits)
        self._draw = draw

    async def serve(self, key: VersionKey, ask: Ask, call: Call, answer: Answer) -> None:
        """The whole answer from some replica: another one only where the first was lost before its first byte, or says
        that what it said was wrong before the client had any of it. Raises Refused; where it is not tried again, with
        what came of the last attempt.
        """
        self._budgets.asked((ask.tenant, key), time.monotonic())
        tried = Tried()
        failure: Failure | None = None
        while True:
            try:
                await self._try(key, ask, call, answer, tried.until_s)
                return
            except NoSlotInTime:
                assert failure is not None, "only who is sent again has so little time"
                self._count(ask, call, failure, Withheld.TIME)
                raise Refused(failure) from None
            except Lost as lost:
                if not lost.untouched:
                    raise Refused(ReplicaLost()) from lost
                failure = ReplicaLost()
            except Declined as declined:
                failure = declined.failure
                if code_of(failure) not in _ELSEWHERE:
                    raise Refused(failure) from declined
            tried = failed(
                tried, lost=isinstance(failure, ReplicaLost), sent_s=call.dispatched_us / 1e6, now_s=time.monotonic(),
                limits=self._limits,
            )  # fmt: skip
            await asyncio.sleep(self._pause_s(key, ask, call, tried, failure))

    async def _try(self, key: VersionKey, ask: Ask, call: Call, answer: Answer, again_by_s: float | None) -> None:
        """At one replica. Raises Refused, NoSlotInTime; Lost, Declined: then the account knows nothing of that
        replica.
        """
        waits_since_us = now_us()
        call.stage = "restoring" if self._throttler.is_asleep(key) else "queued"
        async with self._throttler.slot(key, ask, call.deadline, again_by_s) as slot:
            replica, account = slot.replica, call.account
            _dispatched(call, replica, waits_since_us)
            remaining_ms = call.deadline.remaining_ms(time.monotonic())
            caller = account.principal
            guest = None if caller.tenant == key.tenant else caller.tenant
            told = Told(
                account.request_id, caller.key_id, self._source, remaining_ms, call.ceiling, guest, account.once
            )
            try:
                async with self._upstreams.send(replica, call.path, call.body, told) as upstream:
                    call.upstream = upstream
                    self._throttler.report_began(replica)
                    await _relay(call, answer, upstream, slot)
                self._throttler.report_answered(replica)
            except Refused as refused:
                self._blame(replica, code_of(refused.failure))
                raise
            except (Lost, Declined) as failed:
                self._blame(replica, ReplicaLost.code if isinstance(failed, Lost) else code_of(failed.failure))
                if isinstance(failed, Declined) or failed.untouched:
                    account.runtime_id = call.upstream = None  # it served nothing of this
                    slot.tokens = 0
                raise

    def _blame(self, replica: Replica, code: str) -> None:
        """Tell the throttler of what is the replica's fault. A refusal is not, nor a drain the version's."""
        if code in INTEGRITY or code == ReplicaLost.code:
            self._throttler.report_failed(replica, code)
        elif code in _ELSEWHERE:
            self._throttler.report_failed(replica)

    def _pause_s(self, key: VersionKey, ask: Ask, call: Call, tried: Tried, failure: Failure) -> float:
        """Before the next attempt. Raises Refused where there is none."""
        now_s = time.monotonic()
        why = decide(tried, now_s, call.remaining_s(), self._draw(), self._limits)
        if isinstance(why, Again) and not self._budgets.try_spend((ask.tenant, key), now_s):
            why = Withheld.BUDGET
        self._count(ask, call, failure, "again" if isinstance(why, Again) else why)
        if isinstance(why, Again):
            return why.pause_s
        raise Refused(failure)

    def _count(self, ask: Ask, call: Call, failure: Failure, then: str) -> None:
        self._meters.retry((ask.tenant, call.account.model), code_of(failure), then)


def _dispatched(call: Call, replica: Replica, waits_since_us: int) -> None:
    """Stamp what the wait was made of; the restore's stages only where this request waited for that start."""
    now, account = now_us(), call.account
    account.queued_us += now - waits_since_us
    account.runtime_id = replica.row.runtime_id
    if replica.appeared_us > waits_since_us and replica.row.restore:
        account.cold = True
        longest_us = max(span.after_us for span in replica.row.restore)
        # Told again since it was asked for: it can't have been ready later than its row came.
        zero_us = min(replica.poked_us or replica.appeared_us, replica.appeared_us - longest_us)
        account.timeline.stamp(Stage.POKED, max(zero_us, account.timeline.began_us))
        late = [span for span in replica.row.restore if zero_us + span.after_us >= account.timeline.began_us]
        account.timeline.graft(late, zero_us)
    account.timeline.stamp(Stage.DISPATCHED, now)
    call.dispatched_us = now
    call.stage = "prefilling"


async def _relay(call: Call, answer: Answer, upstream: Upstream, slot: Slot) -> None:
    """Frames to the client, no faster than it takes them. Raises Refused for a failure that the replica tells,
    Declined where another one may answer all the same.
    """
    account, acknowledged = call.account, 0
    while frames := await upstream.some():
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
            failure = _failure(last)
            if code_of(failure) == WeightsDamaged.code and answer.try_forget():
                raise Declined(failure)
            raise Refused(failure)
        if last.kind is FrameKind.END:
            if account.delivered_tokens > acknowledged:  # if we die before the record is durable, it is charged
                upstream.acknowledge(account.delivered_tokens)
            account.timeline.graft(_end(last).spans, call.dispatched_us)


def _joined(frames: Sequence[Frame]) -> bytes:
    return frames[0].payload if len(frames) == 1 else b"".join(frame.payload for frame in frames)


def _failure(frame: Frame) -> Failure:
    try:
        return from_wire(decoder(WireFailure).decode(frame.payload))
    except msgspec.MsgspecError:
        return Internal()


def _end(frame: Frame) -> End:
    try:
        return decoder(End).decode(frame.payload)
    except msgspec.MsgspecError:
        return End(finish_reason="stop")
