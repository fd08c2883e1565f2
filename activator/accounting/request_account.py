"""The account of one running request, and the usage record and timeline made of it. Does no I/O."""

from typing import NamedTuple

import msgspec
from msgspec import UNSET

from activator.limits.tenant_budgets import BudgetReservation
from kelvin.contracts.accounting.usage import OK, RecordOrigin, RequestRecord, is_charged
from kelvin.contracts.serving.control_messages import Principal, StartProblem, TimelineAnswer
from kelvin.contracts.serving.stream_frames import Counts
from kelvin.contracts.timeline import Timeline
from kelvin.contracts.trace_context import TraceContext


class AppliedStep(NamedTuple):
    """The degradation step that was applied to a request."""

    step: str  # name of the step
    header_value: str
    record_value: str
    requested_model: str  # by its caller's name


class Account(msgspec.Struct):
    """The state of a request so far. `started_at_us` is wall-clock microseconds; other times are monotonic."""

    request_id: str
    principal: Principal
    model: str
    stream: bool
    started_at_us: int
    timeline: Timeline
    caller_trace: TraceContext | None = None  # the caller's trace, if it sent one
    version: str | None = None
    runtime_id: str | None = None
    queued_us: int = 0
    cold: bool = False
    counts: Counts = msgspec.field(default_factory=Counts)
    # delivered output tokens; computed ones for `client_response.CHARGED_FAILURES`
    delivered_tokens: int = 0
    budget_reservation: BudgetReservation | None = None  # held from its tenant's budget
    is_settled: bool = False
    is_recorded: bool = False  # the record is durable
    outcome: str | None = None  # set when settled, or when known earlier
    hedge_winner: str | None = None  # for a hedged request: which attempt began the response
    charge_id: str = ""  # digest of its idempotency key; one record per digest is charged; "" without a key
    applied_step: AppliedStep | None = None
    start_problem: StartProblem | None = None  # why the replica it waited for did not start
    unfiltered: bool = False  # part of prompt or output passed the version's filters unchecked

    @property
    def is_repeatable(self) -> bool:
        """Return whether its answer may be replayed: successful, durably recorded and fully filtered."""
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
        """Return the usage record.

        Prompt tokens, cached tokens and device time are as computed. Completion tokens are as delivered, or as computed
        if a non-streamed response was cut for its caller. A request that is not charged has no `once` digest, since
        failures may repeat.
        """
        return RequestRecord(
            request_id=self.request_id,
            origin=RecordOrigin.ACTIVATOR,
            source=source,
            sequence=0,  # the spool sets it
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
            prompt_tokens=self.counts.prompt_tokens,
            cached_tokens=self.counts.cached_tokens,
            completion_tokens=self.delivered_tokens,
            device_us=self.counts.device_us,
            timeline=self.timeline.stamps() if self.cold or outcome != OK else None,
            once=self.charge_id if self.charge_id and is_charged(outcome, self.delivered_tokens) else UNSET,
            degraded=UNSET if self.applied_step is None else self.applied_step.record_value,
        )
