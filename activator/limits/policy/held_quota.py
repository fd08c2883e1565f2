"""What one of several activators holds of a quota that they share: a part that it leases. Pure state.

A quota is a stock: a tenant's requests at once, or its budget of a month. A lease covers what is in use here, and some
ahead, so that few requests ask. What all have leased, and what is known to be used up, never exceeds the limit. What
nobody used goes back with the next renewal. An activator that does not renew loses its lease.
"""

from dataclasses import dataclass
from math import inf
from typing import Final, NamedTuple

RENEW_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class LeaseTerms:
    """How a kind of quota is leased."""

    leased_s: float  # for which the store keeps a lease of an activator that is silent
    good_s: float  # for which we use it: the store's clock began later than ours, and may be quicker
    quiet_s: float  # between two questions while there is no more to be had
    parts: int  # of the limit, one of which is leased ahead
    renews_most: bool  # renew the most that was in use at once; otherwise what is in use, and ahead if any was used
    shares_alone: bool  # without the store and a lease, each has the limit over the members

    def ahead(self, limit: int) -> int:
        """Return how much is leased ahead."""
        return max(1, limit // self.parts)


# Requests end, and come back. What is spent never comes back, and without the store others may spend what is left.
PLACES: Final = LeaseTerms(5.0, 4.0, 0.1, parts=20, renews_most=True, shares_alone=True)
BUDGETS: Final = LeaseTerms(60.0, 50.0, 0.2, parts=100, renews_most=False, shares_alone=False)


class QuotaUsage(NamedTuple):
    """What is used of a quota."""

    own: int  # here, without what is in `known`
    known: int = 0  # by all, for good
    handed_over: int = 0  # of what was `own`, in all: it is in `known` since
    period: str = ""  # for which the quota is; each has one of its own


class LeaseRequest(NamedTuple):
    """What the store is asked: as much of `want` as others leave, and `least` in any case."""

    use: QuotaUsage
    must_keep: int
    want: int
    sent_s: float


@dataclass(slots=True)
class HeldQuota:
    """One tenant's. Times are seconds of this process's clock."""

    terms: LeaseTerms
    units: int = 0  # leased, of which `handed_over` says what is known since
    handed_over: int = 0  # when so much was leased
    period: str = ""
    ends_s: float = -inf
    quiet_until_s: float = -inf
    most: int = 0  # in use at once since the last renewal; 0: nobody came

    def try_use(self, use: QuotaUsage, units: int, now_s: float) -> bool:
        """Return whether the lease covers so many more, which are in use from now on."""
        if now_s >= self.ends_s or use.own + units > self.left(use):
            return False
        self.most = max(self.most, use.own + units)
        return True

    def left(self, use: QuotaUsage) -> int:
        """Return how much of the lease is for what is in use here."""
        return max(0, self.units - (use.handed_over - self.handed_over)) if use.period == self.period else 0

    def ask(self, use: QuotaUsage, limit: int, waiting: int, now_s: float) -> LeaseRequest:
        """Return the question for requests that wait for so many units. `record_grant` is owed, unless no
        answer comes.
        """
        return self._question(use, limit, use.own + waiting + self.terms.ahead(limit), now_s)

    def renewal(self, use: QuotaUsage, limit: int, now_s: float) -> LeaseRequest:
        """Return the question that renews the lease while no request waits."""
        most, self.most = self.most, 0
        if self.terms.renews_most:
            return self._question(use, limit, most, now_s)
        return self._question(use, limit, use.own + (self.terms.ahead(limit) if most else 0), now_s)

    def record_grant(self, question: LeaseRequest, granted: int, now_s: float) -> None:
        """Take in the store's answer. Others have the rest where it grants less than was wanted."""
        self.units, self.handed_over, self.period = granted, question.use.handed_over, question.use.period
        self.ends_s = question.sent_s + self.terms.good_s
        if granted < question.want:
            self.quiet_until_s = now_s + self.terms.quiet_s

    def is_idle(self, use: QuotaUsage) -> bool:
        """Return whether it tells no more than a new one would."""
        return not (use.own or self.units)

    def _question(self, use: QuotaUsage, limit: int, want: int, now_s: float) -> LeaseRequest:
        """Ask for no more than can be had. What goes back is not used any more, since others may have it before the
        answer comes. The rest may be in use by then. Of what is spent for good it stays leased: what is known grows
        before the lease that it was of shrinks. Requests come back to their places, and would keep them for ever, also
        under a limit that was lowered.
        """
        want = max(use.own, min(want, limit - use.known))
        self.units = min(self.left(use), want)
        self.handed_over = use.handed_over
        is_kept = now_s < self.ends_s and not self.terms.renews_most
        return LeaseRequest(use, max(use.own, self.units) if is_kept else use.own, want, now_s)


def equal_share(limit: int, members: int) -> int:
    """Return what one activator has that can ask nobody."""
    return max(1, limit // members)
