"""What the bill may be after each kind of end, and that another one is noticed."""

import pytest

from coldstart_bench.endings import (
    ANSWERED,
    CUT,
    FAILED,
    GONE,
    Bounds,
    Ending,
    Outcome,
    Totals,
    bounds_of,
    differences,
    refused,
    totals_of,
)
from tests.drills.bill import bounds_of_all, reasons, remaining, unexplained

LOST = refused("replica_lost")


@pytest.mark.parametrize(
    ("ending", "bounds"),
    [
        pytest.param(Ending(ANSWERED, 9, 9, whole=True), Bounds((1, 1), (1, 1), (9, 9)), id="answered: to the token"),
        pytest.param(Ending(LOST, 9, 50), Bounds((1, 1), (0, 0), (9, 9)), id="told that it failed: to the token"),
        pytest.param(Ending(CUT, 100, 500), Bounds((1, 1), (0, 0), (36, 100)), id="cut: up to 64 uncharged"),
        pytest.param(Ending(CUT, 0, 500), Bounds((0, 1), (0, 0), (0, 0)), id="cut before a token: nothing charged"),
        pytest.param(Ending(CUT, 9, 9, whole=True), Bounds((1, 1), (0, 1), (9, 9)), id="cut at its end: to the token"),
        pytest.param(Ending(CUT, 9, 50, unread=99), Bounds((1, 1), (0, 0), (0, 50)), id="a silent line takes some"),
        pytest.param(
            Ending(CUT, 9, 50, unrecorded=True), Bounds((0, 1), (0, 0), (0, 9)), id="nobody is left to record it"
        ),
        pytest.param(Ending(GONE, 9, 500), Bounds((1, 1), (0, 0), (9, 73)), id="a killed client: what was on its way"),
        pytest.param(Ending(GONE, 9, 10), Bounds((1, 1), (0, 0), (9, 10)), id="but never more than it asked for"),
        pytest.param(Ending(FAILED), Bounds(), id="a command costs nothing"),
    ],
)
def test_bounds(ending: Ending, bounds: Bounds) -> None:
    """Requests, those that went well, tokens."""
    assert bounds_of(ending) == bounds


def test_bounds_add_up() -> None:
    """Of several requests."""
    both = bounds_of_all([Ending(ANSWERED, 3, 3, whole=True), Ending(CUT, 2, 9)])
    assert both == Bounds((2, 2), (1, 1), (3, 5))


ONE = bounds_of(Ending(ANSWERED, 10, 10, whole=True))


@pytest.mark.parametrize(
    ("after", "wrong"),
    [
        pytest.param(Totals(3, 3, 25), [], id="as counted"),
        pytest.param(Totals(2, 2, 15), ["requests", "requests that went well", "tokens"], id="a record is dropped"),
        pytest.param(Totals(4, 4, 35), ["requests", "requests that went well", "tokens"], id="one is there twice"),
        pytest.param(Totals(3, 2, 25), ["requests that went well"], id="another outcome"),
        pytest.param(Totals(3, 3, 24), ["tokens"], id="a token short"),
        pytest.param(Totals(3, 3, 26), ["tokens"], id="a token over"),
    ],
)
def test_differences(after: Totals, wrong: list[str]) -> None:
    """Each figure that the client did not count so."""
    found = differences(Totals(2, 2, 15), after, ONE)
    assert [line.split(" more ")[1].split(", the")[0] for line in found] == wrong


def test_a_record_may_come_late_and_once() -> None:
    """Of two requests whose door died before a token one record is there: one more may come, and no third."""
    cut = bounds_of_all([Ending(CUT, 0, 9), Ending(CUT, 0, 9), Ending(ANSWERED, 3, 3, whole=True)])
    seen = Totals(2, 1, 3)
    late = remaining(Totals(), seen, cut)
    assert late == Bounds((0, 1), (0, 0), (0, 0))
    assert differences(seen, Totals(3, 1, 3), late) == []
    assert differences(seen, Totals(4, 1, 3), late) == ["the bill has 2 more requests, the client counted 0 to 1"]
    assert differences(seen, Totals(3, 1, 4), late) == ["the bill has 1 more tokens, the client counted 0"]


@pytest.mark.parametrize("expected", [ANSWERED, CUT, FAILED, GONE, LOST], ids=str)
@pytest.mark.parametrize("seen", [ANSWERED, CUT, FAILED, GONE, LOST, refused("unavailable")], ids=str)
def test_any_other_outcome_is_red(expected: Outcome, seen: Outcome) -> None:
    """The control of every class: only what is stated is green, a code included."""
    assert bool(reasons(expected, seen)) == (expected != seen)


def test_totals() -> None:
    """Of a report of the admin API."""
    assert totals_of({"requests": {"ok": 2, "cancelled": 1}, "completion_tokens": 7}) == Totals(3, 2, 7)


@pytest.mark.parametrize(
    ("served", "unrecorded", "is_explained"),
    [
        pytest.param(2, 1, True, id="the request that nobody could record"),
        pytest.param(3, 1, False, id="another one beside it"),
        pytest.param(2, 0, False, id="nothing was killed: the control"),
    ],
)
def test_request_without_a_record_is_excused_once(served: int, unrecorded: int, is_explained: bool) -> None:
    """A bill may lack as many records as requests were lost with everything; any other problem stays one."""
    detail = f"it served {served} requests; 1 request records name it"
    missing = {"kind": "requests_missing", "subject": "r1", "detail": detail}
    hole = {"kind": "sequence_hole", "subject": "activator-1", "detail": "record 2 of this source never arrived"}
    found = unexplained({"balance": {"problems": [missing, hole]}}, unrecorded)
    assert len(found) == 1 + (not is_explained)
    assert found[-1].startswith("sequence_hole: activator-1")
