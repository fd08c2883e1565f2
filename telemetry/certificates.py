"""The metric of when a process's certificates expire. Its name follows cert-manager's."""

import datetime
from collections.abc import Callable, Mapping
from typing import Final

from telemetry.policy.instruments import Kind, Page

NAME: Final = "kelvin_certificate_expiration_timestamp_seconds"


def describe_certificates(page: Page, ends: Callable[[], Mapping[str, datetime.datetime]]) -> None:
    """Add the metric to `page`. `ends` is called for each page: the first expiry by use, such as `inner`."""
    help = "Seconds since 1970 at which a certificate ends; of several, the first."
    page.read(NAME, help, Kind.GAUGE, ("of",), lambda: {(of,): end.timestamp() for of, end in ends().items()})
