"""HeldQuota, a leased part of a quota: how much is leased ahead, what is returned, and the end of a period."""

import pytest

from activator.limits.policy.held_quota import BUDGETS, PERMITS, HeldQuota, LeaseTerms, QuotaUsage

KNOWN, LIMIT = 40, 1000
TERMS = pytest.mark.parametrize("terms", [PERMITS, BUDGETS])


def covers(quota: HeldQuota, use: QuotaUsage, now_s: float) -> int:
    """Return how many more units the lease covers."""
    most = quota.peak
    units = 0
    while quota.try_use(use, units + 1, now_s):
        units += 1
    quota.peak = most
    return units


@pytest.mark.parametrize(
    ("terms", "want", "renewed"),
    [
        pytest.param(BUDGETS, 140, [110, 100], id="budgets: a hundredth ahead, where it was used lately"),
        pytest.param(PERMITS, 180, [130, 100], id="places: what was used at once lately, and a twentieth ahead"),
    ],
)
def test_lease_covers_waiting_and_some_ahead(terms: LeaseTerms, want: int, renewed: list[int]) -> None:
    """The lease covers the waiting units, those in use, and some ahead. The last renewal covers those in use only. The
    lease ends after `usable_s`.
    """
    quota, use = HeldQuota(terms), QuotaUsage(100, KNOWN)
    lease_request = quota.build_lease_request(use, LIMIT, 30, 5.0)
    assert (lease_request.usage, lease_request.want) == (use, want)
    quota.record_grant(lease_request, want, 6.0)
    ends_s = 5.0 + terms.usable_s
    assert [covers(quota, use, now_s) for now_s in (6.0, ends_s - 0.1, ends_s)] == [want - 100, want - 100, 0]
    assert quota.try_use(use, 30, 6.0)
    wants = []
    for _ in range(2):
        lease_request = quota.build_renewal_request(use, LIMIT, 7.0)
        wants.append(lease_request.want)
        quota.record_grant(lease_request, lease_request.want, 7.0)
    assert wants == renewed
    assert not covers(quota, use, 7.0), "the lease covers only units in use"
    assert quota.quiet_until_s < 7.0
    quota.record_grant(quota.build_lease_request(use, LIMIT, 30, 8.0), want - 1, 8.0)
    assert quota.quiet_until_s == 8.0 + terms.query_pause_s, "the store has no more"


@TERMS
def test_no_more_is_asked_for_than_can_be_had(terms: LeaseTerms) -> None:
    """Units known to be used elsewhere can't be leased. Units in use here stay leased, whatever the limit."""
    quota = HeldQuota(terms)
    lease_request = quota.build_lease_request(QuotaUsage(10, KNOWN), 100, 60, 0.0)
    assert lease_request.want == 60
    quota.record_grant(lease_request, 60, 0.0)
    assert quota.quiet_until_s < 0.0, "it leased all that was left"
    assert quota.build_renewal_request(QuotaUsage(60, KNOWN), 50, 1.0).want == 60


@TERMS
def test_small_limit_is_leased_ahead_by_one(terms: LeaseTerms) -> None:
    """One unit is leased ahead even if that is more than the usual part."""
    assert HeldQuota(terms).build_lease_request(QuotaUsage(0), terms.parts - 1, 1, 0.0).want == 2


@TERMS
def test_returned_units_are_not_used_during_a_request(terms: LeaseTerms) -> None:
    """Units that a request to the store returns are not used from then on, whatever the answer is."""
    quota, use = HeldQuota(terms), QuotaUsage(0, KNOWN)
    quota.record_grant(quota.build_lease_request(use, LIMIT, 400, 0.0), 500, 0.0)
    assert covers(quota, use, 1.0) == 500
    quota.build_renewal_request(use, LIMIT, 1.0)
    assert not covers(quota, use, 1.0)
    quota.record_grant(quota.build_lease_request(use, LIMIT, 50, 2.0), 60, 2.0)
    quota.build_lease_request(use, LIMIT, 490, 3.0)
    assert covers(quota, use, 3.0) == 60


@pytest.mark.parametrize(("terms", "must_keep"), [(BUDGETS, 70), (PERMITS, 10)])
def test_spendable_units_stay_leased(terms: LeaseTerms, must_keep: int) -> None:
    """The store may have less left by now, so unused units of a lease are kept. After the lease's time they are not.
    Unused permits are given up.
    """
    quota, use = HeldQuota(terms), QuotaUsage(10)
    quota.record_grant(quota.build_lease_request(use, LIMIT, 50, 0.0), 80, 0.0)
    lease_request = quota.build_lease_request(use, 70, 100, 1.0)
    assert (lease_request.must_keep, lease_request.want) == (must_keep, 70)
    assert covers(quota, use, 1.0) == 60
    assert quota.build_renewal_request(use, LIMIT, 3.0).must_keep == 10
    quota.record_grant(quota.build_lease_request(use, LIMIT, 50, 4.0), 80, 4.0)
    assert quota.build_lease_request(use, LIMIT, 100, 4.0 + terms.usable_s).must_keep == 10


@TERMS
def test_what_was_handed_over_is_no_longer_of_the_lease(terms: LeaseTerms) -> None:
    """Units that the ledger has taken over no longer count in the lease."""
    quota = HeldQuota(terms)
    quota.record_grant(quota.build_lease_request(QuotaUsage(30, 0, 5), LIMIT, 50, 0.0), 80, 0.0)
    use = QuotaUsage(10, 20, 25)
    assert covers(quota, use, 0.0) == 80 - 20 - 10
    quota.build_lease_request(use, LIMIT, 100, 0.0)
    assert covers(quota, use, 0.0) == 80 - 20 - 10, "once"
    assert not covers(quota, QuotaUsage(0, 100, 105), 0.0)


@TERMS
def test_another_period_has_a_lease_of_its_own(terms: LeaseTerms) -> None:
    """A lease of the old period covers nothing in the new one."""
    quota = HeldQuota(terms)
    quota.record_grant(quota.build_lease_request(QuotaUsage(5, period="2026-11"), LIMIT, 490, 0.0), 505, 0.0)
    later = QuotaUsage(5, period="2026-12")
    assert not covers(quota, later, 1.0)
    quota.record_grant(quota.build_lease_request(later, LIMIT, 10, 1.0), 16, 1.0)
    assert covers(quota, later, 1.0) == 11


@TERMS
def test_unused_quota_is_forgotten(terms: LeaseTerms) -> None:
    """It is idle once everything was returned."""
    quota, use = HeldQuota(terms), QuotaUsage(0)
    assert quota.is_idle(use)
    quota.record_grant(quota.build_lease_request(use, LIMIT, 1, 0.0), 1, 0.0)
    assert quota.try_use(use, 1, 0.0)
    states = []
    for _ in range(3):
        states.append(quota.is_idle(use))
        lease_request = quota.build_renewal_request(use, LIMIT, 0.0)
        quota.record_grant(lease_request, lease_request.want, 0.0)
    assert states == [False, False, True]
    assert not quota.is_idle(QuotaUsage(1))
