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
    good_s: float  # how long we use it: shorter, since the store's clock may be faster
    quiet_s: float  # interval between queries while nothing is available
    parts: int  # 1/parts of the limit is leased ahead
    renews_most: bool  # renew the peak use; otherwise the current use, plus the amount ahead if any was used
    shares_alone: bool  # without store and lease, use limit / members

    def ahead(self, limit: int) -> int:
        """Return how many units are leased ahead of use."""
        return max(1, limit // self.parts)


# Places come back when requests end. Spent money does not, and without the store others may spend the rest.
PERMITS: Final = LeaseTerms(5.0, 4.0, 0.1, parts=20, renews_most=True, shares_alone=True)
BUDGETS: Final = LeaseTerms(60.0, 50.0, 0.2, parts=100, renews_most=False, shares_alone=False)


class QuotaUsage(NamedTuple):
    """How much of a quota is used, here and in total."""

    own: int  # used here, without the part in `known`
    known: int = 0  # used up for good by all activators
    handed_over: int = 0  # total that has moved from `own` to `known`
    period: str = ""  # the quota's period; each has its own lease


class LeaseRequest(NamedTuple):
    """A query to the store: lease up to `want`, as far as others leave it, and `must_keep` in any case."""

    use: QuotaUsage
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
    most: int = 0  # peak use since the last renewal; 0: no request

    def try_use(self, use: QuotaUsage, units: int, now_s: float) -> bool:
        """Return whether the lease covers `units` more. If so, they count as used from now on."""
        if now_s >= self.ends_s or use.own + units > self.left(use):
            return False
        self.most = max(self.most, use.own + units)
        return True

    def left(self, use: QuotaUsage) -> int:
        """Return how much of the lease remains for use here."""
        return max(0, self.units - (use.handed_over - self.handed_over)) if use.period == self.period else 0

    def ask(self, use: QuotaUsage, limit: int, waiting: int, now_s: float) -> LeaseRequest:
        """Return the query for requests that wait for `waiting` units. Call `record_grant` if the store answers."""
        return self._question(use, limit, use.own + waiting + self.terms.ahead(limit), now_s)

    def renewal(self, use: QuotaUsage, limit: int, now_s: float) -> LeaseRequest:
        """Return the query that renews the lease while no request waits."""
        most, self.most = self.most, 0
        if self.terms.renews_most:
            return self._question(use, limit, most, now_s)
        return self._question(use, limit, use.own + (self.terms.ahead(limit) if most else 0), now_s)

    def record_grant(self, question: LeaseRequest, granted: int, now_s: float) -> None:
        """Record the store's answer. If it grants less than was wanted, other activators hold the rest."""
        self.units, self.handed_over, self.period = granted, question.use.handed_over, question.use.period
        self.ends_s = question.sent_s + self.terms.good_s
        if granted < question.want:
            self.quiet_until_s = now_s + self.terms.quiet_s

    def is_idle(self, use: QuotaUsage) -> bool:
        """Return whether nothing is used or leased, so that a new one would equal it."""
        return not (use.own or self.units)

    def _question(self, use: QuotaUsage, limit: int, want: int, now_s: float) -> LeaseRequest:
        """Return the query for up to `want` units.

        1. Ask for no more than can be granted.
        2. Units that go back are no longer used, since others may get them before the answer arrives.
        3. Requests may use the other units before the answer arrives. For a budget, those stay leased in any case,
           since `known` grows before the lease shrinks. For concurrent requests, only used units do: their units come
           back, so keeping all would keep them for ever, even under a lowered limit.
        """
        # (1)
        want = max(use.own, min(want, limit - use.known))
        # (2)
        self.units = min(self.left(use), want)
        self.handed_over = use.handed_over
        # (3)
        is_kept = now_s < self.ends_s and not self.terms.renews_most
        return LeaseRequest(use, max(use.own, self.units) if is_kept else use.own, want, now_s)


def equal_share(limit: int, members: int) -> int:
    """Return the part of a limit that one activator may use without the store."""
    return max(1, limit // members)
