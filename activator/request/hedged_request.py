"""Hedged requests: send a request to a second replica if its first frame is late, and use the response that begins
first.

The other attempt ends before the client gets a byte of it. `hedge_policy.py` decides when a frame is late. The first
attempt runs in the request's own task, as without hedging, and costs one timer. A replica whose response is not used is
told so and records its work itself, without a charge to anyone.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Final

from activator.accounting.metrics import RequestMetrics
from activator.http.exchange import now_us
from activator.queue.policy.queued_request import QueuedRequest
from activator.queue.throttler import Slot, Throttler
from activator.queue.version_queue import Replica
from activator.request.attempt_failure import decode_failure, report_replica_failure
from activator.request.hedge_policy import LIMITS, FirstFrameLatencies, HedgeLimits, hedge_after_s
from activator.request.inference_request import InferenceRequest, UpstreamRequestFactory
from activator.request.retry_policy import RetryBudgets
from activator.routing.policy.version_key import VersionKey
from activator.upstream.upstream_request import UpstreamLost, UpstreamRejected, UpstreamRequest
from kelvin.contracts.serving.stream_frames import Frame, FrameKind

log = logging.getLogger(__name__)

FIRST: Final = "first"
SECOND: Final = "second"
NEITHER: Final = "neither"
WITHHELD: Final = "withheld"  # the retry budget is spent


class HedgeWon(Exception):
    """The second replica began its response first."""


class HedgeAttempt:
    """The second attempt at a request, in a task of its own. It starts at once. The task keeps slot and connection as
    long as the request needs them. `on_begun` is called with the first frame, unless the attempt has ended before.
    """

    def __init__(
        self, throttler: Throttler, slot: Slot, upstream: UpstreamRequest, on_begun: Callable[[], None]
    ) -> None:
        self.slot = slot
        self.upstream = upstream
        self.sent_us = now_us()
        self.frames: list[Frame] | None = None  # the first frames
        self.is_winner = False  # its response goes to the client
        self._throttler = throttler
        self._on_begun = on_begun
        loop = asyncio.get_running_loop()
        self._released: asyncio.Future[None] = loop.create_future()
        self._outcome_known = asyncio.Event()
        self._task = loop.create_task(self._run(), name="second")
        self._task.add_done_callback(self._on_task_done)

    def __repr__(self) -> str:
        return f"<HedgeAttempt begun={self.frames is not None} lead={self.is_winner} over={self._task.done()}>"

    async def wait_outcome(self) -> None:
        """Wait until it has begun a response, or has failed."""
        await self._outcome_known.wait()

    def end(self) -> None:
        """End the attempt, after its response was relayed or because it is not used. Does not wait. Idempotent."""
        if self.is_winner:
            if not self._released.done():
                self._released.set_result(None)
        elif not self._task.done():
            self.upstream.abandon()
            self._task.cancel()

    async def wait_ended(self) -> None:
        """Wait until the task and the cancellation at the replica have ended."""
        await asyncio.wait((self._task,))
        if self.upstream.cancel_task is not None:
            await asyncio.wait((self.upstream.cancel_task,))

    async def _run(self) -> None:
        replica = self.slot.replica
        try:
            async with self.upstream:
                self._throttler.report_response_started(replica, self.upstream.credit)
                frames = await self.upstream.read_frames()
                while not has_begun_answer(frames):
                    frames = await self.upstream.read_frames()
                if frames[-1].kind is FrameKind.FAILED:  # the first replica may still succeed
                    self.upstream.abandon()
                    raise UpstreamRejected(decode_failure(frames[-1]))
                self.frames = frames
                self._outcome_known.set()
                self._on_begun()
                await self._released
        except (UpstreamLost, UpstreamRejected) as failed:
            report_replica_failure(self._throttler, replica, failed)

    def _on_task_done(self, task: "asyncio.Task[None]") -> None:
        """Release the slot. Runs when the task ends, even if it was cancelled before its first step."""
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("unforeseen failure", exc_info=error)
        self._outcome_known.set()
        if self.is_winner:
            self.slot.release()
        else:
            self.slot.release_after(self.upstream.cancel_task)


def has_begun_answer(frames: Sequence[Frame]) -> bool:
    """Return whether a response has begun: a frame that is no heartbeat, or one that counts a token."""
    return any(frame.kind is not FrameKind.HEARTBEAT or frame.counts.completion_tokens for frame in frames)


class Hedges:
    """Hedging of all requests whose version has several replicas. Streams and other responses are measured separately.
    A response that does not stream sends its first frame when it is complete, or a heartbeat after one second.
    """

    def __init__(
        self,
        throttler: Throttler,
        request_factory: UpstreamRequestFactory,
        budgets: RetryBudgets[tuple[str, VersionKey]],
        metrics: RequestMetrics,
        limits: HedgeLimits = LIMITS,
    ) -> None:
        self._throttler = throttler
        self._request_factory = request_factory
        self._budgets = budgets
        self._metrics = metrics
        self._frames = FirstFrameLatencies[tuple[VersionKey, bool]](limits)

    def __repr__(self) -> str:
        return f"<Hedges {self._frames!r}>"

    def open_hedged_request(
        self,
        key: VersionKey,
        queued_request: QueuedRequest,
        inference_request: InferenceRequest,
        replica: Replica,
        first: UpstreamRequest,
    ) -> "HedgedRequest | None":
        """Return a HedgedRequest for an attempt about to be sent, or None if the version has no other replica."""
        return (
            HedgedRequest(self, key, queued_request, inference_request, replica, first)
            if self._throttler.has_several_replicas(key)
            else None
        )

    def after_s(self, key: VersionKey, inference_request: InferenceRequest) -> float | None:
        """Return the seconds after dispatch at which to start the second attempt, or None for never."""
        late_after_s = self._frames.late_after_s((key, inference_request.account.stream))
        return hedge_after_s(late_after_s, inference_request.remaining_s(), is_cold=inference_request.account.cold)

    def try_hedge(
        self,
        hedged_request: "HedgedRequest",
        key: VersionKey,
        queued_request: QueuedRequest,
        inference_request: InferenceRequest,
        excluded_replica: Replica,
    ) -> HedgeAttempt | None:
        """Start the second attempt if another replica has a free slot and the retry budget allows it, else None."""
        slot = self._throttler.try_take_slot_elsewhere(
            key, queued_request, inference_request.deadline, excluded_replica
        )
        if slot is None:
            return None
        if not self._budgets.try_spend((queued_request.tenant, key), time.monotonic()):
            slot.release_after(None)
            self.record_outcome(queued_request, inference_request, WITHHELD)
            return None
        return HedgeAttempt(
            self._throttler,
            slot,
            self._request_factory.open_request(key, inference_request, slot.replica),
            hedged_request.on_second_begun,
        )

    def record_first_frame(self, key: VersionKey, inference_request: InferenceRequest, since_us: int) -> None:
        """Record the first frame of a request that was sent at `since_us`, unless it was cold."""
        if not inference_request.account.cold:
            self._frames.record_first_frame((key, inference_request.account.stream), (now_us() - since_us) / 1e6)

    def record_outcome(self, queued_request: QueuedRequest, inference_request: InferenceRequest, winner: str) -> None:
        """Record which attempt answered a late request."""
        inference_request.account.hedge_winner = winner
        self._metrics.count_hedged_request((queued_request.tenant, inference_request.account.model), winner)


class HedgedRequest:
    """A request with an optional second attempt. Use it as a context manager around the first attempt. It raises
    HedgeWon there if the second attempt's response begins earlier. Always call `end`.
    """

    __slots__ = (
        "_cancelling_before", "_first_upstream", "_has_won", "_hedges", "_inference_request", "_is_counted",
        "_is_inside", "_key", "_queued_request", "_replica", "_second", "_since_us", "_task", "_timer",
    )  # fmt: skip

    def __init__(
        self,
        hedges: Hedges,
        key: VersionKey,
        queued_request: QueuedRequest,
        inference_request: InferenceRequest,
        replica: Replica,
        first: UpstreamRequest,
    ) -> None:
        self._hedges = hedges
        self._key = key
        self._queued_request = queued_request
        self._inference_request = inference_request
        self._replica = replica
        self._first_upstream = first
        self._since_us = inference_request.dispatched_us
        self._timer: asyncio.TimerHandle | None = None
        self._second: HedgeAttempt | None = None
        self._is_inside = self._has_won = self._is_counted = False

    def __enter__(self) -> None:
        self._is_inside = True
        after_s = self._hedges.after_s(self._key, self._inference_request)
        if after_s is not None:
            task = asyncio.current_task()
            assert task is not None
            self._task, self._cancelling_before = task, task.cancelling()
            self._timer = asyncio.get_running_loop().call_later(after_s, self._on_late)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_inside = False
        self._cancel_timer()
        if not self._has_won:
            return
        self._task.uncancel()
        # not cancelled from elsewhere, too
        if kind is not asyncio.CancelledError or self._task.cancelling() <= self._cancelling_before:
            raise HedgeWon from None

    def on_first_byte(self) -> None:
        """Use the first attempt, whose response begins now."""
        self._hedges.record_first_frame(self._key, self._inference_request, self._since_us)
        self.end(FIRST)

    def on_second_begun(self) -> None:
        """Use the second attempt, unless the first one is over. In that case it waits for `second`."""
        if self._is_inside and not self._first_upstream.is_closed:
            self._promote()
            self._first_upstream.abandon()
            self._has_won = True
            self._task.cancel()

    async def second(self) -> HedgeAttempt | None:
        """After the first attempt failed, return the second one once it has begun; None if it fails or there is
        none.
        """
        second = self._second
        if second is None:
            return None
        if not second.is_winner:
            await second.wait_outcome()
            if second.frames is None:
                return None
            self._promote()
        self._attribute_to(second)  # the first attempt may have changed the account meanwhile
        return second

    def end(self, winner: str = NEITHER) -> None:
        """Allow no second attempt from now on, and end a running one. Idempotent."""
        self._cancel_timer()
        second = self._second
        if second is None:
            return
        if not second.is_winner:
            self._count_outcome(winner)
        second.end()

    async def wait_settled(self) -> None:
        """Wait until the second attempt has ended, and an unused first replica has been told to cancel."""
        if self._second is not None:
            await self._second.wait_ended()
        if self._first_upstream.cancel_task is not None:
            await asyncio.wait((self._first_upstream.cancel_task,))

    def _on_late(self) -> None:
        self._timer = None
        if not self._first_upstream.is_closed:
            self._second = self._hedges.try_hedge(
                self, self._key, self._queued_request, self._inference_request, self._replica
            )

    def _promote(self) -> None:
        second = self._second
        assert second is not None
        second.is_winner = True
        self._attribute_to(second)
        self._hedges.record_first_frame(self._key, self._inference_request, self._since_us)
        self._count_outcome(SECOND)

    def _attribute_to(self, second: HedgeAttempt) -> None:
        """Name this attempt's replica in the record, and acknowledge deliveries to it."""
        inference_request = self._inference_request
        inference_request.upstream = second.upstream
        inference_request.account.runtime_id = second.upstream.runtime_id or second.slot.replica.row.runtime_id
        inference_request.dispatched_us = second.sent_us

    def _count_outcome(self, winner: str) -> None:
        if not self._is_counted:
            self._is_counted = True
            self._hedges.record_outcome(self._queued_request, self._inference_request, winner)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
