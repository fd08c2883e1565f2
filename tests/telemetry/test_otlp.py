"""What a collector receives, read from its side."""

import pytest

from telemetry.otlp import OtlpCollector
from telemetry.policy.instruments import Page
from tests.telemetry import receiver

pytestmark = pytest.mark.deep


def test_unit_of_a_metric_follows_from_its_name() -> None:
    """The unit "1" is for ratios: a collector that exports to Prometheus renames such a gauge to `NAME_ratio`."""
    page = Page("activator")
    page.counter("process_cpu_seconds_total", "Processor time.").add((), 1.5)
    page.counter("kelvin_requests_total", "Requests.").add(())
    page.histogram("kelvin_request_seconds", "Time.", (), (1.0,)).observe((), 0.5)
    page.gauge("process_resident_memory_bytes", "Memory.", lambda: 4096)
    page.gauge("process_open_fds", "Descriptors.", lambda: 7)
    with receiver.running() as collector:
        sender = OtlpCollector(collector.endpoint, "activator", "activator-1", "0")
        try:
            assert sender.metrics(page.families())
        finally:
            sender.close()
        units = {name: point.get("unit", "") for name, point in collector.points("activator").items()}
    assert units == {
        "process_cpu_seconds_total": "s",
        "kelvin_requests_total": "",
        "kelvin_request_seconds": "s",
        "process_resident_memory_bytes": "By",
        "process_open_fds": "",
    }
