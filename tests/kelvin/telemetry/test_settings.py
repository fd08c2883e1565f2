"""Traces are sent only to a configured address, and no secret is shown in errors."""

import pytest

from kelvin.contracts.setting_parser import BadSetting
from kelvin.telemetry.settings import NO_TRACES, read_settings

SECRET = "Basic%20c2VjcmV0"
HERE = {"KELVIN_OTLP_ENDPOINT": "http://127.0.0.1:4318/"}


def test_traces_are_off_without_an_endpoint() -> None:
    """OpenTelemetry's own endpoint variable, which is meant for other programs, doesn't turn traces on."""
    assert read_settings({}) == NO_TRACES
    assert read_settings({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://elsewhere:4318"}) == NO_TRACES
    assert read_settings(HERE | {"KELVIN_TRACE_SHARE": "0.5"}).endpoint == "http://127.0.0.1:4318"


@pytest.mark.parametrize(
    ("env", "rule"),
    [
        ({"KELVIN_OTLP_ENDPOINT": "localhost:4318"}, "KELVIN_OTLP_ENDPOINT=localhost:4318: must be http://HOST:PORT"),
        ({"KELVIN_TRACE_SHARE": "2"}, "KELVIN_TRACE_SHARE=2: must be 1 or less"),
        ({"KELVIN_OTLP_ENDPOINT": f"https://u:{SECRET}@host"}, "secrets belong in OTEL_EXPORTER_OTLP_HEADERS"),
        ({"KELVIN_OTLP_ENDPOINT": f"https://host/?key={SECRET}"}, "secrets belong in OTEL_EXPORTER_OTLP_HEADERS"),
        (HERE | {"OTEL_EXPORTER_OTLP_HEADERS": SECRET}, "OTEL_EXPORTER_OTLP_HEADERS=(not shown): must be name=value"),
        (HERE | {"OTEL_EXPORTER_OTLP_TRACES_HEADERS": f"a b={SECRET}"}, "OTEL_EXPORTER_OTLP_TRACES_HEADERS=(not sh"),
        (HERE | {"OTEL_EXPORTER_OTLP_HEADERS": f"a={SECRET}%0d%0ab:c"}, "OTEL_EXPORTER_OTLP_HEADERS=(not shown)"),
    ],
)
def test_bad_telemetry_setting_is_refused(env: dict[str, str], rule: str) -> None:
    """The error has name and rule. Values that may be secret are not shown."""
    with pytest.raises(BadSetting) as refused:
        read_settings(env)
    assert rule in str(refused.value)
    assert "c2VjcmV0" not in str(refused.value)


def test_good_headers_pass() -> None:
    """Several headers, with spaces around them, are accepted."""
    read_settings(HERE | {"OTEL_EXPORTER_OTLP_HEADERS": f"authorization={SECRET}, x-tenant=a"})
