"""The part of a shared quota that one of several activators leases. Pure state.

A quota is a stock: a tenant's concurrent requests, or its monthly budget. A lease covers what is in use here and some
more, so few requests need a query. All leases plus the known use stay within the limit, except for units that must be
kept (`LeaseRequest.must_keep`), for example after the limit was lowered. Unused parts go back with the next renewal. An
activator that does not renew loses its lease. Without the store, permits are limited by `equal_share`, at least 1 each.
"""

from dataclasses import dataclass
from math import inf
from typing import Final, NamedTuple

RENEW_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class LeaseTerms:
    """How a kind of quota is leased."""

    leased_s: float  # how long the store keeps a lease without renewal
    usable_s: float  # how long we use it: shorter, since the store's clock may be faster
    query_pause_s: float  # interval between queries while nothing is available
    parts: int  # 1/parts of the limit is leased ahead
    renews_peak: bool  # renew the peak use; otherwise the current use, plus the amount ahead if any was used
    uses_share_without_store: bool  # without store and lease, use limit / members

    def units_ahead(self, limit: int) -> int:
        """Return how many units are leased ahead of usage."""
        return max(1, limit // self.parts)


# Places come back when requests end. Spent money does not, and without the store others may spend the rest.
PERMITS: Final = LeaseTerms(5.0, 4.0, 0.1, parts=20, renews_peak=True, uses_share_without_store=True)
BUDGETS: Final = LeaseTerms(60.0, 50.0, 0.2, parts=100, renews_peak=False, uses_share_without_store=False)


class QuotaUsage(NamedTuple):
    """How much of a quota is used, here and in total."""

    local: int  # used here, without the part in `settled`
    settled: int = 0  # used up for good by all activators
    handed_over: int = 0  # total that has moved from `local` to `settled`
    period: str = ""  # the quota's period; each has its own lease


class LeaseRequest(NamedTuple):
    """A query to the store: lease up to `want`, as far as others leave it, and `must_keep` in any case."""

    usage: QuotaUsage
    must_keep: int
    want: int
    sent_s: float


@dataclass(slots=True)
class HeldQuota:
    """One tenant's lease. Times are seconds of this process's clock."""

    terms: LeaseTerms
    units: int = 0  # leased units
    handed_over: int = 0  # `QuotaUsage.handed_over` when they were leased
    period: str = ""
    ends_s: float = -inf
    quiet_until_s: float = -inf
    peak: int = 0  # peak use since the last renewal; 0: no request

    def try_use(self, usage: QuotaUsage, units: int, now_s: float) -> bool:
        """Return whether the lease covers `units` more. If so, they count as used from now on."""
        if now_s >= self.ends_s or usage.local + units > self.remaining(usage):
            return False
        self.peak = max(self.peak, usage.local + units)
        return True

    def remaining(self, usage: QuotaUsage) -> int:
        """Return how much of the lease remains for use here."""
        return max(0, self.units - (usage.handed_over - self.handed_over)) if usage.period == self.period else 0

    def build_lease_request(self, usage: QuotaUsage, limit: int, waiting: int, now_s: float) -> LeaseRequest:
        """Return the query for requests that wait for `waiting` units. Call `record_grant` if the store answers."""
        return self._build_request(usage, limit, usage.local + waiting + self.terms.units_ahead(limit), now_s)

    def build_renewal_request(self, usage: QuotaUsage, limit: int, now_s: float) -> LeaseRequest:
        """Return the query that renews the lease while no request waits."""
        peak, self.peak = self.peak, 0
        if self.terms.renews_peak:
            return self._build_request(usage, limit, peak, now_s)
        return self._build_request(usage, limit, usage.local + (self.terms.units_ahead(limit) if peak else 0), now_s)

    def record_grant(self, lease_request: LeaseRequest, granted: int, now_s: float) -> None:
        """Record the store's answer. If it grants less than was wanted, other activators hold the rest."""
        self.units, self.handed_over, self.period = granted, lease_request.usage.handed_over, lease_request.usage.period
        self.ends_s = lease_request.sent_s + self.terms.usable_s
        if granted < lease_request.want:
            self.quiet_until_s = now_s + self.terms.query_pause_s

    def is_idle(self, usage: QuotaUsage) -> bool:
        """Return whether nothing is used or leased, so that a new one would equal it."""
        return not (usage.local or self.units)

    def _build_request(self, usage: QuotaUsage, limit: int, want: int, now_s: float) -> LeaseRequest:
        """Return the query for up to `want` units.

        1. Ask for no more than can be granted.
        2. Units that go back are no longer used, since others may get them before the answer arrives.
        3. Requests may use the other units before the answer arrives. For a budget, those stay leased in any case,
           since `settled` grows before the lease shrinks. For concurrent requests, only used units do: their units come
           back, so keeping all would keep them for ever, even under a lowered limit.
        """
        # (1)
        want = max(usage.local, min(want, limit - usage.settled))
        # (2)
        self.units = min(self.remaining(usage), want)
        self.handed_over = usage.handed_over
        # (3)
        is_kept = now_s < self.ends_s and not self.terms.renews_peak
        return LeaseRequest(usage, max(usage.local, self.units) if is_kept else usage.local, want, now_s)


def equal_share(limit: int, members: int) -> int:
    """Return the part of a limit that one activator may use without the store."""
    return max(1, limit // members)
