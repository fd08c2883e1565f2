"""What is leased of a quota: ahead of what is needed, back what is not used, and of one period."""

import pytest

from activator.limits.policy.held_quota import BUDGETS, PERMITS, HeldQuota, LeaseTerms, QuotaUsage

KNOWN, LIMIT = 40, 1000
TERMS = pytest.mark.parametrize("terms", [PERMITS, BUDGETS])


def covers(quota: HeldQuota, use: QuotaUsage, now_s: float) -> int:
    """How many more the lease covers."""
    most = quota.most
    units = 0
    while quota.try_use(use, units + 1, now_s):
        units += 1
    quota.most = most
    return units


@pytest.mark.parametrize(
    ("terms", "want", "renewed"),
    [
        pytest.param(BUDGETS, 140, [110, 100], id="budgets: a hundredth ahead, where it was used lately"),
        pytest.param(PERMITS, 180, [130, 100], id="places: what was used at once lately, and a twentieth ahead"),
    ],
)
def test_lease_covers_waiting_and_some_ahead(terms: LeaseTerms, want: int, renewed: list[int]) -> None:
    """Beside what waits and what is in use. The last renewal is for what is in use alone. It is good for its time."""
    quota, use = HeldQuota(terms), QuotaUsage(100, KNOWN)
    asked = quota.ask(use, LIMIT, 30, 5.0)
    assert (asked.use, asked.want) == (use, want)
    quota.record_grant(asked, want, 6.0)
    ends_s = 5.0 + terms.good_s
    assert [covers(quota, use, now_s) for now_s in (6.0, ends_s - 0.1, ends_s)] == [want - 100, want - 100, 0]
    assert quota.try_use(use, 30, 6.0)
    wants = []
    for _ in range(2):
        asked = quota.renewal(use, LIMIT, 7.0)
        wants.append(asked.want)
        quota.record_grant(asked, asked.want, 7.0)
    assert wants == renewed
    assert not covers(quota, use, 7.0), "what is used already lets nobody in"
    assert quota.quiet_until_s < 7.0
    quota.record_grant(quota.ask(use, LIMIT, 30, 8.0), want - 1, 8.0)
    assert quota.quiet_until_s == 8.0 + terms.quiet_s, "there is no more to be had"


@TERMS
def test_no_more_is_asked_for_than_can_be_had(terms: LeaseTerms) -> None:
    """What is known to be used is nobody's; what is in use here stays, whatever the limit."""
    quota = HeldQuota(terms)
    asked = quota.ask(QuotaUsage(10, KNOWN), 100, 60, 0.0)
    assert asked.want == 60
    quota.record_grant(asked, 60, 0.0)
    assert quota.quiet_until_s < 0.0, "it has all that there is"
    assert quota.renewal(QuotaUsage(60, KNOWN), 50, 1.0).want == 60


@TERMS
def test_small_limit_is_leased_ahead_by_one(terms: LeaseTerms) -> None:
    """However small a part of it is."""
    assert HeldQuota(terms).ask(QuotaUsage(0), terms.parts - 1, 1, 0.0).want == 2


@TERMS
def test_returned_units_are_not_used_during_a_request(terms: LeaseTerms) -> None:
    """From the question on, whatever the answer will be; more is there when it was granted."""
    quota, use = HeldQuota(terms), QuotaUsage(0, KNOWN)
    quota.record_grant(quota.ask(use, LIMIT, 400, 0.0), 500, 0.0)
    assert covers(quota, use, 1.0) == 500
    quota.renewal(use, LIMIT, 1.0)
    assert not covers(quota, use, 1.0)
    quota.record_grant(quota.ask(use, LIMIT, 50, 2.0), 60, 2.0)
    quota.ask(use, LIMIT, 490, 3.0)
    assert covers(quota, use, 3.0) == 60


@pytest.mark.parametrize(("terms", "least"), [(BUDGETS, 70), (PERMITS, 10)])
def test_spendable_units_stay_leased(terms: LeaseTerms, least: int) -> None:
    """The store may have less for us by now. Once the lease's time is over, nobody uses it, and others may have it.
    Places that are not in use are given up.
    """
    quota, use = HeldQuota(terms), QuotaUsage(10)
    quota.record_grant(quota.ask(use, LIMIT, 50, 0.0), 80, 0.0)
    asked = quota.ask(use, 70, 100, 1.0)
    assert (asked.must_keep, asked.want) == (least, 70)
    assert covers(quota, use, 1.0) == 60
    assert quota.renewal(use, LIMIT, 3.0).must_keep == 10
    quota.record_grant(quota.ask(use, LIMIT, 50, 4.0), 80, 4.0)
    assert quota.ask(use, LIMIT, 100, 4.0 + terms.good_s).must_keep == 10


@TERMS
def test_what_was_handed_over_is_no_longer_of_the_lease(terms: LeaseTerms) -> None:
    """It is known to be used, and the lease was for what is not."""
    quota = HeldQuota(terms)
    quota.record_grant(quota.ask(QuotaUsage(30, 0, 5), LIMIT, 50, 0.0), 80, 0.0)
    use = QuotaUsage(10, 20, 25)
    assert covers(quota, use, 0.0) == 80 - 20 - 10
    quota.ask(use, LIMIT, 100, 0.0)
    assert covers(quota, use, 0.0) == 80 - 20 - 10, "once"
    assert not covers(quota, QuotaUsage(0, 100, 105), 0.0)


@TERMS
def test_another_period_has_a_lease_of_its_own(terms: LeaseTerms) -> None:
    """What was leased of the old one is nothing there."""
    quota = HeldQuota(terms)
    quota.record_grant(quota.ask(QuotaUsage(5, period="2026-11"), LIMIT, 490, 0.0), 505, 0.0)
    later = QuotaUsage(5, period="2026-12")
    assert not covers(quota, later, 1.0)
    quota.record_grant(quota.ask(later, LIMIT, 10, 1.0), 16, 1.0)
    assert covers(quota, later, 1.0) == 11


@TERMS
def test_unused_quota_is_forgotten(terms: LeaseTerms) -> None:
    """Once it has given everything back."""
    quota, use = HeldQuota(terms), QuotaUsage(0)
    assert quota.is_idle(use)
    quota.record_grant(quota.ask(use, LIMIT, 1, 0.0), 1, 0.0)
    assert quota.try_use(use, 1, 0.0)
    states = []
    for _ in range(3):
        states.append(quota.is_idle(use))
        asked = quota.renewal(use, LIMIT, 0.0)
        quota.record_grant(asked, asked.want, 0.0)
    assert states == [False, False, True]
    assert not quota.is_idle(QuotaUsage(1))
