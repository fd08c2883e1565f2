"""What is leased of a budget: ahead of what is needed, back what is not used, and of one month."""

import pytest

from activator.policy.budget import Spent
from activator.policy.budget_lease import GOOD_S, QUIET_S, BudgetLease, month_of
from contracts.spending import SpendingRow, TokenPrices

PRICES = TokenPrices(per_tokens=1, prompt=1, cached=1, completion=1, request=0)
END_US = 1000


def spent(month: str = "2026-11", held_micros: int = 0) -> Spent:
    row = SpendingRow(tenant="a", month=month, ends_at_us=END_US, spent_micros=40, prices=PRICES, seen={})
    return Spent("here", row, held_micros)


@pytest.mark.parametrize(
    ("month", "now_us", "want"),
    [
        pytest.param("2026-11", 0, "2026-11", id="the one that the ledger told of"),
        pytest.param("2026-11", END_US, "2026-12", id="the next, from its end on"),
        pytest.param("2026-12", END_US, "2027-01", id="of the next year"),
        pytest.param("2026-09", END_US, "2026-10", id="with two digits"),
    ],
)
def test_month_of(month: str, now_us: int, want: str) -> None:
    """As the ledger writes it."""
    assert month_of(spent(month), now_us) == want


def test_some_is_leased_ahead() -> None:
    """A hundredth of the budget beside what waits and what is used; with the next renewal what is used, and a hundredth
    where it was used lately; then what is used alone. It is good for its time.
    """
    each, lease = spent(held_micros=100), BudgetLease()
    asked = lease.ask(each, 1000, 30, 0, 5.0)
    assert (asked.month, asked.known, asked.own, asked.want) == ("2026-11", 40, 100, 140)
    lease.told(asked, 140, 6.0)
    assert [lease.covers(each, micros, 0, 6.0) for micros in (0, 40, 41)] == [True, True, False]
    assert [lease.covers(each, 40, 0, now_s) for now_s in (5.0 + GOOD_S - 0.1, 5.0 + GOOD_S)] == [True, False]
    lease.is_used = True
    wants = []
    for _ in range(2):
        asked = lease.renewal(each, 1000, 0, 7.0)
        wants.append(asked.want)
        lease.told(asked, asked.want, 7.0)
    assert wants == [110, 100]
    assert not lease.covers(each, 0, 0, 7.0), "what is used already lets nobody in"
    assert lease.quiet_until_s < 7.0
    lease.told(lease.ask(each, 1000, 30, 0, 8.0), 139, 8.0)
    assert lease.quiet_until_s == 8.0 + QUIET_S, "there is no more to be had"


def test_what_goes_back_is_not_used_meanwhile() -> None:
    """From the question on, whatever the answer will be; more is there when it was granted."""
    each, lease = spent(), BudgetLease()
    lease.told(lease.ask(each, 1000, 490, 0, 0.0), 500, 0.0)
    assert lease.covers(each, 500, 0, 1.0)
    lease.renewal(each, 1000, 0, 1.0)
    assert not lease.covers(each, 1, 0, 1.0)
    lease.told(lease.ask(each, 1000, 90, 0, 2.0), 100, 2.0)
    lease.ask(each, 1000, 490, 0, 3.0)
    assert [lease.covers(each, micros, 0, 3.0) for micros in (100, 101)] == [True, False]


def test_another_month_has_a_lease_of_its_own() -> None:
    """What was leased of the old one is nothing there."""
    each, lease = spent(held_micros=5), BudgetLease()
    lease.told(lease.ask(each, 1000, 490, 0, 0.0), 505, 0.0)
    assert not lease.covers(each, 1, END_US, 1.0)
    asked = lease.ask(each, 1000, 10, END_US, 1.0)
    assert (asked.month, asked.known, asked.own, lease.micros) == ("2026-12", 0, 5, 0)
