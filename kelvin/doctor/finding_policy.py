"""Define a finding of `kelvin doctor`: what was seen, how bad it is, what it costs a caller, and what to do."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

GB: Final = 1_000_000_000
DAY_S: Final = 86_400


class FindingLevel(StrEnum):
    """Severity of a finding, from OK to FAIL."""

    OK = "ok"
    NOTE = "note"  # good to know, nothing to do
    WARN = "warn"  # works, at a cost
    FAIL = "fail"  # does not work, or other users can read it


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check. `cost` and `mend` are empty if there is nothing to do."""

    check: str
    level: FindingLevel
    seen: str
    cost: str = ""
    mend: str = ""


def has_failure(findings: Iterable[Finding]) -> bool:
    """Return whether any finding is a failure. The command then exits with 1."""
    return any(finding.level is FindingLevel.FAIL for finding in findings)


def format_bytes(count: float) -> str:
    """Return a size with a decimal unit, such as `1.5 GB`."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} bytes"
