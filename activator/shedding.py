"""Refuse and count queued requests that are shed. `policy/shed.py` chooses them, `slots.py` the moment."""

import asyncio
from collections import Counter, deque
from collections.abc import Sequence
from typing import Final

from activator.line import Line, Waiter, next_waiter
from activator.policy.admission import RETRY_AFTER_S, QueueLimits
from activator.policy.ask import Ask, Rank
from activator.policy.crowd import Tier
from activator.policy.expected import comes_too_late, wait_s
from activator.policy.fair import FairQueue
from activator.policy.shed import Late, Reason, needs_s, too_late, try_enter
from contracts.errors import Failure
from contracts.traffic_errors import DeadlineTooShort, Displaced, OverShare

SWEEP_S: Final = 0.5  # between two sweeps over the queue of a version, at least
SWEEP_EACH_S: Final = 0.00025  # and for each queued request: a look at one takes a microsecond or two
LONGEST_RETRY_S: Final = 60.0
TOLD: Final = 8  # refusals in one iteration of the loop: each ends a request, and replicas' responses wait meanwhile


class Shedding:
    """Sheds requests of all versions. `counts` has their number by reason and rank."""

    def __init__(self, limits: QueueLimits) -> None:
        self._limits = limits
        self.counts: Counter[tuple[Reason, Rank]] = Counter()
        self._late: deque[tuple[Waiter, Ask, Failure]] = deque()  # they have left the queue, and are refused soon

    def __repr__(self) -> str:
        return f"<Shedding {self.counts.total()}>"

    def refused(self, reason: Reason, ask: Ask) -> None:
        """Count a new request that the throttler refused."""
        self.counts[reason, ask.rank] += 1

    def try_enter(self, line: Line, waiter: Waiter, ask: Ask) -> bool:
        """Enter a full queue in the place of lower requests, which are refused before this returns. False if there are
        none.
        """
        after_s = _emptied_in_s(line)  # before any request leaves: nothing may fail between its leaving and its refusal
        out = try_enter(line.waiting, waiter, ask, waiter.until_s, self._limits)
        if out is None:
            self.refused(Reason.FULL, ask)
            return False
        for tier, place in out:
            if tier is Tier.OVER:
                self._tell(place.entry, place.ask, Reason.OVER_SHARE, OverShare(after_s))
            else:
                self._tell(place.entry, place.ask, Reason.DISPLACED, Displaced(place.ask.rank.name.lower(), after_s))
        return True

    def sweep(self, line: Line, now: float) -> None:
        """Refuse the requests that can't be in time any more, if the last sweep was long enough ago.

        A request that is being given a slot needs two iterations of the loop to go on, so the refusals come after them.
        """
        if now < line.swept_s + max(SWEEP_S, len(line.waiting) * SWEEP_EACH_S):
            return
        line.swept_s = now
        if found := list(too_late(line.waiting, line.pace, line.slots, now)):
            loop = asyncio.get_running_loop()
            loop.call_soon(loop.call_soon, self._clear, line.waiting, found)

    def _clear(self, queue: FairQueue[Waiter], found: Sequence[Late[Waiter]]) -> None:
        """Refuse them in their order, some in each iteration of the loop: of a thousand there may be hundreds."""
        is_telling = bool(self._late)
        for late in found:
            if queue.discard(late.place.entry):
                failure = DeadlineTooShort(late.expected_s, max(0.0, late.remaining_s), False)
                self._late.append((late.place.entry, late.place.ask, failure))
        if not is_telling:
            self._tell_late()

    def next_in_time(self, line: Line, now: float) -> tuple[Waiter, Ask] | None:
        """Return the next request. One that could not end in time is refused while another one may have the slot."""
        slots, free, running = line.slots, line.free, line.pace.running

        def may_take(tenant: str) -> bool:
            return line.shares.may_take(tenant, line.waiting.weight_of(tenant), slots, free, running)

        while (found := next_waiter(line, may_take)) is not None:
            waiter, ask = found
            remaining_s = waiter.until_s - now
            takes_s = needs_s(line.pace, ask, now - waiter.came_s, remaining_s)
            if not comes_too_late(takes_s, remaining_s) or not any(map(may_take, line.waiting.tenants())):
                return found
            line.waiting.settle(ask, 0)
            self._tell(waiter, ask, Reason.LATE, DeadlineTooShort(takes_s, max(0.0, remaining_s), False))
        return None

    def _tell_late(self) -> None:
        for _ in range(min(TOLD, len(self._late))):
            waiter, ask, failure = self._late.popleft()
            self._tell(waiter, ask, Reason.LATE, failure)
        if self._late:
            waiter.granted.get_loop().call_soon(self._tell_late)

    def _tell(self, waiter: Waiter, ask: Ask, reason: Reason, failure: Failure) -> None:
        if not waiter.granted.done():  # else the request is about to leave by itself
            waiter.granted.set_result(failure)
            self.counts[reason, ask.rank] += 1


def _emptied_in_s(line: Line) -> float:
    """Return when a retry is worth it: after the time that the queue takes at its pace, within bounds."""
    expected_s = wait_s(line.waiting.own.tokens, line.pace.tokens_per_s(line.slots))
    return RETRY_AFTER_S if expected_s is None else min(max(expected_s, RETRY_AFTER_S), LONGEST_RETRY_S)
