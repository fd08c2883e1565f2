"""How a request can end for its client, and by how much the bill may grow for it. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

ACK_TOKENS: Final = 64  # the most tokens that a killed activator leaves uncharged: docs/metering.md
IN_FLIGHT_TOKENS: Final = 64  # the most tokens in flight to a killed client


class EndKind(StrEnum):
    """How a client's operation ends."""

    ANSWERED = "answered"  # normally, perhaps late
    REFUSED = "refused"  # with a code; a retry is answered
    CUT = "cut"  # the connection breaks; a retry is answered
    FAILED = "failed"  # a command prints one sentence and exits with 1; a retry is answered
    GONE = "gone"  # the client was killed; the next client is answered
    NOT_CONCERNED = "not concerned"


@dataclass(frozen=True, slots=True)
class RequestOutcome:
    """How an operation ended, and the failure's code if the client got one."""

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
    """Return a refusal with this failure code."""
    return RequestOutcome(EndKind.REFUSED, code)


@dataclass(frozen=True, slots=True)
class RequestEnd:
    """How one request ended for its client. `words` is the client's own count of tokens."""

    outcome: RequestOutcome
    words: int = 0
    limit: int = 0  # requested tokens
    whole: bool = False  # the client got the event that ends the text
    unread: int = 0  # tokens that a silent connection may have accepted and not delivered
    unrecorded: bool = False  # activator and replica died together: perhaps no process wrote its record


@dataclass(frozen=True, slots=True)
class BillBounds:
    """Least and most growth of the bill."""

    requests: tuple[int, int] = (0, 0)
    ok: tuple[int, int] = (0, 0)
    tokens: tuple[int, int] = (0, 0)

    def __add__(self, other: "BillBounds") -> "BillBounds":
        return BillBounds(
            _plus(self.requests, other.requests), _plus(self.ok, other.ok), _plus(self.tokens, other.tokens)
        )


@dataclass(frozen=True, slots=True)
class BillTotals:
    """Totals of a bill: all requests, successful requests, completion tokens."""

    requests: int = 0
    ok: int = 0
    tokens: int = 0

    def __add__(self, other: "BillTotals") -> "BillTotals":
        return BillTotals(self.requests + other.requests, self.ok + other.ok, self.tokens + other.tokens)


def bill_bounds_of(ending: RequestEnd) -> BillBounds:
    """Return the bounds for one request: exact if the client saw its end, else as docs/metering.md allows."""
    words = ending.words
    match ending.outcome.way:
        case EndKind.ANSWERED:
            return BillBounds((1, 1), (1, 1), (words, words))
        case EndKind.REFUSED:
            return BillBounds((1, 1), (0, 0), (words, words))
        case EndKind.GONE:
            return BillBounds((1, 1), (0, int(ending.whole)), (words, min(ending.limit, words + IN_FLIGHT_TOKENS)))
        case EndKind.CUT:
            # A replica produced the received tokens. It writes the record if the activator does not.
            least = words if ending.whole else max(0, words - ACK_TOKENS)
            most = min(ending.limit, words + ending.unread)
            if ending.unrecorded:
                return BillBounds((0, 1), (0, int(ending.whole)), (0, most))
            return BillBounds((int(words > 0), 1), (0, int(ending.whole)), (least, most))
        case _:
            return BillBounds()


def bill_totals_of(report: Mapping[str, Any]) -> BillTotals:
    """Return the totals of a response of `/admin/v1/billing/report`."""
    return BillTotals(sum(report["requests"].values()), report["requests"].get("ok", 0), report["completion_tokens"])


def bill_differences(before: BillTotals, after: BillTotals, bounds: BillBounds) -> list[str]:
    """Return the figures of the bill whose growth is out of bounds, as text."""
    figures = (
        ("requests", after.requests - before.requests, bounds.requests),
        ("successful requests", after.ok - before.ok, bounds.ok),
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
