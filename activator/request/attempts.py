"""Make attempts at one completion: take a slot, send the request to its replica, and relay the frames to the client.

`attempt_failure.py` decides whether another replica may answer, `retry_policy.py` when and how often,
`hedged_request.py` whether a late one gets a second replica.
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
from activator.request.attempt_failure import decode_failure, may_retry, report_replica_failure
from activator.request.client_response import ClientResponse
from activator.request.hedged_request import HedgeAttempt, HedgedRequest, Hedges, HedgeWon, has_begun_answer
from activator.request.inference_request import InferenceRequest, UpstreamRequestFactory
from activator.request.retry_policy import LIMITS, Retry, RetryBudgets, RetryState, Withheld, decide, record_failure
from activator.routing.policy.version_key import VersionKey
from activator.upstream.upstream_request import UpstreamLost, UpstreamRejected, UpstreamRequest
from kelvin.contracts.accounting.usage import ACK_TOKENS
from kelvin.contracts.artifact_errors import WeightsDamaged
from kelvin.contracts.errors import Failure, ModelNotFound, Refused
from kelvin.contracts.serving.stream_frames import Counts, Frame, FrameKind, StreamEnd
from kelvin.contracts.timeline import Stage
from kelvin.contracts.traffic_errors import ReplicaLost
from kelvin.contracts.wire import BadJson, decoder

_NO_FAILURES: Final = RetryState()
_END_DECODER: Final = decoder(StreamEnd)


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
        """Send a complete answer to the client, retrying on other replicas if that is safe (`may_retry`).

        Raises Refused with the last attempt's failure. Raises Refused(ModelNotFound) before an attempt if `is_current`
        returns False, because the request no longer goes to this version.
        """
        self._budgets.record_request((queued_request.tenant, key), time.monotonic())
        retry_state = _NO_FAILURES
        failure: Failure | None = None
        while True:
            if not is_current():
                raise Refused(ModelNotFound(str(inference_request.reference)))
            try:
                await self._attempt(
                    key, queued_request, inference_request, client_response, retry_state.until_s, is_current
                )
                return
            except NoSlotInTime:
                assert failure is not None, "NoSlotInTime is raised for retries only"
                self._count_failure(queued_request, inference_request, failure, Withheld.TIME)
                raise Refused(failure) from None
            except (UpstreamLost, UpstreamRejected) as error:
                failure = ReplicaLost() if isinstance(error, UpstreamLost) else error.failure
                if not may_retry(error):
                    raise Refused(failure) from error
                if isinstance(error, UpstreamLost) and error.has_ended:
                    # Nothing was sent to the ended replica, so this spends no retry.
                    self._count_failure(queued_request, inference_request, failure, "again")
                    continue
            retry_state = record_failure(
                retry_state, is_lost=isinstance(failure, ReplicaLost), sent_s=inference_request.dispatched_us / 1e6,
                now_s=time.monotonic(), limits=LIMITS,
            )  # fmt: skip
            await asyncio.sleep(self._spend_retry(key, queued_request, inference_request, retry_state, failure))

    async def _attempt(
        self, key: VersionKey, queued_request: QueuedRequest, inference_request: InferenceRequest, client_response:
        ClientResponse, retry_by_s: float | None, is_current: Callable[[], bool],
    ) -> None:  # fmt: skip
        """Make one attempt. Raises Refused or NoSlotInTime. Raises UpstreamLost or UpstreamRejected, with
        `account.runtime_id` None.
        """
        waits_since_us = self._begin_wait(key, inference_request)
        async with self._throttler.slot(key, queued_request, inference_request.deadline, retry_by_s) as slot:
            while True:
                replica = slot.replica
                _record_wait(inference_request, replica, waits_since_us)
                upstream = self._request_factory.open_request(key, inference_request, replica)
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
                except UpstreamRejected as rejection:
                    if not rejection.is_full:
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
                self._throttler.report_response_started(replica, upstream.credit)
                await _relay(
                    inference_request, client_response, upstream, slot, await upstream.read_frames(), hedged_request
                )
            self._throttler.report_response_completed(replica)
        except (Refused, UpstreamLost, UpstreamRejected) as error:
            self._record_failure(replica, inference_request, slot, error)
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
            except (UpstreamLost, UpstreamRejected) as error:
                if not may_retry(error) or (second := await hedged_request.second()) is None:
                    raise
                slot.release_after(None)
            await self._relay_hedge(inference_request, client_response, second)
        except (UpstreamLost, UpstreamRejected) as error:
            hedged_request.end()
            if may_retry(error):  # a retry may go to the same replica, which must have dropped the request by then
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
            self._throttler.report_response_completed(replica)
        except (Refused, UpstreamLost, UpstreamRejected) as error:
            self._record_failure(replica, inference_request, second.slot, error)
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
        error: Refused | UpstreamLost | UpstreamRejected,
    ) -> None:
        report_replica_failure(self._throttler, replica, error)
        if isinstance(error, UpstreamRejected) or (isinstance(error, UpstreamLost) and error.before_response):
            # the replica served nothing of this request
            inference_request.account.runtime_id = inference_request.upstream = None
            slot.tokens = 0
        if isinstance(error, UpstreamRejected):
            inference_request.rejected_prompt_tokens = error.encoded_tokens

    def _spend_retry(
        self,
        key: VersionKey,
        queued_request: QueuedRequest,
        inference_request: InferenceRequest,
        retry_state: RetryState,
        failure: Failure,
    ) -> float:
        """Spend a retry of the budget and return the pause before it, in seconds. Raises Refused if there is none."""
        now_s = time.monotonic()
        decision = decide(retry_state, now_s, inference_request.remaining_s(), self._draw(), LIMITS)
        if isinstance(decision, Retry) and not self._budgets.try_spend((queued_request.tenant, key), now_s):
            decision = Withheld.BUDGET
        outcome = "again" if isinstance(decision, Retry) else decision
        self._count_failure(queued_request, inference_request, failure, outcome)
        if isinstance(decision, Retry):
            return decision.pause_s
        raise Refused(failure)

    def _count_failure(
        self, queued_request: QueuedRequest, inference_request: InferenceRequest, failure: Failure, outcome: str
    ) -> None:
        tenant_and_model = (queued_request.tenant, inference_request.account.model)
        self._metrics.count_failed_attempt(tenant_and_model, failure.code, outcome)


def _record_wait(inference_request: InferenceRequest, replica: Replica, waits_since_us: int) -> None:
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
            if failure.code == WeightsDamaged.code and client_response.try_discard_data():
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
        return _END_DECODER.decode(frame.payload)
    except BadJson:
        return StreamEnd(finish_reason="stop", unfiltered=True)  # unreadable: don't replay the answer
