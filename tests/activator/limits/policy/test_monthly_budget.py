"""A tenant's monthly spending: the ledger's sum and the records it lacks, each counted once, in any order."""

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from activator.limits.policy.monthly_budget import MAX_UNREPORTED, TenantSpending
from kelvin.contracts.accounting.spending import SpendingRow, TokenPrices

PRICES = TokenPrices(per_tokens=1, prompt=1, cached=1, completion=1, request=0)
END_US = 1000


def row(spent_micros: int, seen: int = 0, *, ends_at_us: int = END_US) -> SpendingRow:
    return SpendingRow(
        tenant="a", month="2026-11", ends_at_us=ends_at_us, spent_micros=spent_micros, prices=PRICES,
        seen={"here": seen, "elsewhere": 999},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("spent", "held", "wanted", "want"),
    [
        pytest.param(0, 0, 100, True, id="all of it"),
        pytest.param(0, 0, 101, False, id="more than all of it"),
        pytest.param(60, 30, 10, True, id="the rest"),
        pytest.param(60, 30, 11, False, id="more than the rest"),
        pytest.param(100, 0, 0, False, id="nothing is left, even for a free request"),
        pytest.param(0, 100, 0, False, id="all is held, even for a free request"),
        pytest.param(999, 0, 1, False, id="a budget that was lowered below what is spent"),
    ],
)
def test_budget_covers_spent_and_held_amounts(spent: int, held: int, wanted: int, want: bool) -> None:
    """The ledger's sum plus the amount held by running requests."""
    each = TenantSpending("here", row(spent), held)
    assert each.try_hold(100, wanted, 0) == want
    assert each.held_micros == held + (wanted if want else 0)


def test_a_record_counts_until_the_ledger_has_it() -> None:
    """A record is not counted twice if the ledger has it before it is known to be durable."""
    each = TenantSpending("here", row(10))
    for sequence in (1, 2, 3):
        assert each.try_hold(100, 20, 0)
        each.settle(20, 5, sequence, 0)
    assert (each.spent_micros(0), each.held_micros) == (25, 0)
    each.apply_ledger_row(row(20, seen=2))
    assert each.spent_micros(0) == 25
    each.apply_ledger_row(row(30, seen=4))
    assert each.try_hold(100, 20, 0)
    each.settle(20, 5, 4, 0)
    assert each.spent_micros(0) == 30


def test_a_new_month_begins_with_what_ended_in_it() -> None:
    """Records that end in the new month count before the ledger's first row of it. Earlier ones don't."""
    each = TenantSpending("here", row(90))
    each.settle(0, 5, 1, END_US - 1)
    assert not each.try_hold(95, 1, END_US - 1)
    each.settle(0, 7, 2, END_US)
    assert each.spent_micros(END_US) == 7
    each.apply_ledger_row(row(12, seen=2, ends_at_us=2 * END_US))
    assert each.spent_micros(END_US) == 12


NOVEMBER_US, DECEMBER_US, JANUARY_US = (
    int(datetime(year, month, 1, tzinfo=UTC).timestamp()) * 1_000_000
    for year, month in ((2026, 11), (2026, 12), (2027, 1))
)
MINUTE_US = 60_000_000


def november(spent_micros: int, **more: dict[str, int]) -> SpendingRow:
    return replace(row(spent_micros, ends_at_us=DECEMBER_US), **more)


def december(spent_micros: int, **more: dict[str, int]) -> SpendingRow:
    return replace(row(spent_micros, ends_at_us=JANUARY_US), month="2026-12", **more)


@pytest.mark.parametrize(
    ("month", "now_us", "want"),
    [
        pytest.param("2026-11", 0, "2026-11", id="the ledger's month"),
        pytest.param("2026-11", END_US, "2026-12", id="the next month, from its end on"),
        pytest.param("2026-12", END_US, "2027-01", id="January of the next year"),
        pytest.param("2026-09", END_US, "2026-10", id="a month of two digits"),
    ],
)
def test_month_is_formatted_as_in_the_ledger(month: str, now_us: int, want: str) -> None:
    assert TenantSpending("here", replace(row(0), month=month)).month_at(now_us) == want


def test_a_control_plane_ahead_of_us_opens_no_budget() -> None:
    """The control plane reports December while the activator is in November. Requests still count in November, whose
    budget is spent.
    """
    each, now_us = TenantSpending("here", november(1000)), DECEMBER_US - 10 * MINUTE_US
    each.apply_ledger_row(december(0))
    assert each.month_at(now_us) == "2026-11"
    assert not each.try_hold(1000, 1, now_us)
    assert each.try_hold(1000, 1000, DECEMBER_US)


def test_record_counts_in_the_month_it_ended_in() -> None:
    """They count even after the ledger has them, when it reports December only."""
    each, now_us = TenantSpending("here", november(900)), DECEMBER_US - 10 * MINUTE_US
    each.apply_ledger_row(december(0))
    for sequence in range(1, 3):
        assert each.try_hold(1000, 50, now_us)
        each.settle(50, 50, sequence, now_us)
        each.apply_ledger_row(december(0, seen={"here": sequence}))
    assert not each.try_hold(1000, 1, now_us)
    assert each.spent_micros(DECEMBER_US) == 0


def test_ledger_row_includes_adjacent_months() -> None:
    """A new activator knows only the December row. It includes what others spent in November."""
    each, now_us = TenantSpending("here"), DECEMBER_US - 10 * MINUTE_US
    each.apply_ledger_row(december(7, beside={"2026-11": 1000}))
    assert not each.try_hold(1000, 1, now_us)
    each.apply_ledger_row(december(7, beside={"2026-11": 940}))
    assert each.spent_micros(now_us) == 940
    assert each.spent_micros(DECEMBER_US) == 7


def test_a_control_plane_behind_us_opens_no_budget() -> None:
    """The control plane reports November while it is December here."""
    each = TenantSpending("here", november(1000))
    each.apply_ledger_row(november(1000, beside={"2026-12": 995}, seen={"here": 1}))
    assert not each.try_hold(1000, 6, DECEMBER_US + MINUTE_US)
    assert each.try_hold(1000, 5, DECEMBER_US + MINUTE_US)
    assert each.month_at(DECEMBER_US) == "2026-12"


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 4)), max_size=100), st.integers(1, 500))
def test_what_is_spent_never_passes_the_budget(steps: list[tuple[int, int]], budget: int) -> None:
    """Requests cost at most what they hold, and ledger rows arrive at any time. Each record counts exactly once."""
    each, ledger, spent, sequence, shipped = TenantSpending("here", row(0)), 0, 0, 0, 0
    records: list[int] = []
    for most, what in steps:
        if each.try_hold(budget, most, 0):
            sequence += 1
            micros = most * what // 4
            each.settle(most, micros, sequence, 0)
            records.append(micros)
            spent += micros
        if what == 0:
            shipped = sequence
            ledger = sum(records)
        if what in (0, 1):
            each.apply_ledger_row(row(ledger, shipped))
        assert each.spent_micros(0) == spent <= budget
    assert each.held_micros == 0


def test_ledger_outage_uses_bounded_memory() -> None:
    """Records beyond UNSEEN still count."""
    each = TenantSpending("here", row(0))
    for sequence in range(1, MAX_UNREPORTED + 101):
        each.settle(0, 1, sequence, 0)
    assert (each.unreported_count, each.spent_micros(0)) == (MAX_UNREPORTED, MAX_UNREPORTED + 100)
    each.apply_ledger_row(row(MAX_UNREPORTED, MAX_UNREPORTED))
    assert each.spent_micros(0) >= MAX_UNREPORTED + 100
    each.apply_ledger_row(row(MAX_UNREPORTED + 100, MAX_UNREPORTED + 100))
    assert (each.unreported_count, each.spent_micros(0)) == (0, MAX_UNREPORTED + 100)
