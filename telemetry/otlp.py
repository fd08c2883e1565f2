"""Traces and metrics to an OpenTelemetry collector: OTLP over HTTP, protobuf. The only file that imports OpenTelemetry.

Nothing is instrumented by its SDK: finished facts are put into its data model, and its exporters do the rest.
"""

import logging
import time
from collections.abc import Sequence
from typing import Final

from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricExportResult,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from telemetry.policy.instruments import Family, Kind, Labels, Spread
from telemetry.policy.spans import RequestFacts, RestoreFacts, Span, request_spans, restore_spans

TIMEOUT_S: Final = 5.0
_SCOPE: Final = InstrumentationScope("kelvin")
_SAMPLED: Final = TraceFlags(TraceFlags.SAMPLED)


class OtlpCollector:
    """See `Collector`. `instance` names this life of the process."""

    def __init__(self, endpoint: str, process: str, instance: str, version: str) -> None:
        # It says what it could not send, with addresses and the collector's words; `sender` counts instead.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        self._resource = Resource(
            {
                "service.namespace": "kelvin",
                "service.name": process,
                "service.instance.id": instance,
                "service.version": version,
            }
        )
        self._began_ns = time.time_ns()
        plain = Compression.NoCompression
        self._spans = OTLPSpanExporter(f"{endpoint}/v1/traces", timeout=TIMEOUT_S, compression=plain)
        self._points = OTLPMetricExporter(f"{endpoint}/v1/metrics", timeout=TIMEOUT_S, compression=plain)

    def traces(self, batch: Sequence[RequestFacts | RestoreFacts]) -> bool:
        """See `Collector`."""
        spans = [self._span(span) for facts in batch for span in _spans_of(facts)]
        return self._spans.export(spans) is SpanExportResult.SUCCESS

    def metrics(self, families: Sequence[Family]) -> bool:
        """See `Collector`."""
        now_ns = time.time_ns()
        metrics = [self._metric(family, now_ns) for family in families if family.values or family.spreads]
        scope = ScopeMetrics(_SCOPE, metrics, "")
        data = MetricsData([ResourceMetrics(self._resource, [scope], "")])
        return self._points.export(data, timeout_millis=TIMEOUT_S * 1000) is MetricExportResult.SUCCESS

    def close(self) -> None:
        """See `Collector`."""
        self._spans.shutdown()  # type: ignore[no-untyped-call]
        self._points.shutdown()

    def _span(self, span: Span) -> ReadableSpan:
        parent = None if span.parent_id is None else _context(span.trace_id, span.parent_id)
        links = () if span.follows is None else (Link(_context(*span.follows)),)
        status = Status(StatusCode.UNSET) if span.failure is None else Status(StatusCode.ERROR, span.failure)
        return ReadableSpan(
            name=span.name,
            context=_context(span.trace_id, span.span_id),
            parent=parent,
            resource=self._resource,
            attributes=span.attributes,
            links=links,
            kind=SpanKind.SERVER if span.serves else SpanKind.INTERNAL,
            instrumentation_scope=_SCOPE,
            status=status,
            start_time=span.begin_us * 1000,
            end_time=span.end_us * 1000,
        )

    def _metric(self, family: Family, now_ns: int) -> Metric:
        points = [
            NumberDataPoint(_named(family, values), self._began_ns, now_ns, float(value))
            for values, value in family.values.items()
        ]
        match family.kind:
            case Kind.COUNTER:
                data: Sum | Gauge | Histogram = Sum(points, AggregationTemporality.CUMULATIVE, is_monotonic=True)
            case Kind.GAUGE:
                data = Gauge(points)
            case Kind.HISTOGRAM:
                spreads = (family.spreads or {}).items()
                intervals = [self._interval(family, values, spread, now_ns) for values, spread in spreads]
                data = Histogram(intervals, AggregationTemporality.CUMULATIVE)
        return Metric(family.name, family.help, _unit(family.name), data)

    def _interval(self, family: Family, values: Labels, spread: Spread, now_ns: int) -> HistogramDataPoint:
        return HistogramDataPoint(
            attributes=_named(family, values),
            start_time_unix_nano=self._began_ns,
            time_unix_nano=now_ns,
            count=sum(spread.counts),
            sum=spread.total,
            bucket_counts=spread.counts,
            explicit_bounds=family.bounds,
            min=None,  # type: ignore[arg-type]  # not kept
            max=None,  # type: ignore[arg-type]
        )


def _spans_of(facts: RequestFacts | RestoreFacts) -> list[Span]:
    return request_spans(facts) if isinstance(facts, RequestFacts) else restore_spans(facts)


def _unit(name: str) -> str:
    """Return the UCUM unit that a metric's name ends with. "1" is for ratios, so a count has none."""
    match name.removesuffix("_total").rpartition("_")[2]:
        case "seconds":
            return "s"
        case "bytes":
            return "By"
        case _:
            return ""


def _context(trace_id: int, span_id: int) -> SpanContext:
    return SpanContext(trace_id, span_id, is_remote=False, trace_flags=_SAMPLED)


def _named(family: Family, values: Labels) -> dict[str, str]:
    return dict(zip(family.labels, values, strict=True))
