"""What is known of one request while it is under way, and the record and the timeline that come of it. Does no I/O."""

from typing import NamedTuple

import msgspec
from msgspec import UNSET

from activator.limits.tenant_budgets import OK, BudgetReservation, is_charged
from kelvin.contracts.accounting.usage import RecordOrigin, RequestRecord
from kelvin.contracts.serving.control_messages import Principal, StartProblem, TimelineAnswer
from kelvin.contracts.serving.stream_frames import Counts
from kelvin.contracts.timeline import Timeline
from kelvin.contracts.trace_context import TraceContext


class Degraded(NamedTuple):
    """What a model's ladder gave up for a request."""

    step: str  # as the ladder calls it
    told: str  # to the caller
    recorded: str
    asked: str  # the model that was asked, as its caller calls it


class Account(msgspec.Struct):
    """What is known of a request so far. Times are microseconds: `started_at_us` of the wall, the others monotonic."""

    request_id: str
    principal: Principal
    model: str
    stream: bool
    started_at_us: int
    timeline: Timeline
    caller: TraceContext | None = None  # the trace that it belongs to, where its caller brought one
    version: str | None = None
    runtime_id: str | None = None
    queued_us: int = 0
    cold: bool = False
    seen: Counts = msgspec.field(default_factory=Counts)
    delivered_tokens: int = 0  # of the answer; computed tokens if a non-streamed answer was cancelled for its caller
    budget_reservation: BudgetReservation | None = None  # of its tenant's budget
    is_settled: bool = False
    is_recorded: bool = False  # durably
    outcome: str | None = None  # once it is settled, or that is known otherwise
    hedged: str | None = None  # which of two replicas began its answer, where two were asked
    once: str = ""  # digest of its idempotency key: of records with the same one, one is charged. "" without a key
    degraded: Degraded | None = None
    start_problem: StartProblem | None = None  # why the replica that it waited for did not start
    unfiltered: bool = False  # some of prompt or answer passed the version's filters unchecked

    @property
    def is_repeatable(self) -> bool:
        """Return whether its answer may be replayed: it is successful, durably recorded and fully filtered."""
        return self.outcome == OK and self.is_recorded and not self.unfiltered

    def snapshot_timeline(self) -> TimelineAnswer:
        """Return the timeline as it stands."""
        return TimelineAnswer(
            request_id=self.request_id,
            model=self.model,
            version=self.version,
            cold=self.cold,
            stamps=self.timeline.stamps(),
            start_problem=self.start_problem,
        )

    def record(self, source: str, outcome: str, status: int, ended_at_us: int) -> RequestRecord:
        """Return the usage record. Prompt, cached tokens and device time are as computed, completion tokens as
        delivered, or as computed if a non-streamed answer was cancelled for its caller. A request that is not charged
        has no `once` name, since failures may repeat.
        """
        return RequestRecord(
            request_id=self.request_id,
            origin=RecordOrigin.ACTIVATOR,
            source=source,
            sequence=0,  # the spool's to give
            tenant=self.principal.tenant,
            model=self.model,
            version=self.version,
            key_id=self.principal.key_id,
            runtime_id=self.runtime_id,
            started_at_us=self.started_at_us,
            ended_at_us=max(ended_at_us, self.started_at_us),  # the wall clock may step back
            queued_us=self.queued_us,
            outcome=outcome,
            status=status,
            stream=self.stream,
            prompt_tokens=self.seen.prompt_tokens,
            cached_tokens=self.seen.cached_tokens,
            completion_tokens=self.delivered_tokens,
            device_us=self.seen.device_us,
            timeline=self.timeline.stamps() if self.cold or outcome != OK else None,
            once=self.once if self.once and is_charged(outcome, self.delivered_tokens) else UNSET,
            degraded=UNSET if self.degraded is None else self.degraded.recorded,
        )
