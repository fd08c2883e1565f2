"""What a soak came to: whether every request ended right, and the bill agrees with what clients counted. Pure."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from coldstart_bench.endings import ANSWERED, CUT, GONE, Bounds, Ending, Totals, bounds_of, refused
from coldstart_bench.report import Figures, Verdict, at_least, at_most, cell, ratio
from coldstart_bench.statistics import quantile_of
from coldstart_bench.traffic.exchange import CUT as WAS_CUT
from coldstart_bench.traffic.exchange import NO_DOOR, NO_END, Reader, Sent
from coldstart_bench.traffic.memory import Memory, words

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


class SoakFigures(Figures, frozen=True):
    """How all requests ended, and what was found afterwards."""

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
    again: float  # share of what was asked after the last fault that was answered right


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


def figures_of(seconds: float, sent: Sequence[Sent], **found: Any) -> SoakFigures:
    """With what is counted of the requests; `found` are the other fields."""
    took = [each.took_s for each in sent if each.is_ok]
    told = Counter(each.code for each in sent if not each.is_ok)
    p50_s, p99_s = quantile_of(took, 0.5), quantile_of(took, 0.99)
    return SoakFigures(seconds, len(sent), len(took), dict(told), answered_p50_s=p50_s, answered_p99_s=p99_s, **found)


def judge(found: SoakFigures) -> tuple[Verdict, ...]:
    """The state is how much was done to it."""
    state = f"{len(found.events)} faults"
    down = sum(event.whole_after_s is None for event in found.events)
    share = ratio(found.answered, found.sent or None)
    return (
        at_most("requests that ended neither right nor rightly", len(found.wrong), 0, state),
        at_most("differences of the bill from what clients counted", len(found.bill), 0, state),
        at_most("faults after which not all was ready again", down, 0, state),
        at_most("things that are left", len(found.left), 0, state),
        at_least("share of requests after the last fault that were answered right", found.again, 1, state),
        at_least("share of requests that were answered", share, 0, state, asked=False),
    )


def table(found: SoakFigures) -> str:
    """Return the figures as the text that a person reads."""
    told = ", ".join(f"{code} {count}" for code, count in sorted(found.told.items())) or "none"
    p50, p99 = (cell(each, "{:.2f} s") for each in (found.answered_p50_s, found.answered_p99_s))
    lines = [
        f"{found.sent} requests in {found.seconds:g} s: {found.answered} answered ({p50} at the median, {p99} p99); "
        f"ended otherwise: {told}",
    ]
    for event in found.events:
        after = cell(event.whole_after_s, "ready again after {:.2f} s", none="NOT READY AGAIN")
        lines.append(f"  {event.at_s:7.1f} s  {event.what:<24} {after}")
    lines += [f"wrong: {each}" for each in found.wrong[:10]]
    lines += [f"bill: {each}" for each in found.bill]
    lines += [f"left: {each}" for each in found.left]
    return "\n".join([*lines, words(found.memory)])
