"""Compare the outcome and the bill of a drill with the expectation. Pure functions."""

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from coldstart_bench.harness.request_outcome import BillBounds, BillTotals, RequestEnd, RequestOutcome, bill_bounds_of

_MISSING: Final = re.compile(r"requests_missing: it served (\d+) requests; (\d+) request records name it")


def bounds_of_all(endings: Iterable[RequestEnd]) -> BillBounds:
    """Return the bounds of several requests together."""
    return sum(map(bill_bounds_of, endings), BillBounds())


def unexplained_imbalance(report: Mapping[str, Any], unrecorded: int) -> list[str]:
    """Return why a bill does not balance, except that up to `unrecorded` requests have no record.

    A replica counts a request before its first byte. If everything is killed after that, no record is written.
    """
    found = []
    for problem in report["balance"]["problems"]:
        if missing := _MISSING.fullmatch(f"{problem['kind']}: {problem['detail']}"):
            unrecorded -= int(missing[1]) - int(missing[2])
            if unrecorded >= 0:
                continue
        found.append(f"{problem['kind']}: {problem['subject']}: {problem['detail']}")
    return found


def remaining(before: BillTotals, after: BillTotals, bounds: BillBounds) -> BillBounds:
    """Return how much the bill may still grow. If the activator died, the replica writes the record later."""

    def left(figure: tuple[int, int], got: int) -> tuple[int, int]:
        return max(0, figure[0] - got), max(0, figure[1] - got)

    return BillBounds(
        left(bounds.requests, after.requests - before.requests),
        left(bounds.ok, after.ok - before.ok),
        left(bounds.tokens, after.tokens - before.tokens),
    )


def outcome_problems(expected: RequestOutcome, seen: RequestOutcome) -> list[str]:
    """Return why the outcome makes a cell red. Empty if it is as expected."""
    return [] if seen == expected else [f"expected {expected}, seen {seen}"]
