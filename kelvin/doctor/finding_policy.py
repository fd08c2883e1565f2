"""What `kelvin doctor` says of one thing: what was seen, how bad that is, what it costs a caller, and what mends it."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

GB: Final = 1_000_000_000
DAY_S: Final = 86_400


class FindingLevel(StrEnum):
    """From nothing to do, to what will not work."""

    OK = "ok"
    NOTE = "note"  # good to know; nothing is lost
    WARN = "warn"  # it works, at a cost
    FAIL = "fail"  # something will not work, or is open to others


@dataclass(frozen=True, slots=True)
class Finding:
    """`check` names it; `cost` and `mend` are empty where there is nothing to do."""

    check: str
    level: FindingLevel
    seen: str
    cost: str = ""
    mend: str = ""


def has_failure(findings: Iterable[Finding]) -> bool:
    """Whether the command ends with 1."""
    return any(finding.level is FindingLevel.FAIL for finding in findings)


def format_bytes(count: float) -> str:
    """As people write it: 1.5 GB."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} bytes"
