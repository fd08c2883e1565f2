"""Replicas that a request was lost with: they rest, then one request at a time finds out whether they answer again.

When is `policy/breaker`'s; a breaker lies with its replica from the first failure until an answer begins.
"""

import asyncio
from collections.abc import Callable

from activator.line import Replica
from activator.policy.breaker import Breaker, BreakerLimits, State


class Resting:
    """Of all replicas. `reopened` is called when one may be tried."""

    def __init__(self, longest_s: float, clock: Callable[[], float], reopened: Callable[[Replica], None]) -> None:
        self._limits = BreakerLimits(1, longest_s=longest_s)  # one broken connection is enough
        self._clock = clock
        self._reopened = reopened
        self.openings = 0

    def __repr__(self) -> str:
        return f"<Resting openings={self.openings}>"

    def failed(self, replica: Replica) -> bool:
        """Give it nothing for a while. False where that was known, or it is gone."""
        if replica.gone:
            return False
        replica.breaker = replica.breaker or Breaker(self._limits)
        if not replica.breaker.failed(self._clock()):
            return False
        self.openings += 1
        self._look(replica)
        return True

    def answered(self, replica: Replica) -> None:
        """It works."""
        if replica.breaker is not None:
            replica.breaker = None
            self._reopened(replica)

    def _look(self, replica: Replica) -> None:
        """Now, and once it has rested."""
        breaker, now = replica.breaker, self._clock()
        if replica.gone or breaker is None:
            return
        if breaker.state(now) is State.OPEN:
            asyncio.get_running_loop().call_later(breaker.remaining_s(now), self._look, replica)
        else:
            self._reopened(replica)
