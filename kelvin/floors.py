"""The floor to draw beside a start: from the report of `kelvin bench cold` on this machine. Pure but for the read."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from contracts.wire import BadJson, decoder

CLOSE: Final = 1.25  # sizes that differ by more are not compared


class _Row(msgspec.Struct):
    size_bytes: int
    tier: str
    system: str
    median_s: float


class _Report(msgspec.Struct):
    rows: tuple[_Row, ...]


class BadReport(Exception):
    """The file is no report of `kelvin bench cold`; the text names it and the rule."""


def read_floor_us(report: Path, weight_bytes: int) -> int | None:
    """The host tier's floor for the measured size next to `weight_bytes`; None where none is near. Raises BadReport."""
    try:
        rows = decoder(_Report).decode(report.read_bytes()).rows
    except OSError as error:
        raise BadReport(f"{report}: {error.strerror}") from error
    except BadJson as error:
        raise BadReport(f"{report}: is not a report of kelvin bench cold ({error})") from error
    return choose_floor_us(rows, weight_bytes)


def choose_floor_us(rows: Sequence[_Row], weight_bytes: int) -> int | None:
    """The nearest size by ratio, where it is near."""
    floors = [row for row in rows if row.system == "floor" and row.tier == "host"]
    apart = [(max(row.size_bytes, weight_bytes) / max(1, min(row.size_bytes, weight_bytes)), row) for row in floors]
    ratio, row = min(apart, key=lambda pair: pair[0], default=(CLOSE + 1, None))
    return None if row is None or ratio > CLOSE else round(row.median_s * 1e6)
