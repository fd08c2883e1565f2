"""Make attempts at one completion: take a slot, send the request to its replica, and relay the frames to the client.

`retry_policy.py` decides whether and when a failed attempt is repeated, `hedged_request.py` whether a late one gets a
second replica.
"""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from typing import Final

from activator.accounting.metrics import RequestMetrics
from activator.http.exchange import now_us
from activator.queue.policy.queued_request import QueuedRequest
from activator.queue.throttler import NoSlotInTime, Slot, Throttler
from activator.queue.version_queue import Replica
from activator.request.attempt_failure import RETRYABLE_CODES, decode_failure, report_replica_failure
from activator.request.client_response import ClientResponse
from activator.request.hedged_request import HedgeAttempt, HedgedRequest, Hedges, HedgeWon, has_begun_answer
from activator.request.inference_request import InferenceRequest, UpstreamRequestFactory
from activator.request.retry_policy import LIMITS, Retry, RetryBudgets, RetryState, Withheld, decide, record_failure
from activator.routing.policy.version_key import VersionKey
from activator.upstream.replica_requests import UpstreamLost, UpstreamRejected, UpstreamRequest
from kelvin.contracts.accounting.usage import ACK_TOKENS
from kelvin.contracts.artifact_errors import WeightsDamaged
from kelvin.contracts.errors import Failure, ModelNotFound, Refused
from kelvin.contracts.serving.stream_frames import Counts, Frame, FrameKind, StreamEnd
from kelvin.contracts.timeline import Stage
from kelvin.contracts.traffic_errors import ReplicaLost
from kelvin.contracts.wire import BadJson, decoder

_UNTRIED: Final = RetryState()
_ENDS: Final = decoder(StreamEnd)


class Attempts:
    """Makes attempts at replicas. Without `hedges`, none gets a second replica. `draw` returns a number in [0, 1)."""

    def __init__(
        self,
        throttler: Throttler,
        request_factory: UpstreamRequestFactory,
        budgets: RetryBudgets[tuple[str, VersionKey]],
        metrics: RequestMetrics,
        hedges: Hedges | None,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._throttler = throttler
        self._request_factory = request_factory
        self._budgets = budgets
        self._metrics = metrics
        self._hedges = hedges
        self._draw = draw

    async def serve(
        self,
        key: VersionKey,
        queued_request: QueuedRequest,
        inference_request: InferenceRequest,
        client_response: ClientResponse,
        is_current: Callable[[], bool],
    ) -> None:
        """Send a complete answer to the client, retrying on other replicas.

        A retry is safe in three cases:

        1. The replica was lost before its first byte.
        2. The replica refused the request as `unavailable`, because it drains.
        3. The replica withdrew its answer (`weights_damaged`) before the client had any of it.

        Raises Refused with the last attempt's failure. Raises Refused(ModelNotFound) before an attempt if `is_current`
        returns False, because the request no longer goes to this version.
        """
        self._budgets.record_request((queued_request.tenant, key), time.monotonic())
        tried = _UNTRIED
        failure: Failure | None = None
        while True:
            if not is_current():
                raise Refused(ModelNotFound(str(inference_request.reference)))
            try:
                await self._attempt(key, queued_request, inference_request, client_response, tried.until_s, is_current)
                return
            except NoSlotInTime:
                assert failure is not None, "NoSlotInTime is raised for retries only"
                self._count(queued_request, inference_request, failure, Withheld.TIME)
                raise Refused(failure) from None
            except UpstreamLost as lost:
                if not lost.before_response:
                    raise Refused(ReplicaLost()) from lost
                failure = ReplicaLost()
                if lost.has_ended:  # nothing was sent to the ended replica, so this spends no retry
                    self._count(queued_request, inference_request, failure, "again")
                    continue
            except UpstreamRejected as declined:
                failure = declined.failure
                if failure.code not in RETRYABLE_CODES:
                    raise Refused(failure) from declined
            tried = record_failure(
                tried, lost=isinstance(failure, ReplicaLost), sent_s=inference_request.dispatched_us / 1e6,
                now_s=time.monotonic(), limits=LIMITS,
            )  # fmt: skip
            await asyncio.sleep(self._pause_s(key, queued_request, inference_request, tried, failure))

    async def _attempt(
        self, key: VersionKey, queued_request: QueuedRequest, inference_request: InferenceRequest, client_response:
        ClientResponse, again_by_s: float | None, is_current: Callable[[], bool],
    ) -> None:  # fmt: skip
        """Make one attempt. Raises Refused or NoSlotInTime. Raises UpstreamLost or UpstreamRejected, with
        `account.runtime_id` None.
        """
        waits_since_us = self._begin_wait(key, inference_request)
        async with self._throttler.slot(key, queued_request, inference_request.deadline, again_by_s) as slot:
            while True:
                replica = slot.replica
                _record_dispatch(inference_request, replica, waits_since_us)
                upstream = self._request_factory.send(key, inference_request, replica)
                hedged_request = (
                    None
                    if self._hedges is None
                    else self._hedges.open_hedged_request(key, queued_request, inference_request, replica, upstream)
                )
                try:
                    if hedged_request is None:
                        await self._relay_from(inference_request, client_response, slot, upstream)
                    else:
                        await self._relay_hedged(hedged_request, inference_request, client_response, slot, upstream)
                    return
                except UpstreamRejected as declined:
                    if not declined.is_full:
                        raise
                # The replica did nothing for the request, so this was no attempt.
                if not is_current():
                    raise Refused(ModelNotFound(str(inference_request.reference)))
                inference_request.account.timeline.clear_stage(Stage.DISPATCHED)
                waits_since_us = self._begin_wait(key, inference_request)
                await slot.requeue()

    def _begin_wait(self, key: VersionKey, inference_request: InferenceRequest) -> int:
        """Mark the request as waiting for a slot, and return the current monotonic microseconds."""
        inference_request.stage = "restoring" if self._throttler.is_asleep(key) else "queued"
        return now_us()

    async def _relay_from(
        self,
        inference_request: InferenceRequest,
        client_response: ClientResponse,
        slot: Slot,
        upstream: UpstreamRequest,
        hedged_request: HedgedRequest | None = None,
    ) -> None:
        """Relay the whole response of this slot's replica. Raises Refused, UpstreamLost, UpstreamRejected."""
        replica = slot.replica
        try:
            # From now on a cancellation must reach this replica, also before the head.
            inference_request.upstream = upstream
            async with upstream:
                # A pod keeps its name across container restarts, so use the id that the runtime reports.
                if upstream.runtime_id is not None:
                    inference_request.account.runtime_id = upstream.runtime_id
                self._throttler.report_began(replica, upstream.credit)
                await _relay(
                    inference_request, client_response, upstream, slot, await upstream.read_frames(), hedged_request
                )
            self._throttler.report_answered(replica)
        except (Refused, UpstreamLost, UpstreamRejected) as failed:
            self._record_failure(replica, inference_request, slot, failed)
            if (
                hedged_request is None and upstream.cancel_task is not None
                # Wait until the replica has dropped this request id, or it would refuse a retry as a duplicate.
            ):
                await asyncio.wait((upstream.cancel_task,))
            raise
        finally:
            if upstream.cost is not None:
                _record_cost(inference_request, slot, upstream, upstream.cost)

    async def _relay_hedged(
        self,
        hedged_request: HedgedRequest,
        inference_request: InferenceRequest,
        client_response: ClientResponse,
        slot: Slot,
        upstream: UpstreamRequest,
    ) -> None:
        """Relay the response of this slot's replica, or of a second one if that begins earlier or the first attempt
        fails. The first slot is released after its replica has been told to cancel. Raises as `_relay_from`.
        """
        try:
            try:
                with hedged_request:
                    await self._relay_from(inference_request, client_response, slot, upstream, hedged_request)
                return
            except HedgeWon:
                second = await hedged_request.second()
                assert second is not None
                slot.release_after(upstream.cancel_task)
            except (UpstreamLost, UpstreamRejected) as failed:
                if not _may_hedge_answer(failed) or (second := await hedged_request.second()) is None:
                    raise
                slot.release_after(None)
            await self._relay_hedge(inference_request, client_response, second)
        except (UpstreamLost, UpstreamRejected) as failed:
            hedged_request.end()
            if _may_hedge_answer(
                failed
            ):  # a retry may go to the same replica, which must have dropped the request by then
                await hedged_request.wait_settled()
            raise
        finally:
            hedged_request.end()
            if upstream.cancel_task is not None:
                slot.release_after(upstream.cancel_task)

    async def _relay_hedge(
        self, inference_request: InferenceRequest, client_response: ClientResponse, second: HedgeAttempt
    ) -> None:
        """Relay the response of the second attempt, which has begun. Raises as `_relay_from`."""
        replica, frames = second.slot.replica, second.frames
        assert frames is not None
        try:
            await _relay(inference_request, client_response, second.upstream, second.slot, frames)
            self._throttler.report_answered(replica)
        except (Refused, UpstreamLost, UpstreamRejected) as failed:
            self._record_failure(replica, inference_request, second.slot, failed)
            raise
        finally:
            second.end()
            await second.wait_ended()
            if second.upstream.cost is not None:
                _record_cost(inference_request, second.slot, second.upstream, second.upstream.cost)

    def _record_failure(
        self,
        replica: Replica,
        inference_request: InferenceRequest,
        slot: Slot,
        failed: Refused | UpstreamLost | UpstreamRejected,
    ) -> None:
        report_replica_failure(self._throttler, replica, failed)
        if isinstance(failed, UpstreamRejected) or (isinstance(failed, UpstreamLost) and failed.before_response):
            # the replica served nothing of this request
            inference_request.account.runtime_id = inference_request.upstream = None
            slot.tokens = 0
        if isinstance(failed, UpstreamRejected):
            inference_request.rejected_prompt_tokens = failed.encoded_tokens

    def _pause_s(
        self,
        key: VersionKey,
        queued_request: QueuedRequest,
        inference_request: InferenceRequest,
        tried: RetryState,
        failure: Failure,
    ) -> float:
        """Return the seconds until the next attempt. Raises Refused if there is none."""
        now_s = time.monotonic()
        why = decide(tried, now_s, inference_request.remaining_s(), self._draw(), LIMITS)
        if isinstance(why, Retry) and not self._budgets.try_spend((queued_request.tenant, key), now_s):
            why = Withheld.BUDGET
        self._count(queued_request, inference_request, failure, "again" if isinstance(why, Retry) else why)
        if isinstance(why, Retry):
            return why.pause_s
        raise Refused(failure)

    def _count(
        self, queued_request: QueuedRequest, inference_request: InferenceRequest, failure: Failure, then: str
    ) -> None:
        self._metrics.count_failed_attempt((queued_request.tenant, inference_request.account.model), failure.code, then)


def _record_dispatch(inference_request: InferenceRequest, replica: Replica, waits_since_us: int) -> None:
    """Record the stages of the wait. A request is cold if its replica appeared after the wait began. The control plane
    reports the stages of a restore. A Knative pod has none: it is ready when its row arrives.
    """
    now, account = now_us(), inference_request.account
    account.queued_us += now - waits_since_us
    account.runtime_id = replica.row.runtime_id
    if replica.appeared_us > waits_since_us:
        account.cold = True
        longest_us = max((span.after_us for span in replica.row.restore), default=0)
        # The row may have been updated since the wake. The replica was ready when its row first arrived, at the latest.
        zero_us = min(replica.wake_sent_us or replica.appeared_us, replica.appeared_us - longest_us)
        account.timeline.stamp(Stage.POKED, max(zero_us, account.timeline.began_us))
        late = [span for span in replica.row.restore if zero_us + span.after_us >= account.timeline.began_us]
        account.timeline.merge_spans(late, zero_us)
        if not replica.row.restore:
            account.timeline.stamp(Stage.READY, replica.appeared_us)
    account.timeline.stamp(Stage.DISPATCHED, now)
    inference_request.dispatched_us = now
    inference_request.stage = "prefilling"


def _record_cost(inference_request: InferenceRequest, slot: Slot, upstream: UpstreamRequest, cost: Counts) -> None:
    """Record the cost of a cancelled response, as the replica reported it."""
    inference_request.account.counts = cost
    inference_request.account.runtime_id = upstream.runtime_id or inference_request.account.runtime_id
    slot.tokens = cost.prompt_tokens + cost.completion_tokens


def _may_hedge_answer(failed: UpstreamLost | UpstreamRejected) -> bool:
    """Return whether the other attempt of a hedged request may answer after this failure."""
    return (
        failed.before_response
        if isinstance(failed, UpstreamLost)
        else failed.is_full or failed.failure.code in RETRYABLE_CODES
    )


async def _relay(
    inference_request: InferenceRequest,
    client_response: ClientResponse,
    upstream: UpstreamRequest,
    slot: Slot,
    frames: list[Frame],
    hedged_request: HedgedRequest | None = None,
) -> None:
    """Relay these frames and all later ones, no faster than the client reads. Raises Refused with the replica's
    failure, or UpstreamRejected if another replica may still answer.
    """
    account, acknowledged = inference_request.account, 0
    while frames:
        if hedged_request is not None and has_begun_answer(_visible_frames(frames)):
            hedged_request.on_first_byte()
            hedged_request = None
        seen = account.counts = frames[-1].counts
        slot.tokens = seen.prompt_tokens + seen.completion_tokens
        data = [frame for frame in frames if frame.kind is FrameKind.DATA]
        if data:
            inference_request.stage = "streaming"
            counts = data[-1].counts
            await client_response.relay_data(_join_payloads(data), counts.completion_tokens)
            if account.stream and counts.completion_tokens >= acknowledged + ACK_TOKENS:
                acknowledged = counts.completion_tokens
                upstream.acknowledge(acknowledged)
        last = frames[-1]
        if last.kind is FrameKind.FAILED:
            failure = decode_failure(last)
            if failure.code == WeightsDamaged.code and client_response.try_forget():
                upstream.abandon()  # the replica has counted the request, but another replica's record will count
                raise UpstreamRejected(failure)
            raise Refused(failure)
        if last.kind is FrameKind.END:
            if account.delivered_tokens > acknowledged:  # it is charged even if we die before the record is durable
                upstream.acknowledge(account.delivered_tokens)
            end = _decode_end(last)
            account.unfiltered = end.unfiltered
            account.timeline.merge_spans(end.spans, inference_request.dispatched_us)
            return
        frames = await upstream.read_frames()


def _visible_frames(frames: list[Frame]) -> list[Frame]:
    """Return the frames without a final failure that another replica can make up for. The client never sees it."""
    last = frames[-1]
    is_declined = last.kind is FrameKind.FAILED and decode_failure(last).code == WeightsDamaged.code
    return frames[:-1] if is_declined else frames


def _join_payloads(frames: Sequence[Frame]) -> bytes:
    return frames[0].payload if len(frames) == 1 else b"".join(frame.payload for frame in frames)


def _decode_end(frame: Frame) -> StreamEnd:
    try:
        return _ENDS.decode(frame.payload)
    except BadJson:
        return StreamEnd(finish_reason="stop", unfiltered=True)  # unreadable: don't replay the answer
