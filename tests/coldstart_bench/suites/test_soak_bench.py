"""A soak finds requests that ended wrongly, and a bill that differs from the clients' count."""

import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import pytest

from coldstart_bench.harness.activator_testbed import answer_texts
from coldstart_bench.harness.fault_injection import FaultEvent
from coldstart_bench.harness.installation import Installation, InstallationFailed
from coldstart_bench.harness.load_protocol import CUT, NO_DOOR, NO_END, LoadResult, ReaderKind, RequestResult
from coldstart_bench.harness.request_outcome import BillBounds, BillTotals, bill_differences
from coldstart_bench.suites.soak_bench import (
    SoakFigures,
    bill_bounds_for,
    billed,
    figures_of,
    find_wrong_end,
    judge,
    wrong_command,
)

RIGHT = "w1 w2 w3 w4"
LIMIT = 4


def sent(status: int = 200, code: str = "", *, went: bool = True) -> RequestResult:
    """Return one request's result."""
    return RequestResult(0, 0, 10 if went else None, None, 1000, status, code, 0, False)


@pytest.mark.parametrize(
    ("one", "text", "reader", "why"),
    [
        pytest.param(sent(), RIGHT, ReaderKind.QUICK, None, id="whole"),
        pytest.param(sent(), "w1 w2 w3 w5", ReaderKind.QUICK, "another text", id="whole, and another text"),
        pytest.param(sent(), "w1 w2", ReaderKind.QUICK, "another text", id="said to be whole, and is not"),
        pytest.param(sent(200, "replica_lost"), "w1 w2", ReaderKind.QUICK, None, id="a part of it, and why"),
        pytest.param(sent(200, "replica_lost"), "w9", ReaderKind.QUICK, "another text before", id="another one's part"),
        pytest.param(sent(200, CUT), "w1", ReaderKind.QUICK, None, id="cut"),
        pytest.param(sent(0, NO_DOOR, went=False), "", ReaderKind.QUICK, None, id="no door"),
        pytest.param(
            sent(500, "internal_error"), "", ReaderKind.QUICK, "internal_error", id="an error that is none of these"
        ),
        pytest.param(sent(401, "invalid_api_key"), "", ReaderKind.QUICK, "invalid_api_key", id="a key that was good"),
        pytest.param(sent(200, NO_END), "w1", ReaderKind.QUICK, NO_END, id="it never ended"),
        pytest.param(sent(200, NO_END), "w1", ReaderKind.SILENT, None, id="it was never read"),
    ],
)
def test_request_end_is_judged(one: RequestResult, text: str, reader: ReaderKind, why: str | None) -> None:
    """A right end gives None, a wrong end its reason."""
    found = find_wrong_end(one, text, RIGHT, reader)
    assert found == why or (why is not None and found is not None and found.startswith(why))


@pytest.mark.parametrize(
    ("one", "text", "reader", "want"),
    [
        pytest.param(sent(), RIGHT, ReaderKind.QUICK, BillBounds((1, 1), (1, 1), (4, 4)), id="to the token"),
        pytest.param(
            sent(200, "replica_lost"),
            "w1",
            ReaderKind.QUICK,
            BillBounds((1, 1), (0, 0), (1, 1)),
            id="told, and counted",
        ),
        pytest.param(
            sent(503, "unavailable"),
            "",
            ReaderKind.QUICK,
            BillBounds((0, 1), (0, 0), (0, 0)),
            id="refused, perhaps before authentication",
        ),
        pytest.param(
            sent(200, CUT), "w1 w2", ReaderKind.QUICK, BillBounds((1, 1), (0, 0), (0, 2)), id="cut after some"
        ),
        pytest.param(sent(0, CUT), "", ReaderKind.QUICK, BillBounds((0, 1), (0, 0), (0, 0)), id="cut before any"),
        pytest.param(
            sent(200, CUT), "w1", ReaderKind.SLOW, BillBounds((0, 1), (0, 1), (0, 4)), id="cut, and not all was read"
        ),
        pytest.param(sent(200, NO_END), "w1", ReaderKind.SILENT, BillBounds((0, 1), (0, 1), (0, 4)), id="never read"),
        pytest.param(sent(0, NO_DOOR, went=False), "", ReaderKind.QUICK, BillBounds(), id="never there"),
    ],
)
def test_bill_bounds_follow_what_the_client_read(
    one: RequestResult, text: str, reader: ReaderKind, want: BillBounds
) -> None:
    """A client that read everything and saw the end has an exact bill."""
    assert bill_bounds_for(one, text, LIMIT, reader) == want


def test_differing_bill_is_found() -> None:
    """Negative control: a duplicate request, a missing request and a surplus token are found."""
    bounds = bill_bounds_for(sent(), RIGHT, LIMIT, ReaderKind.QUICK)
    assert bill_differences(BillTotals(), BillTotals(1, 1, 4), bounds) == []
    for bill in (BillTotals(2, 2, 8), BillTotals(), BillTotals(1, 1, 5)):
        assert bill_differences(BillTotals(), bill, bounds)


def soaked(**found: object) -> SoakFigures:
    """Return good figures of ten requests and a killed runtime, except for `found`."""
    fine = {"wrong": (), "events": (FaultEvent(1.0, "SIGKILL runtime", 0.1),), "bill": (), "left": (), "again": 1.0}
    return figures_of(5.0, [sent()] * 9 + [sent(503, "overloaded")], memory=None, **(fine | found))


@pytest.mark.parametrize(
    ("found", "want"),
    [
        pytest.param({}, [], id="all holds"),
        pytest.param({"wrong": ("x",)}, ["requests that ended"], id="one ended wrongly"),
        pytest.param({"events": (FaultEvent(1.0, "x", None),)}, ["faults after which"], id="something stayed down"),
        pytest.param({"events": ()}, ["faults that were done"], id="nothing was done to it"),
        pytest.param(
            {"events": (FaultEvent(1.0, "x", 0.1, "no"),) * 3}, ["faults that were done"], id="none could be done"
        ),
        pytest.param({"bill": ("x",)}, ["differences of the bill"], id="the bill"),
        pytest.param({"left": ("x",)}, ["things that are left"], id="a process is left"),
        pytest.param(
            {"again": 0.0}, ["share of requests after"], id="all that comes after is refused, however rightly"
        ),
        pytest.param({"again": 0.75}, ["share of requests after"], id="one of what comes after is refused"),
    ],
)
def test_missed_soak_limit_fails_its_claim_alone(found: dict[str, object], want: list[str]) -> None:
    red = [verdict.claim for verdict in judge(soaked(**found)) if verdict.passed is False]
    assert len(red) == len(want)
    assert all(claim.startswith(start) for claim, start in zip(red, want, strict=True))


def test_requests_are_counted_by_outcome() -> None:
    found = soaked()
    assert (found.sent, found.answered, found.told) == (10, 9, {"overloaded": 1})


class Billed:
    """An installation that began in one month and is billed in the next."""

    began_s = datetime(2026, 10, 31, 23, tzinfo=UTC).timestamp()
    bills = Installation.bills

    def __init__(self) -> None:
        self.admin = self

    def request(self, method: str, path: str) -> Any:
        requests = {"2026-10": 3, "2026-11": 2}[path.partition("month=")[2]]
        return {"requests": {"ok": requests}, "completion_tokens": 4 * requests}


def test_bill_is_that_of_all_months_of_a_soak(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of both months are counted."""
    monkeypatch.setattr(time, "time", lambda: datetime(2026, 11, 1, 2, tzinfo=UTC).timestamp())
    assert billed(cast(Installation, Billed())) == BillTotals(5, 5, 20)


def test_command_that_does_not_end_is_wrong(tmp_path: Path) -> None:
    """A command that hangs is reported like one that fails."""
    assert "fsck did not end within 0.01 s" in str(wrong_command(tmp_path, "fsck", limit_s=0.01))
    assert "fsck ends with" in str(wrong_command(tmp_path, "fsck"))
    assert wrong_command(tmp_path, "fsck", "--help") is None


def test_without_answers_beforehand_there_is_no_soak() -> None:
    """An activator that refuses everything would agree with itself, so a soak needs answers first."""
    assert answer_texts(LoadResult(0, (sent(),), (RIGHT,))) == [RIGHT]
    with pytest.raises(InstallationFailed, match="1 of 2 had no answer: not answered: breaker_open"):
        answer_texts(LoadResult(0, (sent(), sent(503, "breaker_open")), (RIGHT,)))
    with pytest.raises(InstallationFailed, match="1 of 1 had no answer"):
        answer_texts(LoadResult(0, (sent(),), ("",)))
