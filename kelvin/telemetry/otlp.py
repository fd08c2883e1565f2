"""Send traces to an OpenTelemetry collector: OTLP over HTTP, protobuf. Only this file imports OpenTelemetry.

Its SDK instruments nothing. This module converts finished facts to the SDK's data model and uses its exporter.
"""

import logging
from collections.abc import Sequence
from typing import Final

from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from kelvin.telemetry.policy.spans import RequestFacts, RestoreFacts, TraceSpan, request_spans, restore_spans

TIMEOUT_S: Final = 5.0
_SCOPE: Final = InstrumentationScope("kelvin")
_SAMPLED: Final = TraceFlags(TraceFlags.SAMPLED)


class OtlpCollector:
    """A connection to a collector. Calls block, each for at most TIMEOUT_S. Use it from one thread. `instance` names
    this lifetime of the process.
    """

    def __init__(self, endpoint: str, process: str, instance: str, version: str) -> None:
        # The exporter would log failures with addresses and the collector's texts. `trace_sender` counts them instead.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        self._resource = Resource(
            {
                "service.namespace": "kelvin",
                "service.name": process,
                "service.instance.id": instance,
                "service.version": version,
            }
        )
        plain = Compression.NoCompression
        self._spans = OTLPSpanExporter(f"{endpoint}/v1/traces", timeout=TIMEOUT_S, compression=plain)

    def export(self, batch: Sequence[RequestFacts | RestoreFacts]) -> bool:
        """Send traces. Return whether the collector accepted them."""
        spans = [self._span(span) for facts in batch for span in _spans_of(facts)]
        return self._spans.export(spans) is SpanExportResult.SUCCESS

    def close(self) -> None:
        """Make a running call end soon. May be called from another thread."""
        self._spans.shutdown()  # type: ignore[no-untyped-call]

    def _span(self, span: TraceSpan) -> ReadableSpan:
        parent = None if span.parent_id is None else _context(span.trace_id, span.parent_id)
        links = () if span.linked_span is None else (Link(_context(*span.linked_span)),)
        status = Status(StatusCode.UNSET) if span.failure is None else Status(StatusCode.ERROR, span.failure)
        return ReadableSpan(
            name=span.name,
            context=_context(span.trace_id, span.span_id),
            parent=parent,
            resource=self._resource,
            attributes=span.attributes,
            links=links,
            kind=SpanKind.SERVER if span.is_server else SpanKind.INTERNAL,
            instrumentation_scope=_SCOPE,
            status=status,
            start_time=span.begin_us * 1000,
            end_time=span.end_us * 1000,
        )


def _spans_of(facts: RequestFacts | RestoreFacts) -> list[TraceSpan]:
    return request_spans(facts) if isinstance(facts, RequestFacts) else restore_spans(facts)


def _context(trace_id: int, span_id: int) -> SpanContext:
    return SpanContext(trace_id, span_id, is_remote=False, trace_flags=_SAMPLED)
