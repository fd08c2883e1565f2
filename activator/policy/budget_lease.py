"""What one of several activators may spend of a tenant's month: a part of its budget that it leases. Pure state.

A lease covers what the ledger lacks of this activator's: requests under way, at the most that they may cost, and
records. It shrinks by what the ledger takes over, so that what the store knew the ledger to have, and all leases
together, never exceed the budget: nothing is spent that was not leased. Some is leased ahead, so that few requests ask;
what nobody used goes back with the next renewal. Who does not renew loses it.
"""

from dataclasses import dataclass
from math import inf
from typing import Final

from activator.policy.budget import Spent

LEASED_S: Final = 60.0  # for which the store keeps it for one that is silent
GOOD_S: Final = 50.0  # for which we use it: the store's clock began later than ours, and may be quicker
RENEW_S: Final = 1.0
PARTS: Final = 100  # of a budget, one of which is leased ahead
QUIET_S: Final = 0.2  # between two questions while there is no more to be had


@dataclass(frozen=True, slots=True)
class Question:
    """What the store is asked. Micro-units; `own` is granted in any case, since it is spent."""

    month: str
    known: int  # in the ledger
    own: int
    want: int
    handed_over: int
    sent_s: float


@dataclass(slots=True)
class BudgetLease:
    """Of one tenant. Times are seconds of this process's clock, but `now_us`, the wall's."""

    month: str = ""
    micros: int = 0  # of which `spent` has handed over what it did since
    handed_over: int = 0  # by `spent` in all, when so much was leased
    ends_s: float = -inf
    quiet_until_s: float = -inf
    is_used: bool = False  # since the last renewal

    def covers(self, spent: Spent, micros: int, now_us: int, now_s: float) -> bool:
        """Whether it does for a request that may cost so much. One that covers nothing more lets nobody in."""
        if now_s >= self.ends_s or self.month != month_of(spent, now_us):
            return False
        return spent.own_micros(now_us) + max(1, micros) <= self.left(spent)

    def left(self, spent: Spent) -> int:
        """Of it, for what the ledger lacks."""
        return max(0, self.micros - (spent.handed_over_micros - self.handed_over))

    def ask(self, spent: Spent, budget_micros: int, waiting_micros: int, now_us: int, now_s: float) -> Question:
        """For requests that may cost so much in all. What is given back is not used any more, since the answer may
        come after others had it. Then `told` is owed, unless no answer comes.
        """
        return self._ask(spent, max(1, waiting_micros) + block_of(budget_micros), now_us, now_s)

    def renewal(self, spent: Spent, budget_micros: int, now_us: int, now_s: float) -> Question:
        """Return the question that renews a lease while no request waits: what was used, and a block if used lately."""
        ahead = block_of(budget_micros) if self.is_used else 0
        self.is_used = False
        return self._ask(spent, ahead, now_us, now_s)

    def told(self, question: Question, granted: int, now_s: float) -> None:
        """The store's answer."""
        self.month, self.micros, self.handed_over = question.month, granted, question.handed_over
        self.ends_s = question.sent_s + GOOD_S
        if granted < question.want:
            self.quiet_until_s = now_s + QUIET_S

    def is_idle(self, spent: Spent, now_us: int) -> bool:
        """Whether it tells no more than a new one would."""
        return not (self.micros or self.is_used or spent.own_micros(now_us))

    def _ask(self, spent: Spent, ahead: int, now_us: int, now_s: float) -> Question:
        month, own = month_of(spent, now_us), spent.own_micros(now_us)
        want = own + ahead
        self.micros = min(self.left(spent), want) if month == self.month else 0
        self.handed_over = spent.handed_over_micros
        return Question(month, spent.known_micros(now_us), own, want, spent.handed_over_micros, now_s)


def block_of(budget_micros: int) -> int:
    """How much is leased ahead."""
    return max(1, budget_micros // PARTS)


def month_of(spent: Spent, now_us: int) -> str:
    """YYYY-MM (UTC): the one that the ledger told of, or one beside it."""
    return spent.month_at(now_us)
