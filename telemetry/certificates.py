"""When what a process shows to others, or is known by, ends. Named as cert-manager names the like."""

import datetime
from collections.abc import Callable, Mapping
from typing import Final

from telemetry.policy.instruments import Kind, Page

NAME: Final = "kelvin_certificate_expiration_timestamp_seconds"


def describe_certificates(page: Page, ends: Callable[[], Mapping[str, datetime.datetime]]) -> None:
    """`ends`: by what a certificate is of, the end of the one that ends first; read when the page is."""
    help = "Seconds since 1970 at which a certificate ends; of several, the first."
    page.read(NAME, help, Kind.GAUGE, ("of",), lambda: {(of,): end.timestamp() for of, end in ends().items()})
