"""How a request can end for its client, and what the bill may be after it. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

ACK_TOKENS: Final = 64  # an activator that dies leaves up to so many uncharged: docs/metering.md
IN_FLIGHT_TOKENS: Final = 64  # on their way to a client that was killed


class EndKind(StrEnum):
    """How an operation ends."""

    ANSWERED = "answered"  # as if nothing had happened, perhaps later
    REFUSED = "refused"  # with a code; the same again is answered
    CUT = "cut"  # the connection ends without an end; the same again is answered
    FAILED = "failed"  # a command says one sentence and exits with 1; the same again is answered
    GONE = "gone"  # the client itself was killed; the next one is answered
    NOT_CONCERNED = "not concerned"


@dataclass(frozen=True, slots=True)
class RequestOutcome:
    """A way, and the failure's code where the client was told one."""

    way: EndKind
    code: str = ""

    def __str__(self) -> str:
        return f"{self.way} {self.code}".rstrip()


ANSWERED: Final = RequestOutcome(EndKind.ANSWERED)
CUT: Final = RequestOutcome(EndKind.CUT)
FAILED: Final = RequestOutcome(EndKind.FAILED)
GONE: Final = RequestOutcome(EndKind.GONE)
NOT_CONCERNED: Final = RequestOutcome(EndKind.NOT_CONCERNED)


def refused_with(code: str) -> RequestOutcome:
    """With that failure code."""
    return RequestOutcome(EndKind.REFUSED, code)


@dataclass(frozen=True, slots=True)
class RequestEnd:
    """How one request ended for its client: `words` is what it counted itself, one for each token."""

    outcome: RequestOutcome
    words: int = 0
    limit: int = 0  # tokens that it asked for
    whole: bool = False  # the event that ends the text had come, whatever came after it
    unread: int = 0  # tokens that a silent line may have taken, and not passed on
    unrecorded: bool = False  # door and replica died together: nobody may be left who writes its record


@dataclass(frozen=True, slots=True)
class BillBounds:
    """What the bill may grow by: the least and the most."""

    requests: tuple[int, int] = (0, 0)
    ok: tuple[int, int] = (0, 0)
    tokens: tuple[int, int] = (0, 0)

    def __add__(self, other: "BillBounds") -> "BillBounds":
        return BillBounds(
            _plus(self.requests, other.requests), _plus(self.ok, other.ok), _plus(self.tokens, other.tokens)
        )


@dataclass(frozen=True, slots=True)
class BillTotals:
    """Of a bill: requests by any outcome, those that went well, and completion tokens."""

    requests: int = 0
    ok: int = 0
    tokens: int = 0

    def __add__(self, other: "BillTotals") -> "BillTotals":
        return BillTotals(self.requests + other.requests, self.ok + other.ok, self.tokens + other.tokens)


def bill_bounds_of(ending: RequestEnd) -> BillBounds:
    """Exact for every request whose client heard its end. Otherwise what metering's page allows, and no more."""
    words = ending.words
    match ending.outcome.way:
        case EndKind.ANSWERED:
            return BillBounds((1, 1), (1, 1), (words, words))
        case EndKind.REFUSED:
            return BillBounds((1, 1), (0, 0), (words, words))
        case EndKind.GONE:
            return BillBounds((1, 1), (0, int(ending.whole)), (words, min(ending.limit, words + IN_FLIGHT_TOKENS)))
        case EndKind.CUT:
            # What had come, a replica had made: it writes the record if nobody else does.
            least = words if ending.whole else max(0, words - ACK_TOKENS)
            most = min(ending.limit, words + ending.unread)
            if ending.unrecorded:
                return BillBounds((0, 1), (0, int(ending.whole)), (0, most))
            return BillBounds((int(words > 0), 1), (0, int(ending.whole)), (least, most))
        case _:
            return BillBounds()


def bill_totals_of(report: Mapping[str, Any]) -> BillTotals:
    """Of an answer of `/admin/v1/billing/report`."""
    return BillTotals(sum(report["requests"].values()), report["requests"].get("ok", 0), report["completion_tokens"])


def bill_differences(before: BillTotals, after: BillTotals, bounds: BillBounds) -> list[str]:
    """In which figures the bill has grown by what it must not."""
    figures = (
        ("requests", after.requests - before.requests, bounds.requests),
        ("requests that went well", after.ok - before.ok, bounds.ok),
        ("tokens", after.tokens - before.tokens, bounds.tokens),
    )
    return [
        f"the bill has {got} more {name}, the client counted {_range(low, high)}"
        for name, got, (low, high) in figures
        if not low <= got <= high
    ]


def _plus(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    return one[0] + other[0], one[1] + other[1]


def _range(low: int, high: int) -> str:
    return str(low) if low == high else f"{low} to {high}"
