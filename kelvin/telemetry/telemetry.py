"""One process's telemetry: its metrics page, and a sender of traces if a collector is configured.

Composition roots open it: with `open_telemetry` if the process has traces, else with `open_without_traces`.
"""

import datetime
import errno
import importlib.metadata
import os
import resource
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from starlette.types import ASGIApp, Receive, Scope, Send

from kelvin.process.loops import PROCESS_HEALTH, record_error
from kelvin.process.procfs import resident_bytes
from kelvin.telemetry.policy.exposition import CONTENT_TYPE, render
from kelvin.telemetry.policy.instruments import MetricKind, MetricsPage, series_by_label
from kelvin.telemetry.policy.spans import RequestFacts, RestoreFacts, is_sampled_for_caller
from kelvin.telemetry.settings import TelemetrySettings
from kelvin.telemetry.trace_sender import TraceSender

if TYPE_CHECKING:
    from kelvin.telemetry.otlp import OtlpCollector

CERTIFICATE_EXPIRY_METRIC: Final = "kelvin_certificate_expiration_timestamp_seconds"


@dataclass(frozen=True, slots=True)
class Telemetry:
    """The telemetry of one process. Use it on one event loop. `sender` is None if no traces are sent."""

    page: MetricsPage
    sender: TraceSender | None
    sample_ratio: float

    def request(self, facts: RequestFacts) -> None:
        """Send the request's trace if it is notable or in the sampled share. Never waits, never fails."""
        if self.sender is not None and (
            facts.is_always_sampled or is_sampled_for_caller(facts.trace_id, facts.caller, self.sample_ratio)
        ):
            self.sender.offer(facts)

    def restore(self, facts: RestoreFacts) -> None:
        """Send the trace of a restore. Never waits, never fails."""
        if self.sender is not None:
            self.sender.offer(facts)

    def render_page(self) -> str:
        """Return the page for Prometheus. Metrics that can't be read now are left out, and logged."""
        return render(self.page.families(record_error), self.page.process)

    def with_metrics_route(self, app: ASGIApp) -> ASGIApp:
        """Return the application with an added `GET /metrics`. Use it only for sockets that outsiders can't reach."""

        async def exposed(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "http" and scope["path"] == "/metrics" and scope["method"] == "GET":
                body = self.render_page().encode()
                headers = [(b"content-type", CONTENT_TYPE.encode()), (b"content-length", str(len(body)).encode())]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                await send({"type": "http.response.body", "body": body})
            else:
                await app(scope, receive, send)

        return exposed


def open_without_traces(process: str) -> Telemetry:
    """Return the telemetry of a process that serves its page and sends no traces."""
    page = MetricsPage(process)
    describe_process(page, None)
    return Telemetry(page, None, 0.0)


@asynccontextmanager
async def open_telemetry(process: str, settings: TelemetrySettings) -> AsyncIterator[Telemetry]:
    """Open a process's telemetry. On leaving the block, send what is queued, for at most FLUSH_S seconds."""
    if settings.endpoint is None:
        yield open_without_traces(process)
        return
    endpoint, page = settings.endpoint, MetricsPage(process)

    def connect() -> "OtlpCollector":
        # Imported in the sender's thread, only if traces are on: it takes a third of a second.
        from kelvin.telemetry.otlp import OtlpCollector

        version = importlib.metadata.version("kelvin-serving")
        return OtlpCollector(endpoint, process, f"{process}-{secrets.token_hex(6)}", version)

    sender = TraceSender(connect)
    describe_process(page, sender)
    sender.start()
    try:
        yield Telemetry(page, sender, settings.sample_ratio)
    finally:
        await sender.close()


def describe_process(page: MetricsPage, sender: TraceSender | None) -> None:
    """Add the metrics that every process has: CPU time, memory, descriptors, loops, and results of sending traces.
    Names follow the Prometheus client libraries.
    """
    page.callback(
        "process_cpu_seconds_total", "Processor time used.", MetricKind.COUNTER, (), lambda: {(): time.process_time()}
    )
    page.gauge("process_resident_memory_bytes", "Memory in use.", resident_bytes)
    page.gauge("process_open_fds", "Open descriptors.", _open_fds)
    errors = "Unexpected errors of background loops. Each was started again."
    page.callback(
        "kelvin_loop_errors_total",
        errors,
        MetricKind.COUNTER,
        ("loop",),
        lambda: series_by_label(PROCESS_HEALTH.errors.items()),
    )
    failing = "Background loops that keep failing. The process is not ready unless this is 0."
    page.gauge("kelvin_loops_failing", failing, lambda: len(PROCESS_HEALTH.failing()))
    if sender is not None:
        results = "Traces by what became of them: sent, dropped here, not taken by the collector."
        page.callback(
            "kelvin_traces_total",
            results,
            MetricKind.COUNTER,
            ("result",),
            lambda: series_by_label((("sent", sender.sent), ("dropped", sender.dropped), ("lost", sender.lost))),
        )


def describe_certificates(page: MetricsPage, ends: Callable[[], Mapping[str, datetime.datetime]]) -> None:
    """Add the expiry times of a process's certificates. `ends` is called for each page and returns the first expiry by
    use. A use is, for example, `inner`. The metric's name follows cert-manager's.
    """
    help = "Seconds since 1970 at which a certificate ends; of several, the first."
    page.callback(
        CERTIFICATE_EXPIRY_METRIC,
        help,
        MetricKind.GAUGE,
        ("of",),
        lambda: {(name,): end.timestamp() for name, end in ends().items()},
    )


def _open_fds() -> int:
    try:
        return len(os.listdir("/proc/self/fd")) - 1
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        # All descriptors are in use, so none is left to count them with
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
