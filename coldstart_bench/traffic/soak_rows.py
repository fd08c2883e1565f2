"""What a soak came to: whether every request ended right, and the bill agrees with what clients counted. Pure."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from coldstart_bench.endings import ANSWERED, CUT, GONE, Bounds, Ending, Totals, bounds_of, refused
from coldstart_bench.statistics import quantile_of
from coldstart_bench.traffic.exchange import CUT as WAS_CUT
from coldstart_bench.traffic.exchange import NO_DOOR, NO_END, Reader, Sent
from coldstart_bench.traffic.memory import Memory, words
from coldstart_bench.verdicts import Verdict, held, line_of

WORD: Final = re.compile(r"w\d+|<s>|</s>|<unk>")
# What a client may be told while something behind the door, or the door itself, is away.
RIGHT_ERRORS: Final = frozenset(
    (
        "breaker_open",
        "deadline_exceeded",
        "deadline_too_short",
        "overloaded",
        "replica_lost",
        "slow_reader",
        "unavailable",
    )
)


class Event(msgspec.Struct, frozen=True):
    """What was done to the installation, and how long until all of it was ready again; None where it was not."""

    at_s: float
    what: str
    whole_after_s: float | None


class SoakReport(msgspec.Struct, frozen=True):
    """What `--json` writes."""

    seconds: float
    sent: int
    answered: int  # whole, with the right text
    told: dict[str, int]  # ended otherwise, by what the client saw
    wrong: tuple[str, ...]  # ended as nothing may
    answered_p50_s: float | None
    answered_p99_s: float | None
    events: tuple[Event, ...]
    bill: tuple[str, ...]  # in which it does not agree
    left: tuple[str, ...]  # what is left of it
    memory: Memory | None  # of the supervisor's processes together, before and at rest again
    verdicts: tuple[Verdict, ...]
    machine: dict[str, object]
    load_before: float
    commit: str | None
    notes: tuple[str, ...] = ()


def wrong_with(sent: Sent, text: str, right: str, reader: Reader) -> str | None:
    """Why it ended as nothing may; None where it is right: the whole text, or a part of it and why it is no more."""
    if sent.is_ok:
        return None if text == right else f"another text: {text[:60]!r}"
    if not right.startswith(text):
        return f"another text before {sent.code}: {text[:60]!r}"
    if sent.code in (WAS_CUT, NO_DOOR) or sent.code in RIGHT_ERRORS:
        return None
    if sent.code == NO_END and reader is Reader.SILENT:
        return None
    return f"{sent.code or sent.status}"


def bounds_for(sent: Sent, text: str, limit: int, reader: Reader) -> Bounds:
    """What the bill may have of it. Who read all that came is held to its own count; of who did not, the kernel may
    have more. A refusal before anybody knew who asked has no record, and neither has what never got to the door.
    """
    if sent.sent_us is None or sent.code == NO_DOOR:
        return Bounds()
    count = len(WORD.findall(text))
    unread = 0 if reader is Reader.QUICK else limit
    if sent.is_ok:
        return bounds_of(Ending(ANSWERED, count, limit))
    if reader is Reader.SILENT or (reader is Reader.SLOW and sent.code == WAS_CUT):
        least, most = max(0, count - limit), min(limit, count + unread)
        return Bounds((0, 1), (0, 1), (least, most))
    if sent.code in (WAS_CUT, NO_END):
        way = CUT if sent.code == WAS_CUT else GONE
        return bounds_of(Ending(way, count, limit, whole=count >= limit, unread=unread))
    if not count:
        return Bounds((0, 1), (0, 0), (0, 0))
    return bounds_of(Ending(refused(sent.code), count, limit))


def growth(before: Totals, after: Totals, bounds: Bounds) -> Mapping[str, tuple[int, tuple[int, int]]]:
    """Of each figure by what the bill grew, and by what it may."""
    return {
        "requests": (after.requests - before.requests, bounds.requests),
        "requests that went well": (after.ok - before.ok, bounds.ok),
        "tokens": (after.tokens - before.tokens, bounds.tokens),
    }


def report_of(
    seconds: float,
    sent: Sequence[Sent],
    wrong: Sequence[str],
    events: Sequence[Event],
    bill: Sequence[str],
    left: Sequence[str],
    memory: Memory | None,
    again: float,
    where: Mapping[str, Any],
) -> SoakReport:
    """With its lines. `again` is the share of what was asked after the last fault that was answered right."""
    right = [each for each in sent if each.is_ok]
    told = Counter(each.code for each in sent if not each.is_ok)
    took = [each.took_s for each in right]
    return SoakReport(
        seconds,
        len(sent),
        len(right),
        dict(told),
        tuple(wrong),
        quantile_of(took, 0.5),
        quantile_of(took, 0.99),
        tuple(events),
        tuple(bill),
        tuple(left),
        memory,
        judge(len(sent), len(right), wrong, events, bill, left, again),
        **where,
    )


def judge(
    sent: int,
    answered: int,
    wrong: Sequence[str],
    events: Sequence[Event],
    bill: Sequence[str],
    left: Sequence[str],
    again: float,
) -> tuple[Verdict, ...]:
    """Whether it holds or not; the state is how much was done to it."""
    state = f"{len(events)} faults"
    down = sum(event.whole_after_s is None for event in events)
    share = answered / sent if sent else None
    return (
        held("requests that ended neither right nor rightly", 0, state, float(len(wrong)), 0.0, at_least=False),
        held("differences of the bill from what clients counted", 0, state, float(len(bill)), 0.0, at_least=False),
        held("faults after which not all was ready again", 0, state, float(down), 0.0, at_least=False),
        held("things that are left", 0, state, float(len(left)), 0.0, at_least=False),
        held("share of requests after the last fault that were answered right", 0, state, again, 1.0, at_least=True),
        held("share of requests that were answered", 0, state, share, 0.0, at_least=True, asked=False),
    )


def table(report: SoakReport) -> str:
    """Return the report as the text that a person reads."""
    told = ", ".join(f"{code} {count}" for code, count in sorted(report.told.items())) or "none"
    p50, p99 = ("-" if each is None else f"{each:.2f} s" for each in (report.answered_p50_s, report.answered_p99_s))
    lines = [
        f"{report.sent} requests in {report.seconds:g} s: {report.answered} answered ({p50} at the median, {p99} p99); "
        f"ended otherwise: {told}",
    ]
    for event in report.events:
        after = "NOT READY AGAIN" if event.whole_after_s is None else f"ready again after {event.whole_after_s:.2f} s"
        lines.append(f"  {event.at_s:7.1f} s  {event.what:<24} {after}")
    lines += [f"wrong: {each}" for each in report.wrong[:10]]
    lines += [f"bill: {each}" for each in report.bill]
    lines += [f"left: {each}" for each in report.left]
    return "\n".join([*lines, words(report.memory), *map(line_of, report.verdicts)])
