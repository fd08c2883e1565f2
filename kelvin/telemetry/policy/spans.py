"""Build the trace of a request or restore from its finished stages: one span for the whole, and one per stage.

A stage's span begins where the stage before it ended, as in the timeline. Ids are derived from the id of the request or
replica. So a request's trace can link to the restore that it waited for. Sampling uses the ids too.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from kelvin.contracts.timeline import Stage, Stamp
from kelvin.contracts.trace_context import TraceContext, span_id_of, trace_id_of
from kelvin.telemetry.policy.labels import OK

Value = str | int | bool
_LOWER_64_BITS: Final = (1 << 64) - 1
_BY_CONTROL_PLANE: Final = frozenset({Stage.DECIDED, Stage.PROMOTED})
_BY_RUNTIME: Final = frozenset({Stage.LEASED, Stage.BOUND, Stage.READY, Stage.TOKENIZED, Stage.PREFILLED})


@dataclass(frozen=True, slots=True)
class TraceSpan:
    """A span. Times are microseconds of the wall clock. `failure` is a code."""

    name: str
    trace_id: int
    span_id: int
    parent_id: int | None
    begin_us: int
    end_us: int
    attributes: Mapping[str, Value]
    failure: str | None = None
    is_server: bool = False  # it serves a call from outside
    linked_span: tuple[int, int] | None = None  # trace id and span id of the restore that it waited for


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """Facts about a finished request."""

    request_id: str
    caller: TraceContext | None
    tenant: str
    model: str
    version: str | None
    runtime_id: str | None
    cold: bool
    outcome: str
    status: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    began_at_us: int
    stamps: tuple[Stamp, ...]

    @property
    def trace_id(self) -> int:
        """Return the caller's trace id if it sent one, else an id derived from the request's."""
        return trace_id_of(self.request_id) if self.caller is None else self.caller.trace_id

    @property
    def is_always_sampled(self) -> bool:
        """Return whether the request is traced regardless of the sample ratio: it was cold or failed."""
        return self.cold or self.outcome != OK


@dataclass(frozen=True, slots=True)
class RestoreFacts:
    """Facts about a finished restore. A failed restore has no stamps."""

    name: str  # the replica's name, or a name of the failure
    tenant: str
    model: str
    version: str
    outcome: str
    began_at_us: int
    stamps: tuple[Stamp, ...] = ()
    bytes_by_tier: Mapping[str, int] = field(default_factory=dict)


def request_spans(facts: RequestFacts) -> list[TraceSpan]:
    """Return the span of the whole request, then those of its stages."""
    waited_for = None
    if facts.cold and facts.runtime_id is not None:
        waited_for = (trace_id_of(facts.runtime_id), span_id_of(facts.runtime_id))
    attributes: dict[str, Value | None] = {
        "kelvin.request_id": facts.request_id,
        "kelvin.tenant": facts.tenant,
        "kelvin.model": facts.model,
        "kelvin.version": facts.version,
        "kelvin.runtime_id": facts.runtime_id,
        "kelvin.cold": facts.cold,
        "kelvin.outcome": facts.outcome,
        "http.response.status_code": facts.status,
        "gen_ai.usage.input_tokens": facts.prompt_tokens,
        "gen_ai.usage.output_tokens": facts.completion_tokens,
        "kelvin.cached_tokens": facts.cached_tokens,
    }
    whole = TraceSpan(
        name="request",
        trace_id=facts.trace_id,
        span_id=span_id_of(facts.request_id),
        parent_id=None if facts.caller is None else facts.caller.span_id,
        begin_us=facts.began_at_us,
        end_us=_end_us(facts.began_at_us, facts.stamps),
        attributes=_known_attributes(attributes),
        failure=None if facts.outcome == OK else facts.outcome,
        is_server=True,
        linked_span=waited_for,
    )
    return [whole, *_stage_spans(whole, facts.request_id, facts.stamps)]


def restore_spans(facts: RestoreFacts) -> list[TraceSpan]:
    """Return the span of a whole restore, then those of its stages."""
    whole = TraceSpan(
        name="restore",
        trace_id=trace_id_of(facts.name),
        span_id=span_id_of(facts.name),
        parent_id=None,
        begin_us=facts.began_at_us,
        end_us=_end_us(facts.began_at_us, facts.stamps),
        attributes={
            "kelvin.tenant": facts.tenant,
            "kelvin.model": facts.model,
            "kelvin.version": facts.version,
            "kelvin.outcome": facts.outcome,
            **({"kelvin.runtime_id": facts.name} if facts.outcome == OK else {}),
            **{f"kelvin.bytes.{tier}": nbytes for tier, nbytes in facts.bytes_by_tier.items()},
        },
        failure=None if facts.outcome == OK else facts.outcome,
    )
    return [whole, *_stage_spans(whole, facts.name, facts.stamps)]


def _stage_spans(whole: TraceSpan, name: str, stamps: Iterable[Stamp]) -> list[TraceSpan]:
    spans, before_us = [], 0
    for stamp in stamps:
        spans.append(
            TraceSpan(
                name=str(stamp.stage),
                trace_id=whole.trace_id,
                span_id=span_id_of(name, str(stamp.stage)),
                parent_id=whole.span_id,
                begin_us=whole.begin_us + before_us,
                end_us=whole.begin_us + stamp.at_us,
                attributes={"kelvin.process": _process_of_stage(stamp.stage)},
            )
        )
        before_us = stamp.at_us
    return spans


def _process_of_stage(stage: Stage) -> str:
    """Return the process that stamps this stage."""
    if stage in _BY_CONTROL_PLANE:
        return "controlplane"
    return "runtime" if stage in _BY_RUNTIME else "activator"


def _end_us(began_us: int, stamps: tuple[Stamp, ...]) -> int:
    return began_us + (stamps[-1].at_us if stamps else 0)


def _known_attributes(attributes: Mapping[str, Value | None]) -> dict[str, Value]:
    return {name: value for name, value in attributes.items() if value is not None}


def is_sampled(trace_id: int, share: float) -> bool:
    """Return whether the trace is in the sampled share (OpenTelemetry's TraceIdRatioBased: the lower 64 bits). All
    processes that see the trace decide the same.
    """
    return (trace_id & _LOWER_64_BITS) < round(share * (1 << 64))


def is_sampled_for_caller(trace_id: int, caller: TraceContext | None, share: float) -> bool:
    """Return whether the trace is sampled: it is in the share, and its caller did not say that it is not recorded. A
    caller that records its trace does not raise the share. Outsiders must not decide how much is written here.
    """
    return (caller is None or caller.sampled) and is_sampled(trace_id, share)
