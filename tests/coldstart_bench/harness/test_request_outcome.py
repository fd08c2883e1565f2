"""The bounds of the bill after each end of a request, and the detection of a wrong bill."""

import pytest

from coldstart_bench.harness.request_outcome import (
    ANSWERED,
    CUT,
    FAILED,
    GONE,
    BillBounds,
    BillTotals,
    RequestEnd,
    RequestOutcome,
    bill_bounds_of,
    bill_differences,
    bill_totals_of,
    refused_with,
)
from tests.drills.bill_checks import bounds_of_all, outcome_problems, remaining, unexplained_imbalance

LOST = refused_with("replica_lost")


@pytest.mark.parametrize(
    ("ending", "bounds"),
    [
        pytest.param(
            RequestEnd(ANSWERED, 9, 9, whole=True), BillBounds((1, 1), (1, 1), (9, 9)), id="answered: to the token"
        ),
        pytest.param(
            RequestEnd(LOST, 9, 50), BillBounds((1, 1), (0, 0), (9, 9)), id="told that it failed: to the token"
        ),
        pytest.param(RequestEnd(CUT, 100, 500), BillBounds((1, 1), (0, 0), (36, 100)), id="cut: up to 64 uncharged"),
        pytest.param(
            RequestEnd(CUT, 0, 500), BillBounds((0, 1), (0, 0), (0, 0)), id="cut before a token: nothing charged"
        ),
        pytest.param(
            RequestEnd(CUT, 9, 9, whole=True), BillBounds((1, 1), (0, 1), (9, 9)), id="cut at its end: to the token"
        ),
        pytest.param(
            RequestEnd(CUT, 9, 50, unread=99), BillBounds((1, 1), (0, 0), (0, 50)), id="a silent line takes some"
        ),
        pytest.param(
            RequestEnd(CUT, 9, 50, unrecorded=True),
            BillBounds((0, 1), (0, 0), (0, 9)),
            id="no process is left to record it",
        ),
        pytest.param(
            RequestEnd(GONE, 9, 500), BillBounds((1, 1), (0, 0), (9, 73)), id="a killed client: what was on its way"
        ),
        pytest.param(
            RequestEnd(GONE, 9, 10), BillBounds((1, 1), (0, 0), (9, 10)), id="but never more than it asked for"
        ),
        pytest.param(RequestEnd(FAILED), BillBounds(), id="a command costs nothing"),
    ],
)
def test_bill_bounds_follow_the_request_end(ending: RequestEnd, bounds: BillBounds) -> None:
    """The bounds are for requests, successful requests and tokens."""
    assert bill_bounds_of(ending) == bounds


def test_bounds_add_up() -> None:
    both = bounds_of_all([RequestEnd(ANSWERED, 3, 3, whole=True), RequestEnd(CUT, 2, 9)])
    assert both == BillBounds((2, 2), (1, 1), (3, 5))


ONE = bill_bounds_of(RequestEnd(ANSWERED, 10, 10, whole=True))


@pytest.mark.parametrize(
    ("after", "wrong"),
    [
        pytest.param(BillTotals(3, 3, 25), [], id="as counted"),
        pytest.param(BillTotals(2, 2, 15), ["requests", "successful requests", "tokens"], id="a record is dropped"),
        pytest.param(BillTotals(4, 4, 35), ["requests", "successful requests", "tokens"], id="one is there twice"),
        pytest.param(BillTotals(3, 2, 25), ["successful requests"], id="another outcome"),
        pytest.param(BillTotals(3, 3, 24), ["tokens"], id="a token short"),
        pytest.param(BillTotals(3, 3, 26), ["tokens"], id="a token over"),
    ],
)
def test_each_bill_difference_is_named(after: BillTotals, wrong: list[str]) -> None:
    """Each figure that differs from the client's count is named."""
    found = bill_differences(BillTotals(2, 2, 15), after, ONE)
    assert [line.split(" more ")[1].split(", the")[0] for line in found] == wrong


def test_a_record_may_come_late_and_once() -> None:
    """Two requests lost their activator before a token, and one record is there: one more may come, a third may not."""
    cut = bounds_of_all([RequestEnd(CUT, 0, 9), RequestEnd(CUT, 0, 9), RequestEnd(ANSWERED, 3, 3, whole=True)])
    seen = BillTotals(2, 1, 3)
    late = remaining(BillTotals(), seen, cut)
    assert late == BillBounds((0, 1), (0, 0), (0, 0))
    assert bill_differences(seen, BillTotals(3, 1, 3), late) == []
    assert bill_differences(seen, BillTotals(4, 1, 3), late) == [
        "the bill has 2 more requests, the client counted 0 to 1"
    ]
    assert bill_differences(seen, BillTotals(3, 1, 4), late) == ["the bill has 1 more tokens, the client counted 0"]


@pytest.mark.parametrize("expected", [ANSWERED, CUT, FAILED, GONE, LOST], ids=str)
@pytest.mark.parametrize("seen", [ANSWERED, CUT, FAILED, GONE, LOST, refused_with("unavailable")], ids=str)
def test_unexpected_outcome_is_a_problem(expected: RequestOutcome, seen: RequestOutcome) -> None:
    """Each outcome differs from every other one, error codes included."""
    assert bool(outcome_problems(expected, seen)) == (expected != seen)


def test_totals_are_read_from_a_bill() -> None:
    assert bill_totals_of({"requests": {"ok": 2, "cancelled": 1}, "completion_tokens": 7}) == BillTotals(3, 2, 7)


@pytest.mark.parametrize(
    ("served", "unrecorded", "is_explained"),
    [
        pytest.param(2, 1, True, id="the request that no process could record"),
        pytest.param(3, 1, False, id="another one beside it"),
        pytest.param(2, 0, False, id="nothing was killed: the control"),
    ],
)
def test_request_without_a_record_is_excused_once(served: int, unrecorded: int, is_explained: bool) -> None:
    """A bill may lack one record per request that was lost with its activator and replica. Other problems remain."""
    detail = f"it served {served} requests; 1 request records name it"
    missing = {"kind": "requests_missing", "subject": "r1", "detail": detail}
    hole = {"kind": "sequence_hole", "subject": "activator-1", "detail": "record 2 of this source never arrived"}
    found = unexplained_imbalance({"balance": {"problems": [missing, hole]}}, unrecorded)
    assert len(found) == 1 + (not is_explained)
    assert found[-1].startswith("sequence_hole: activator-1")
