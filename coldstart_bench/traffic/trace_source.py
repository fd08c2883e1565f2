"""Traces as they are published: requests with both their lengths, and clients' rates in windows. Pure."""

import csv
import io
from collections.abc import Sequence
from datetime import UTC, datetime
from random import Random
from typing import Final

import msgspec

from coldstart_bench.report import BenchFailed
from coldstart_bench.traffic.arrivals import renewal, replayed

COLUMNS: Final = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_US: Final = 1_000_000


class BadTrace(BenchFailed):
    """A file is no trace; the text names line and rule."""


class Row(msgspec.Struct, frozen=True):
    """One request of a trace."""

    at_s: float
    prompt: int  # tokens
    output: int


class Window(msgspec.Struct, frozen=True):
    """How one client asks from `at_s` until its next window."""

    at_s: float
    rate: float  # requests a second
    cv: float  # of the gaps
    pattern: str  # Gamma or Weibull


class Due(msgspec.Struct, frozen=True):
    """One request of a load: when, whose, how long."""

    at_us: int
    tenant: int
    prompt: int
    output: int


def rows_of(text: str) -> list[Row]:
    """Of the Azure LLM inference traces: a time, prompt and output tokens; in order of time. Raises BadTrace."""
    reader = csv.reader(io.StringIO(text))
    if tuple(next(reader, ())) != COLUMNS:
        raise BadTrace(f"line 1: must be {','.join(COLUMNS)}")
    found = []
    for number, cells in enumerate(reader, 2):
        try:
            when, prompt, output = cells
            row = Row(_seconds(when), int(prompt), int(output))
        except ValueError:
            raise BadTrace(f"line {number}: must be a time and two numbers of tokens") from None
        if row.prompt < 1 or row.output < 1:
            continue  # nothing was asked, or nothing answered: no load
        found.append(row)
    if len(found) < 2:
        raise BadTrace("must have two requests at least")
    return sorted(found, key=lambda row: row.at_s)


def _seconds(when: str) -> float:
    """Of `2023-11-16 18:17:03.9799600`, whose last digit no clock of ours has."""
    date, _, fraction = when.partition(".")
    whole = datetime.strptime(date, "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC).timestamp()
    return whole + (int(fraction) / 10 ** len(fraction) if fraction else 0.0)


def windows_of(text: str) -> list[Window]:
    """Of ServeGen's clients: start, rate, coefficient of variation, pattern and two that follow from them, no header.

    Raises BadTrace.
    """
    found = []
    for number, cells in enumerate(csv.reader(io.StringIO(text)), 1):
        try:
            at_s, rate, cv, pattern = float(cells[0]), float(cells[1]), float(cells[2] or 0), cells[3]
        except (ValueError, IndexError):
            raise BadTrace(f"line {number}: must be start, rate, variation and pattern of a window") from None
        if rate > 0 and pattern not in ("Gamma", "Weibull"):
            raise BadTrace(f"line {number}: {pattern!r}: must be Gamma or Weibull")
        found.append(Window(at_s, rate, cv, pattern))
    if not found:
        raise BadTrace("must have a window")
    return found


def window_at(windows: Sequence[Window], at_s: float) -> Window:
    """The last that has begun by then, or the first."""
    return max((window for window in windows if window.at_s <= at_s), key=lambda each: each.at_s, default=windows[0])


def as_recorded(rows: Sequence[Row], speed: float) -> list[Due]:
    """The rows as they are, of one tenant, so many times as fast."""
    when = replayed([row.at_s for row in rows], speed)
    return [Due(at, 0, row.prompt, row.output) for at, row in zip(when, rows, strict=True)]


def by_clients(
    rows: Sequence[Row], windows: Sequence[Window], requests: int, seconds: float, chance: Random
) -> list[Due]:
    """About so many requests in so many seconds: each client's share and bursts are its window's, and both lengths of a
    request are those of one row, drawn with replacement. Raises BadTrace where no client asks for anything.
    """
    whole = sum(window.rate for window in windows)
    if whole <= 0:
        raise BadTrace("no client asks for anything at that time")
    scale = requests / seconds / whole
    found = []
    for tenant, window in enumerate(windows):
        for at_us in renewal(window.rate * scale, window.cv, window.pattern, seconds, chance):
            row = chance.choice(rows)
            found.append(Due(at_us, tenant, row.prompt, row.output))
    return sorted(found, key=lambda due: due.at_us)


def words(due: Due, number: int, shared: float) -> list[str]:
    """A prompt of that length: the first `shared` of it is what every prompt of its tenant begins with, and the rest is
    no other's. About four bytes a token.
    """
    same = int(shared * due.prompt)
    first = [f"t{due.tenant}", *(f"s{place % 100:02}" for place in range(1, same))][:same]
    rest = due.prompt - same
    return [*first, *([f"n{number}"] if rest else []), *(f"u{place % 100:02}" for place in range(1, rest))]
