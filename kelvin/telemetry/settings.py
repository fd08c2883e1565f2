"""Settings of traces. Only if `KELVIN_OTLP_ENDPOINT` is set do traces leave the machine.

OpenTelemetry's own variables configure the connection: certificates, and headers, which may hold a secret. Its exporter
reads them. They are checked here, so that a bad one is refused by name and its value is never written anywhere.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Final
from urllib.parse import unquote, urlsplit

from kelvin.contracts import setting_parser
from kelvin.contracts.setting_parser import BadSetting

ENDPOINT: Final = "KELVIN_OTLP_ENDPOINT"
HEADERS: Final = ("OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_TRACES_HEADERS")
_TOKEN: Final = frozenset("!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")


@dataclass(frozen=True, slots=True)
class TelemetrySettings:
    """`endpoint` is the collector's base address. None: nothing is sent, and the exporter is not imported."""

    endpoint: str | None = None
    sample_ratio: float = 0.01


NO_TRACES: Final = TelemetrySettings()


def read_settings(env: Mapping[str, str] = os.environ) -> TelemetrySettings:
    """Read the settings. Raises BadSetting, which shows nothing that may be secret."""
    return TelemetrySettings(
        endpoint=_endpoint(env),
        sample_ratio=setting_parser.number(env, "KELVIN_TRACE_SHARE", 0.01, low=0, high=1),
    )


def _endpoint(env: Mapping[str, str]) -> str | None:
    raw = env.get(ENDPOINT)
    if not raw:
        return None
    try:
        url = urlsplit(raw)
        is_address = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:  # unbalanced brackets, an invalid port
        raise BadSetting(ENDPOINT, "(not shown)", "must be http://HOST:PORT or https://HOST:PORT") from None
    if url.username is not None or url.query or url.fragment:
        raise BadSetting(ENDPOINT, "(not shown)", f"holds an address only; secrets belong in {HEADERS[0]}")
    if not is_address:
        raise BadSetting(ENDPOINT, raw, "must be http://HOST:PORT or https://HOST:PORT")
    if not _is_installed():
        raise BadSetting(ENDPOINT, raw, "needs the extra 'telemetry': pip install 'kelvin-serving[telemetry]'")
    for name in HEADERS:
        _check_headers(name, env.get(name, ""))
    return raw.rstrip("/")


def _is_installed() -> bool:
    try:
        return find_spec("opentelemetry.exporter.otlp.proto.http") is not None
    except ModuleNotFoundError:
        return False


def _check_headers(name: str, raw: str) -> None:
    """Check a list `name=value,…` with percent-encoded values (OTLP exporter specification). Raises BadSetting."""
    for pair in filter(None, (part.strip() for part in raw.split(","))):
        key, separator, value = pair.partition("=")
        if not separator or not key.strip() or not set(key.strip()) <= _TOKEN or not unquote(value).isprintable():
            raise BadSetting(name, "(not shown)", "must be name=value, several joined by commas")
