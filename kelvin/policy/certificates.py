"""Judge certificates that settings name as files: those that others are shown, and those that we believe. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from kelvin.policy.findings import Finding, Level
from kelvin.policy.guarding import DAY_S

SOON_S: Final = 14 * DAY_S  # what renews certificates does so a third of their time ahead: for one of 90 days, 30


class Use(Enum):
    """What a file is for: what it costs where that no longer holds, and what mends it."""

    FRONT = (
        "callers who ask for its names refuse it",
        "renew it there: the activator reads a pair again when it changes",
    )
    INNER = (
        "processes on other hosts refuse this one, and it does not start",
        "renew it there: processes read it again when it changes",
    )
    INNER_AUTHORITY = (
        "what it signed is refused: processes on different hosts lose one another",
        "put its successor beside it in that file, everywhere, then renew what it signed",
    )
    DATABASE = ("the control plane loses its database: changes are refused, records wait", "renew it there")
    REDIS = ("activators lose what they share, and each counts for itself", "renew it there")
    ISSUER = (
        "the keys of a token's issuer can't be read any more: its tokens are refused",
        "put its authority's new certificate there, and restart the activator",
    )


@dataclass(frozen=True, slots=True)
class CertificateFile:
    """`left_s` until the certificate in it that counts ends; None where none can be read. `begins_in_s` above 0: it is
    not valid before that.
    """

    setting: str
    path: str
    use: Use
    left_s: float | None
    begins_in_s: float = 0.0


def judge_certificate_files(files: Sequence[CertificateFile]) -> list[Finding]:
    """Each that has ended, or ends soon; where there is none of these, that all are good. Of no files nothing."""
    findings = [found for file in files if (found := _judge(file)) is not None]
    if findings or not files:
        return findings
    days = min(file.left_s or 0.0 for file in files) / DAY_S
    return [Finding("certificate files", Level.OK, f"{len(files)} that settings name, good for {days:.0f} days")]


def _judge(file: CertificateFile) -> Finding | None:
    cost, mend = file.use.value
    where = f"{file.path} ({file.setting})"
    if file.left_s is None:
        return Finding("certificate file", Level.FAIL, f"{where} holds none that can be read", cost, mend)
    if file.begins_in_s > 0:
        seen = f"{where} is not valid before {file.begins_in_s / 3600:.1f} hours from now"
        return Finding("certificate file", Level.FAIL, seen, cost, f"set this machine's clock right, or {mend}")
    if file.left_s <= 0:
        seen = f"{where} expired {abs(file.left_s) / DAY_S:.0f} days ago"
        return Finding("certificate file", Level.FAIL, seen, cost, mend)
    if file.left_s < SOON_S:
        seen = f"{where} is good for {file.left_s / DAY_S:.0f} days"
        return Finding("certificate file", Level.WARN, seen, f"then {cost}", mend)
    return None
